"""What a step's error word says."""

from __future__ import annotations

from decode_worker import _native
from decode_worker.gpu.kernels import wishes
from decode_worker.gpu.sync import LATE, POISONED

_ERRORS: dict[int, tuple[type[_native.RingError], str]] = {
    LATE.value: (_native.RingTimeout, "a ticket is not done within the deadline; the ring is poisoned"),
    POISONED.value: (_native.RingPoisoned, "the ring is poisoned"),
    wishes.NO_CREDIT: (_native.NoCredit, "the store has not consumed an earlier ticket within the deadline"),
    wishes.TOO_LARGE: (_native.RingError, "a layer's misses do not fit a ticket of the ring: raise its runs or pairs"),
}


def raise_for(word: int) -> None:
    """RingError, unless it is 0."""
    if word:
        kind, what = _ERRORS[word]
        raise kind(what)
