"""Which packs a prompt could be made of: digests for lookup and reservation.

A pack's identity says what its KV was computed under. A prefill needs no words: `token_digest(ids)`. What decode steps
computed carries their session's settings (engine/provenance.py), so nobody takes it for exact.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

import numpy as np

from kvstore_service.client import HASH_BLOCK_TOKENS, NO_PARENT, PackReservation, PrefixCandidate

EXACT = b""
_TAG = b"headgate KV computed under "


def token_digest(ids: Sequence[int], provenance: bytes = EXACT) -> bytes:
    """SHA-256 of the ids as u32 LE, behind what their KV was computed under unless that is a prefill."""
    tag = _TAG + provenance if provenance else b""
    return hashlib.sha256(tag + np.asarray(ids, dtype="<u4").tobytes()).digest()


def pack_bounds(tokens: int, pack_tokens: int, stored: int = 0) -> list[tuple[int, int]]:
    """(first token, tokens) of the packs that hold a prompt's whole hash blocks behind `stored` tokens; the rest
    belongs to the tail. Packs end at multiples of `pack_tokens`, wherever the first of them starts."""
    end = tokens // HASH_BLOCK_TOKENS * HASH_BLOCK_TOKENS
    starts = [stored, *range((stored // pack_tokens + 1) * pack_tokens, end, pack_tokens)] if stored < end else []
    return [(first, stop - first) for first, stop in itertools.pairwise([*starts, end])]


def reservations(
    ids: Sequence[int], pack_tokens: int, stored: int = 0, parent: bytes = NO_PARENT
) -> list[PackReservation]:
    """The chain of packs that a prefill of `ids` writes behind `stored` tokens, the last of which `parent` holds."""
    return [
        PackReservation(first, count, token_digest(ids[first : first + count]), parent if first == stored else b"")
        for first, count in pack_bounds(len(ids), pack_tokens, stored)
    ]


def candidates(ids: Sequence[int], pack_tokens: int, provenance: bytes = EXACT) -> list[PrefixCandidate]:
    """Every pack that could hold a part of `ids`: exact ones of any number of hash blocks, and the tails that
    sessions of this `provenance` have sealed, one block each. Exact ones come first: of equally long chains
    the store answers the first."""
    own = []
    if provenance:
        for first in range(0, len(ids) - HASH_BLOCK_TOKENS + 1, HASH_BLOCK_TOKENS):
            block_ids = ids[first : first + HASH_BLOCK_TOKENS]
            own.append(PrefixCandidate(first, HASH_BLOCK_TOKENS, token_digest(block_ids, provenance)))
    return exact_candidates(ids, pack_tokens, HASH_BLOCK_TOKENS) + own


def exact_candidates(ids: Sequence[int], pack_tokens: int, unit: int) -> list[PrefixCandidate]:
    """Every exact pack of whole units of `unit` tokens that could hold a part of `ids`; see `pack_bounds`."""
    return [
        PrefixCandidate(first, tokens, token_digest(ids[first : first + tokens]))
        for first in range(0, len(ids), unit)
        for tokens in range(unit, min(pack_tokens - first % pack_tokens, len(ids) - first) + 1, unit)
    ]
