"""Which packs a prompt could be made of: token digests for lookup and reservation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from kvstore_service.client import NO_PARENT, PackReservation, PrefixCandidate

HASH_BLOCK_TOKENS = 256


def token_digest(ids: Sequence[int]) -> bytes:
    """SHA-256 of the ids as u32 LE."""
    return hashlib.sha256(np.asarray(ids, dtype="<u4").tobytes()).digest()


def pack_bounds(tokens: int, pack_tokens: int) -> list[tuple[int, int]]:
    """(first token, tokens) of the packs that hold a prompt's whole hash blocks; the rest belongs to the tail."""
    stored = tokens // HASH_BLOCK_TOKENS * HASH_BLOCK_TOKENS
    return [(first, min(pack_tokens, stored - first)) for first in range(0, stored, pack_tokens)]


def reservations(ids: Sequence[int], pack_tokens: int) -> list[PackReservation]:
    """The chain of packs that a prefill of `ids` writes."""
    bounds = pack_bounds(len(ids), pack_tokens)
    return [
        PackReservation(first, count, token_digest(ids[first : first + count]), parent=NO_PARENT if first == 0 else b"")
        for first, count in bounds
    ]


def candidates(ids: Sequence[int], pack_tokens: int) -> list[PrefixCandidate]:
    """Every pack that could hold a part of `ids`: sealed tails make packs of any number of hash blocks."""
    blocks = len(ids) // HASH_BLOCK_TOKENS
    per_pack = pack_tokens // HASH_BLOCK_TOKENS
    found = []
    for block in range(blocks):
        first = block * HASH_BLOCK_TOKENS
        for count in range(1, min(per_pack, blocks - block) + 1):
            tokens = count * HASH_BLOCK_TOKENS
            found.append(PrefixCandidate(first, tokens, token_digest(ids[first : first + tokens])))
    return found
