"""What the steps of an engine have counted since it was made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Counters:
    """`steps` advances once per step; the others per head and lookup.

    The first step after a bind is in none of `lookups`, `hits` and `forced`: its labels are not the session's own.
    """

    steps: int
    lookups: int  # on heads that are not resident
    hits: int
    forced: int  # misses because the tail was nearly full
    records_moved: int  # committed
    stale: int  # lookups that wanted a new set and went on with the old one
    cleared: int  # sets that were given up before their successor arrived
    errors: int  # fetches that failed
    hinted: int  # records that the daemon was asked to read ahead
    hints_dropped: int  # of these, what found no room in the ring

    # Places in HeadState.counters, as enum class Counter in csrc/cpu/head_state.h orders them.
    NAMES: ClassVar = (
        "steps", "lookups", "hits", "forced", "records_moved", "stale", "cleared", "errors", "hinted", "hints_dropped",
    )  # fmt: skip

    @classmethod
    def of(cls, values: Sequence[int]) -> Counters:
        return cls(*values)

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.lookups if self.lookups else 0.0

    def as_dict(self) -> dict[str, float]:
        return {**asdict(self), "hit_ratio": self.hit_ratio}
