"""What stays in a head's window, and which unit goes when another one needs its place."""

from dataclasses import dataclass
from enum import IntEnum

from decode_worker.kernels.registry import Registry


class Stamp(IntEnum):
    """What a selection does to the stamp of a unit that is held; the lowest stamp goes first, ties to the lower place.
    A unit that arrives is stamped with the step, or under COUNT with 1."""

    NONE = 0
    STEP = 1
    COUNT = 2


@dataclass(frozen=True)
class Cache:
    """`keeps`: units stay until their place is wanted; else the window forgets what no set names. `whole`: a miss
    fetches its whole set, whatever the window holds of it."""

    keeps: bool
    whole: bool = False
    stamp: Stamp = Stamp.NONE


CACHES: Registry[Cache] = Registry("cache")
