"""What a policy counts since it was made."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Counters:
    """`steps` advances once per step; the others per head and lookup.

    The first step after a bind is in none of `lookups`, `hits` and `forced`: its labels are not the session's own.
    """

    steps: int = 0
    lookups: int = 0  # on heads that are not resident
    hits: int = 0
    forced: int = 0  # misses because the tail was nearly full
    records_moved: int = 0  # committed
    stale: int = 0  # lookups that wanted a new set and went on with the old one
    cleared: int = 0  # sets that were given up before their successor arrived
    errors: int = 0  # fetches that failed

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.lookups if self.lookups else 0.0

    def as_dict(self) -> dict[str, float]:
        return {**asdict(self), "hit_ratio": self.hit_ratio}
