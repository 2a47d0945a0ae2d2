"""What a policy hands to the ring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from decode_worker import _native

RUN_DTYPE = _native.RUN_DTYPE
NO_PAIRS: NDArray[np.uint32] = np.empty((0, 2), np.uint32)


class Op(IntEnum):
    """enum Op in csrc/core/ring.h, as far as policies use it."""

    GATHER = 1
    RANGE = 2
    PROMOTE = 4


class QueryKind(IntEnum):
    """What a label was made of. Queries of different kinds are never compared."""

    NONE = 0
    SPECULATIVE = 1
    TRUE = 2


@dataclass(frozen=True, eq=False)
class Ticket:
    """One post: runs (RUN_DTYPE) and their pairs uint32[n, 2] (record, place)."""

    op: int
    layer: int
    runs: NDArray[np.void]
    pairs: NDArray[np.uint32]


def gather_runs(
    slots: Sequence[int],
    epochs: Sequence[int],
    generations: Sequence[int],
    heads: Sequence[int],
    pairs: Sequence[NDArray[np.uint32]],
) -> tuple[NDArray[np.void], NDArray[np.uint32]]:
    """One GATHER run per entry, over its own pairs."""
    counts = np.array([len(p) for p in pairs], np.uint32)
    runs = np.zeros(len(pairs), RUN_DTYPE)
    runs["slot"], runs["slot_epoch"], runs["generation"] = slots, epochs, generations
    runs["lane"], runs["pair_count"] = heads, counts
    runs["first_pair"][1:] = np.cumsum(counts)[:-1]
    return runs, np.concatenate(pairs) if pairs else NO_PAIRS


def split_gather(
    layer: int, runs: NDArray[np.void], pairs: NDArray[np.uint32], runs_max: int, pairs_max: int
) -> Iterator[Ticket]:
    """The same runs as tickets of at most runs_max runs and pairs_max pairs; a long run becomes several."""
    pieces: list[NDArray[np.void]] = []
    taken: list[NDArray[np.uint32]] = []
    room = pairs_max

    def ticket() -> Ticket:
        joined = np.concatenate(pieces)
        joined["first_pair"][0] = 0
        joined["first_pair"][1:] = np.cumsum(joined["pair_count"])[:-1]
        return Ticket(Op.GATHER, layer, joined, np.ascontiguousarray(np.concatenate(taken)))

    for run in range(len(runs)):
        first, left = int(runs["first_pair"][run]), int(runs["pair_count"][run])
        while left:
            count = min(left, room)
            piece = runs[run : run + 1].copy()
            piece["pair_count"] = count
            pieces.append(piece)
            taken.append(pairs[first : first + count])
            first, left, room = first + count, left - count, room - count
            if room == 0 or len(pieces) == runs_max:
                yield ticket()
                pieces, taken, room = [], [], pairs_max
    if pieces:
        yield ticket()
