"""KVDrive §7.3d, replayed: a share of DRAM for the segments (layer and lane) whose runs waited for the disk most often.

Those segments lie there whole, and are never missed; a policy has the rest of the tier for the others.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bench.placement import Hits
from bench.traces import Trace
from kvstore_service._native import replay

SHARE = 0.5
LANES_MAX = 1 << 16  # `lane` is of 16 bits


def replay_with_stalled_kept(trace: Trace, policy: str, frames: int, profiled: int) -> Hits:
    """Of each access. `profiled`: so many accesses, the first ones, say which segments stall under the policy alone."""
    keys, segment = trace.keys, segments(trace)
    waited = replay(policy, frames, keys)[:profiled] == 0
    runs = np.unique(np.stack([tickets(trace)[:profiled][waited], segment[:profiled][waited]]), axis=1)
    stalled, stalls = np.unique(runs[1], return_counts=True)
    room = int(SHARE * frames)
    kept, left = np.zeros(len(keys), bool), frames
    for worst in stalled[np.argsort(-stalls, kind="stable")]:
        its = segment == worst
        extents = len(np.unique(keys[its]))
        if extents <= room:
            room, left = room - extents, left - extents
            kept |= its
    hits = np.ones(len(keys), bool)
    hits[~kept] = replay(policy, left, keys[~kept])
    return hits


def waiting_tickets(trace: Trace, hits: Hits, first: int) -> float:
    """Part of the tickets from access `first` on that something was missing for."""
    ticket = tickets(trace)[first:]
    return len(np.unique(ticket[~hits[first:]])) / len(np.unique(ticket))


def segments(trace: Trace) -> NDArray[np.int64]:
    """Of each access: layer and lane."""
    return trace.accesses["layer"].astype(np.int64) * LANES_MAX + trace.accesses["lane"]


def tickets(trace: Trace) -> NDArray[np.int64]:
    """Of each access: a number that changes where the next one is of another layer or session."""
    session = trace.accesses[["worker", "slot", "slot_epoch", "layer"]]
    return np.concatenate([[0], np.cumsum(session[1:] != session[:-1])])
