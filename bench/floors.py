"""The least time that a decode step can take, from what it must read and move and the rates of a device.

Nothing is measured here: a step reads the weights once, those of a layer's query twice where it is predicted a layer
ahead, for each session what it attends to, and the codes of the heads that select; what misses takes the bus meanwhile.
A step that reaches its floor does nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from decode_worker.policy.cache.base import CACHES
from decode_worker.policy.presets import PRESETS
from decode_worker.policy.settings import PolicySettings
from decode_worker.retrieval.hash import BITS
from decode_worker.synthetic.checkpoint import Shape
from decode_worker.window.geometry import WindowGeometry

ELEMENT_BYTES = 2  # of weights, K and V: bfloat16
CODE_BYTES = BITS // 8
MAP_BYTES = 4  # a record's token, which selection and delta read beside its code
FULL = "full"
# Launches of a layer: of the products, least fusion, and of its query ahead of them (norm, product, rotation); of ours
# (docs/gpu.md), where heads select and where they do not.
PRODUCT_LAUNCHES, AHEAD_LAUNCHES, SELECTING_LAUNCHES, RESIDENT_LAUNCHES = 9, 3, 6, 2


@dataclass(frozen=True)
class Rates:
    """GB/s of the device's memory, reading and writing counted alike, and of the bus towards it; microseconds that a
    launch in a graph takes though it does nothing. `source`: where they come from."""

    memory_gbps: float
    bus_gbps: float
    launch_us: float
    source: str

    @property
    def break_even(self) -> float:
        """missing * budget * delta up to which what misses takes the bus no longer than reading all KV takes memory."""
        return self.bus_gbps / self.memory_gbps


H200 = Rates(4300, 55, 1.0, "assumed, an H200 on PCIe 5.0 x16")
H100 = Rates(3000, 55, 1.0, "assumed, an H100 SXM on PCIe 5.0 x16")


@dataclass(frozen=True)
class Load:
    """What sessions ask for. missing: part of the offloaded heads that select in a step under a policy that reuses
    sets. delta: part of a selection that is not held. budget: of the stored tokens. lru_missing: part of a selection
    that an LRU cache of twice its size does not hold (RetroInfer's, of three times, misses 7-10 %: LiteCache's table 3;
    of once 30 %: §2.3.1)."""

    missing: float = 0.21
    delta: float = 0.5
    budget: float = 0.1
    lru_missing: float = 0.09


@dataclass(frozen=True)
class Model:
    """Sizes of a shape, in elements."""

    layers: int
    hidden: int
    ffn: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @classmethod
    def of(cls, shape: Shape) -> Model:
        keys = (
            "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
            "head_dim", "vocab_size",
        )  # fmt: skip
        return cls(*(int(shape[key]) for key in keys))

    @property
    def layer_weights(self) -> int:
        """Matrices alone: norms and biases are a thousandth of them."""
        attention = (self.q_heads + 2 * self.kv_heads) * self.head_dim + self.q_heads * self.head_dim
        return self.hidden * (attention + 3 * self.ffn)

    @property
    def read_bytes(self) -> int:
        """Of the weights, in each step: all but the embedding."""
        return ELEMENT_BYTES * (self.layers * self.layer_weights + self.hidden * self.vocab)

    @property
    def query_bytes(self) -> int:
        """Of the matrix that makes a layer's query."""
        return ELEMENT_BYTES * self.hidden * self.q_heads * self.head_dim

    @property
    def held_bytes(self) -> int:
        return self.read_bytes + ELEMENT_BYTES * self.hidden * self.vocab

    @property
    def record_bytes(self) -> int:
        return 2 * self.head_dim * ELEMENT_BYTES

    @property
    def kv_token_bytes(self) -> int:
        return self.layers * self.kv_heads * self.record_bytes

    def prefill_flops(self, tokens: int) -> float:
        """Of a prompt: matrices, and causal attention over half of all pairs."""
        attention = 2 * tokens**2 * self.layers * self.q_heads * self.head_dim
        return 2.0 * tokens * self.layers * self.layer_weights + attention


