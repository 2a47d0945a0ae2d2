"""The constants of docs/qsac.md for one model and one configuration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decode_worker.policy.cache.base import CACHES, Cache
from decode_worker.policy.reuse.base import REUSES, Reuse
from decode_worker.window.geometry import WindowGeometry

SEAL_TOKENS = 256
STAGGER = 16
SPARE_MAX = 4  # a head's share of the slack beside the average


@dataclass(frozen=True, eq=False)
class PolicySettings:
    """`budget`: a fraction of N up to 1, above that a number of tokens. `slack`: places beside the budget's, as a part
    of them. `attended`: the selected part of all places; None: the budget's. `unit`: records that move together."""

    slots: int
    layers: int
    kv_heads: int
    group: int
    head_dim: int
    record_bytes: int
    context: int  # declared maximum of tokens of a session
    tau: NDArray[np.float32]  # [layers, H]
    weights: NDArray[np.float32]  # [layers, H, g]
    resident: NDArray[np.bool_]  # [layers, H]
    reuse: Reuse = REUSES["label"]
    cache: Cache = CACHES["exact_set"]
    attended: float | None = None
    unit: int = 1
    budget: float = 0.1
    sink: int = 4
    recent: int = 64
    tail: int = 576
    slack: float = 0.125
    cos_floor: float = 1e-3
    speculative: bool = True
    own_bytes: int = 0  # of a record that no pack holds; 0: as record_bytes

    def __post_init__(self) -> None:
        grid = (self.layers, self.kv_heads)
        for name, shape in (("tau", grid), ("resident", grid), ("weights", (*grid, self.group))):
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name} has shape {getattr(self, name).shape}, expected {shape}")
        if self.tail < self.recent + SEAL_TOKENS + STAGGER:
            raise ValueError(
                f"tail={self.tail}: must be at least recent + {SEAL_TOKENS + STAGGER} = "
                f"{self.recent + SEAL_TOKENS + STAGGER}, or a tail is full before it can be sealed"
            )
        if SEAL_TOKENS % self.unit:
            raise ValueError(f"unit={self.unit}: packs hold multiples of {SEAL_TOKENS} tokens; use a power of two")

    def limit(self, stored: int, position: int) -> int:
        """S: tokens below it may be selected at this position."""
        return max(min(self.sink, stored), min(stored, position - self.recent))

    def budgeted(self, stored: int) -> int:
        """Places that the budget gives a head for N = stored at bind."""
        wanted = np.ceil(self.budget * stored) if self.budget <= 1 else self.budget
        return int(min(max(1, wanted), max(1, stored - self.sink)))

    def spare(self, stored: int) -> int:
        """Places beside the budget's, of each head on average."""
        return int(np.ceil(self.budgeted(stored) * self.slack))

    def spare_max(self, stored: int) -> int:
        """And at most, of one head."""
        return SPARE_MAX * self.spare(stored)

    def geometry(self, stored: int, resident_places: int, spare: NDArray[np.int32] | None = None) -> WindowGeometry:
        """A session's window for N = stored at bind. spare: int32[layers, H] places beside the budget's, in all no more
        than the slack's of every head; None gives each head the same."""
        budgeted = self.budgeted(stored)
        grid = (self.layers, self.kv_heads)
        places = budgeted + (np.full(grid, self.spare(stored)) if spare is None else spare)
        capacity = -(-places // self.unit) * self.unit
        selected = np.full(grid, budgeted) if self.attended is None else np.maximum(1, capacity * self.attended)
        return WindowGeometry(
            layers=self.layers,
            kv_heads=self.kv_heads,
            record_bytes=self.record_bytes,
            label_bytes=self.group * self.head_dim * 4,
            sink=self.sink,
            selected=(-(-selected.astype(np.int64) // self.unit) * self.unit).astype(np.int32),
            capacity=capacity.astype(np.int32),
            tail=self.tail,
            resident=self.resident,
            resident_places=resident_places,
            unit=self.unit,
            own_bytes=self.own_bytes,
        )
