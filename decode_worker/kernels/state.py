"""The state of every (layer, slot, KV head) in tensors that a step never allocates nor moves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from decode_worker.policy.counters import Counters
from decode_worker.policy.plan import QueryKind
from decode_worker.policy.settings import STAGGER, PolicySettings
from decode_worker.window.geometry import WindowGeometry


@dataclass(frozen=True)
class StateShape:
    """`places`: the longest list of attended places. `units`: the most units of `unit` records that a window holds."""

    layers: int
    slots: int
    heads: int
    group: int
    head_dim: int
    places: int
    units: int
    unit: int
    sink: int
    recent: int
    tail: int


class HeadState:
    """One owner of all that the kernels read and change. Names and dtypes are those of csrc/cpu/head_state.h.

    What a set consists of has two sides, [2, layers, slots, heads, ...]: `parity` names the one in use, a fetch writes
    the other, and a commit is one flip. So a set, its label and its cover change together or not at all.

    held, held_places   int32[.., units], -1 behind `held_count`: units in the window, by id, and each one's first place
    places              int32[.., places], -1 behind `count`: what attention reads, in order of the records' ids
    label               float32[.., g, d], of kind `label_kind` (QueryKind); cover, generation: int32
    """

    def __init__(self, settings: PolicySettings, device: torch.device | str = "cpu") -> None:
        largest = settings.geometry(settings.context, settings.context)
        places = int(largest.selected.max())
        units = (int(largest.capacity.max()) + settings.spare_max(settings.context)) // settings.unit
        if settings.resident.all():  # nothing is ever selected
            places = units = 1
        self.shape = StateShape(
            settings.layers, settings.slots, settings.kv_heads, settings.group, settings.head_dim,
            places, units, settings.unit, settings.sink, settings.recent, settings.tail,
        )  # fmt: skip
        heads, lanes, slots = self._grid, (settings.layers, settings.kv_heads), (settings.slots,)
        sides = (2, *heads)
        with torch.device(device):
            self.held = torch.full((*sides, units), -1, dtype=torch.int32)
            self.held_places = torch.full((*sides, units), -1, dtype=torch.int32)
            self.held_count = torch.zeros(sides, dtype=torch.int32)
            self.places = torch.full((*sides, places), -1, dtype=torch.int32)
            self.count = torch.zeros(sides, dtype=torch.int32)
            self.label = torch.zeros((*sides, settings.group, settings.head_dim), dtype=torch.float32)
            self.label_kind = torch.zeros(sides, dtype=torch.int8)
            self.cover = torch.zeros(sides, dtype=torch.int32)
            self.generation = torch.zeros(sides, dtype=torch.int32)

            self.parity = torch.zeros(heads, dtype=torch.uint8)
            self.issued = torch.zeros(heads, dtype=torch.int32)  # the latest generation that was asked for
            self.stamp = torch.zeros((*heads, units), dtype=torch.int32)  # of each unit place (policy/cache)
            self.base = torch.zeros(heads, dtype=torch.int64)  # byte offset of place 0
            self.own = torch.zeros(heads, dtype=torch.int64)  # of what the worker writes: a tail, or a resident lane
            self.selected = torch.zeros(heads, dtype=torch.int32)  # k, in units
            self.capacity = torch.zeros(heads, dtype=torch.int32)  # in units
            self.chosen = torch.zeros(heads, dtype=torch.int64)  # units that selections took so far
            self.missing = torch.zeros(heads, dtype=torch.int64)  # of those, what had to be fetched

            layer, head = np.indices(lanes)
            stagger = (layer * settings.kv_heads + head) % STAGGER
            self.tau = torch.tensor(settings.tau, dtype=torch.float32)
            self.weights = torch.tensor(settings.weights, dtype=torch.float32)
            self.resident = torch.tensor(settings.resident, dtype=torch.uint8)
            self.forced_from = torch.tensor(settings.tail - 1 - stagger, dtype=torch.int32)  # of position - cover

            self.stored = torch.zeros(slots, dtype=torch.int32)  # N
            self.first_position = torch.full(slots, -1, dtype=torch.int32)  # the first step's, which is in no ratio
            self.epoch = torch.zeros(slots, dtype=torch.int64)
            self.fault = torch.zeros(slots, dtype=torch.int32)  # of the present step; 0: none
            self.counters = torch.zeros(len(Counters.NAMES), dtype=torch.int64)

    @property
    def _grid(self) -> tuple[int, int, int]:
        return self.shape.layers, self.shape.slots, self.shape.heads

    def bind(self, slot: int, geometry: WindowGeometry, offset: int, cover: int, position: int) -> None:
        """A session's first state: every head without a set. offset: bytes; position: its next token's."""
        self.reset(slot)
        unit = self.shape.unit
        if not self.resident.all() and (
            geometry.selected.max() > self.shape.places or geometry.capacity.max() > self.shape.units * unit
        ):
            raise ValueError("a session's window is larger than `context` allows")
        self.cover[:, :, slot] = cover
        self.base[:, slot] = torch.from_numpy(geometry.offsets.astype(np.int64)) + offset
        self.own[:, slot] = torch.from_numpy(geometry.own_offsets.astype(np.int64)) + offset
        self.selected[:, slot] = torch.from_numpy(geometry.selected // unit)
        self.capacity[:, slot] = torch.from_numpy(geometry.capacity // unit)
        self.first_position[slot] = position

    def reset(self, slot: int) -> None:
        """Nothing of a slot outlives its session but the generations, which only grow."""
        for sides in (self.held_count, self.count, self.label, self.label_kind, self.cover):
            sides[:, :, slot] = 0
        for sides in (self.held, self.held_places, self.places):
            sides[:, :, slot] = -1
        self.generation[:, :, slot] = self.issued[:, slot]
        self.stamp[:, slot] = 0
        self.parity[:, slot] = 0
        self.selected[:, slot] = self.capacity[:, slot] = 0
        self.stored[slot], self.first_position[slot], self.epoch[slot] = 0, -1, 0

    def limit(self, slot: int, position: int) -> int:
        """S: tokens below it may be selected at this position."""
        stored, shape = int(self.stored[slot]), self.shape
        return max(min(shape.sink, stored), min(stored, position - shape.recent))

    def side(self, layer: int, slot: int, head: int) -> tuple[int, int, int, int]:
        """The index of a head's side in use."""
        return int(self.parity[layer, slot, head]), layer, slot, head

    def current_cover(self, slot: int) -> torch.Tensor:
        """int32[layers, heads]."""
        return self._in_use(self.cover, slot)

    def current_labels(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Labels float32[layers, heads, g, d] and their kinds int8[layers, heads]."""
        return self._in_use(self.label, slot), self._in_use(self.label_kind, slot)

    def _in_use(self, sides: torch.Tensor, slot: int) -> torch.Tensor:
        first, second = sides[:, :, slot]
        parity = self.parity[:, slot].view(*self.parity[:, slot].shape, *[1] * (first.dim() - 2))
        return torch.where(parity == 0, first, second)

    def has_label(self, layer: int, slot: int, head: int) -> bool:
        return int(self.label_kind[self.side(layer, slot, head)]) != QueryKind.NONE
