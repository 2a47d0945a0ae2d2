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
    of_each = trace.extents // len(np.unique(segment))
    count = min(int(SHARE * frames) // of_each, len(stalled))
    kept = np.isin(segment, stalled[np.argsort(-stalls, kind="stable")][:count])
    hits = np.ones(len(keys), bool)
    hits[~kept] = replay(policy, frames - count * of_each, keys[~kept])
    return hits


def waiting_tickets(trace: Trace, hits: Hits, first: int) -> float:
    """Part of the decode steps' tickets from access `first` on that something was missing for."""
    decoding = trace.accesses["bulk"][first:] == 0
    ticket = tickets(trace)[first:]
    return len(np.unique(ticket[decoding & ~hits[first:]])) / len(np.unique(ticket[decoding]))


def segments(trace: Trace) -> NDArray[np.int64]:
    """Of each access: layer and lane."""
    return trace.accesses["layer"].astype(np.int64) * LANES_MAX + trace.accesses["lane"]


def tickets(trace: Trace) -> NDArray[np.int64]:
    """Of each access: a number of its ticket, of which `run` has the sequence."""
    accesses = trace.accesses
    names = ("worker", "slot", "slot_epoch", "layer", "bulk")
    columns = np.stack([*(accesses[name].astype(np.int64) for name in names), accesses["run"].astype(np.int64) >> 16])
    return np.unique(columns, axis=1, return_inverse=True)[1].ravel()