@dataclass(frozen=True)
class Cell:
    """One step: `batch` sessions behind `context` stored tokens each, layer 0 resident."""

    model: Model
    policy: str
    batch: int
    context: int
    load: Load = Load()

    # --- what it takes, in bytes ---

    @cached_property
    def geometry(self) -> WindowGeometry:
        """Of one session's window."""
        model, preset = self.model, PRESETS[self.policy]
        grid = (model.layers, model.kv_heads)
        resident = np.zeros(grid, np.bool_)
        resident[0] = True
        group = model.q_heads // model.kv_heads
        settings = PolicySettings(
            slots=1, layers=model.layers, kv_heads=model.kv_heads, group=group, head_dim=model.head_dim,
            record_bytes=model.record_bytes, context=self.context, tau=np.zeros(grid, np.float32),
            weights=np.ones((*grid, group), np.float32), resident=resident | preset.resident,
            cache=CACHES[preset.cache], attended=preset.attended, unit=preset.unit, budget=self.load.budget,
        )  # fmt: skip
        return settings.geometry(self.context, self.context)

    @property
    def offloaded_heads(self) -> int:
        """Of one session, over all layers."""
        return int((~self.geometry.resident).sum())

    @property
    def missing(self) -> float:
        """Part of the offloaded heads that select in a step."""
        return self.load.missing if PRESETS[self.policy].reuse == "label" else 1.0

    @property
    def selecting_layers(self) -> int:
        """Layers whose query is predicted ahead of them. Layer 0, which could not be, is resident."""
        return int((~self.geometry.resident).any(1).sum())

    @property
    def weight_bytes(self) -> int:
        """A predicted query comes a layer before the true one, of whose other matrices no cache holds it."""
        return self.model.read_bytes + self.selecting_layers * self.model.query_bytes

    @property
    def attended_bytes(self) -> int:
        """Records that attention reads; the newest tokens, a fixed number, are left out."""
        resident = self.geometry.resident
        records = int(resident.sum()) * self.context + int(self.geometry.selected[~resident].sum())
        return self.batch * records * self.model.record_bytes

    @property
    def scanned_bytes(self) -> float:
        """Codes and record maps that selections read."""
        return self.batch * self.missing * self.offloaded_heads * self.context * (CODE_BYTES + MAP_BYTES)

    @property
    def moved_bytes(self) -> float:
        """Records that take the bus."""
        cache = CACHES[PRESETS[self.policy].cache]
        part = 1.0 if cache.whole else self.load.lru_missing if cache.keeps else self.load.delta
        selected = int(self.geometry.selected[~self.geometry.resident].sum())
        return self.batch * self.missing * part * selected * self.model.record_bytes

    @property
    def memory_bytes(self) -> float:
        """All that a step reads of the device's memory, and what arrives there."""
        return self.weight_bytes + self.attended_bytes + self.scanned_bytes + self.moved_bytes

    @property
    def device_bytes(self) -> int:
        """What must fit: weights, windows with labels and place lists, and the index."""
        index = self.offloaded_heads * self.context * (CODE_BYTES + MAP_BYTES)
        return self.model.held_bytes + self.batch * (self.geometry.device_bytes + index)

    # --- what that takes at least, in microseconds ---

    def memory_us(self, rates: Rates) -> float:
        return self.memory_bytes / rates.memory_gbps / 1e3

    def bus_us(self, rates: Rates) -> float:
        return self.moved_bytes / rates.bus_gbps / 1e3

    def launches(self) -> int:
        selecting = self.selecting_layers
        ours = selecting * (AHEAD_LAUNCHES + SELECTING_LAUNCHES) + (self.model.layers - selecting) * RESIDENT_LAUNCHES
        return ours + self.model.layers * PRODUCT_LAUNCHES

    def step_us(self, rates: Rates) -> float:
        """What misses arrives while other layers compute, so the slower of the two decides."""
        return max(self.memory_us(rates) + self.launches() * rates.launch_us, self.bus_us(rates))

    def tokens_per_s(self, rates: Rates) -> float:
        return self.batch / self.step_us(rates) * 1e6

    def bound(self, rates: Rates) -> str:
        return "bus" if self.bus_us(rates) == self.step_us(rates) else "memory"


def most_delta(cell: Cell, rates: Rates, step_us: float) -> float:
    """The largest delta at which what a reusing policy misses takes the bus no longer than `step_us`; above 1: any."""
    per_delta_us = cell.bus_us(rates) / cell.load.delta
    return step_us / per_delta_us if per_delta_us else float("inf")


def break_even(cell: Cell, rates: Rates, step_us: float) -> float:
    """missing * budget * delta, the part of the offloaded heads' KV that takes the bus, at which it takes `step_us`."""
    offloaded_bytes = cell.batch * cell.offloaded_heads * cell.context * cell.model.record_bytes
    return step_us * rates.bus_gbps * 1e3 / offloaded_bytes


def crossing(points: Sequence[tuple[float, float]], level: float) -> float | None:
    """Where a line through (x, y), in order of x, first reaches `level` from below; None where it does not."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if y0 <= level < y1:
            return x0 + (x1 - x0) * (level - y0) / (y1 - y0)
    return None
