"""What bounds a policy: where extents should have been, had the trace been known beforehand, or all of its past."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Hits = NDArray[np.bool_]


def belady(keys: Keys, frames: int) -> Hits:
    """Of each access, by the extent's key: the frame that is given up holds what is wanted again last (MIN, 1966).

    Every extent that is wanted gets a frame, as in the tier, which begins empty."""
    after = next_uses(keys)
    held: dict[int, int] = {}  # key -> its next use
    farthest: list[tuple[int, int]] = []  # (-next use, key), with entries that are out of date
    hits = np.zeros(len(keys), bool)
    for i, (key, following) in enumerate(zip(keys.tolist(), after.tolist(), strict=True)):
        hits[i] = key in held
        if not hits[i] and len(held) == frames:
            while True:
                use, other = heapq.heappop(farthest)
                if held.get(other) == -use:
                    break
            del held[other]
        held[key] = following
        heapq.heappush(farthest, (-following, key))
    return hits


def next_uses(keys: Keys) -> NDArray[np.int64]:
    """Of each access the place of the next one of its key; for the last ones a place behind all, each its own."""
    count = len(keys)
    order = np.argsort(keys, kind="stable")
    same = keys[order[1:]] == keys[order[:-1]]
    after = count + np.arange(count)
    after[order[:-1][same]] = order[1:][same]
    return after


def best_static(keys: Keys, frames: int, weights: NDArray[np.integer[Any]] | None = None) -> Hits:
    """The extents that are wanted most often, or whose accesses weigh most, lie in DRAM from the start, and stay."""
    extents, where = np.unique(keys, return_inverse=True)
    counts = np.bincount(where, weights)
    kept = np.zeros(len(extents), bool)
    kept[np.argsort(counts)[::-1][:frames]] = True
    chosen: Hits = kept[where]
    return chosen


def most_used_so_far(keys: Keys, frames: int) -> Hits:
    """What counting can do that forgets nothing: another extent gets the place of the one that was wanted least as soon
    as it was wanted more often. The places begin empty."""
    wanted: dict[int, int] = {}
    held: set[int] = set()
    least: list[tuple[int, int]] = []  # (times wanted, key) of those held, some with what they were before
    hits = np.zeros(len(keys), bool)
    for i, key in enumerate(keys.tolist()):
        wanted[key] = wanted.get(key, 0) + 1
        hits[i] = key in held
        if hits[i]:
            continue
        if len(held) == frames:
            while least[0][0] != wanted[least[0][1]]:
                heapq.heapreplace(least, (wanted[least[0][1]], least[0][1]))
            if wanted[key] <= least[0][0]:
                continue
            held.remove(heapq.heappop(least)[1])
        held.add(key)
        heapq.heappush(least, (wanted[key], key))
    return hits
