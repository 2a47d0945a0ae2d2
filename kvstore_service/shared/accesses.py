"""Traces of accesses, as `kvctl trace` writes them: records of the fields that the data plane names."""

import numpy as np
from numpy.typing import NDArray

# What an access is of, but for its time: an extent of one run. `run` is one of the latest there.
RUN = ("worker", "slot", "slot_epoch", "layer", "lane", "bulk", "run")
EXTENT_OF_RUN = (*RUN, "pack", "extent")


def joined(accesses: NDArray[np.void]) -> NDArray[np.void]:
    """One access for each extent of a run, in the order in which they began: a run is served in steps, and an extent
    where one ends is told of twice."""
    if not len(accesses):
        return accesses
    order = np.lexsort([accesses[name] for name in EXTENT_OF_RUN])
    ordered = accesses[order]
    begins = np.ones(len(ordered), bool)
    begins[1:] = np.any([ordered[name][1:] != ordered[name][:-1] for name in EXTENT_OF_RUN], axis=0)
    first = np.flatnonzero(begins)
    found = ordered[first]
    for name, join in (("wanted", np.bitwise_or), ("records", np.add), ("hit", np.bitwise_and)):
        found[name] = join.reduceat(ordered[name], first)
    return found[np.argsort(order[first])]
