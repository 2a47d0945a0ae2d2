"""The constants of docs/qsac.md for one model and one configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decode_worker.window.geometry import WindowGeometry

SEAL_TOKENS = 256
STAGGER = 16


@dataclass(frozen=True, eq=False)
class PolicySettings:
    """`budget`: a fraction of N up to 1, above that a number of tokens. `slack`: free places as a part of k."""

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
    budget: float = 0.1
    sink: int = 4
    recent: int = 64
    tail: int = 576
    slack: float = 0.125
    cos_floor: float = 1e-3
    speculative: bool = True

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

    def selected(self, stored: int) -> int:
        """k for N = stored at bind."""
        wanted = math.ceil(self.budget * stored) if self.budget <= 1 else int(self.budget)
        return min(max(1, wanted), max(1, stored - self.sink))

    def limit(self, stored: int, position: int) -> int:
        """S: tokens below it may be selected at this position."""
        return max(min(self.sink, stored), min(stored, position - self.recent))

    def geometry(self, stored: int, resident_places: int) -> WindowGeometry:
        k = self.selected(stored)
        return WindowGeometry(
            layers=self.layers,
            kv_heads=self.kv_heads,
            record_bytes=self.record_bytes,
            label_bytes=self.group * self.head_dim * 4,
            sink=self.sink,
            k=k,
            slack=math.ceil(k * self.slack),
            tail=self.tail,
            resident=self.resident,
            resident_places=resident_places,
        )
