"""The state of every (layer, slot, head), in arrays that the kernels read without a copy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from decode_worker.policy.plan import Delta, QueryKind
from decode_worker.policy.settings import STAGGER, PolicySettings
from decode_worker.window.geometry import WindowGeometry


class HeadState:
    """Arrays are [layers, slots, H, ...]. A place list is in record order and lies next to its `records`.

    Places of a head's set, of an open delta, and the free ones are disjoint: a place in none of the first two is free.
    """

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        grid = (settings.layers, settings.slots, settings.kv_heads)
        largest = settings.geometry(settings.context, settings.context)
        self.cover: NDArray[np.int32] = np.zeros(grid, np.int32)
        self.label: NDArray[np.float32] = np.zeros((*grid, settings.group, settings.head_dim), np.float32)
        self.label_kind: NDArray[np.int8] = np.zeros(grid, np.int8)
        self.records: NDArray[np.int32] = np.full((*grid, largest.k), -1, np.int32)
        self.places: NDArray[np.int32] = np.full((*grid, largest.k), -1, np.int32)
        self.counts: NDArray[np.int32] = np.zeros(grid, np.int32)
        self.free: NDArray[np.bool_] = np.zeros((*grid, largest.k + largest.slack), bool)
        self.base: NDArray[np.uint64] = np.zeros(grid, np.uint64)
        self.generation: NDArray[np.uint32] = np.zeros(grid, np.uint32)  # of the committed set
        self.issued: NDArray[np.uint32] = np.zeros(grid, np.uint32)  # the latest generation that a delta was made for
        self.open: NDArray[np.bool_] = np.zeros(grid, bool)  # a delta waits for its run
        self.first_tail: NDArray[np.int32] = np.zeros(settings.slots, np.int32)
        layer, head = np.indices((settings.layers, settings.kv_heads))
        stagger = (layer * settings.kv_heads + head) % STAGGER
        self.forced_from: NDArray[np.int32] = (settings.tail - 1 - stagger).astype(
            np.int32
        )  # [layers, H], of position - cover

    def bind(self, slot: int, geometry: WindowGeometry, offset: int, cover: int) -> None:
        self.reset(slot)
        if geometry.k > self.places.shape[3] or geometry.k + geometry.slack > self.free.shape[3]:
            raise ValueError(f"k={geometry.k} exceeds what context={self._settings.context} allows")
        self.cover[:, slot] = cover
        self.free[:, slot, :, : geometry.k + geometry.slack] = True
        self.base[:, slot] = geometry.offsets + np.uint64(offset)
        self.first_tail[slot] = geometry.first_tail

    def reset(self, slot: int) -> None:
        """Nothing of a slot outlives its session but the generations, which only grow."""
        for array in (self.cover, self.label, self.label_kind, self.counts, self.free, self.open):
            array[:, slot] = 0
        self.records[:, slot] = -1
        self.places[:, slot] = -1
        self.generation[:, slot] = self.issued[:, slot]

    def held(self, layer: int, slot: int, head: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Records (sorted) and places of a head's set."""
        count = self.counts[layer, slot, head]
        return self.records[layer, slot, head, :count], self.places[layer, slot, head, :count]

    def free_places(self, layer: int, slot: int, head: int) -> NDArray[np.int32]:
        return np.flatnonzero(self.free[layer, slot, head]).astype(np.int32) + self._settings.sink

    def clear(self, layer: int, slot: int, head: int) -> None:
        """Gives up set, slot map and label; every selected place is free."""
        self.free[layer, slot, head, self._selected(layer, slot, head)] = True
        self.counts[layer, slot, head] = 0
        self.label[layer, slot, head] = 0
        self.label_kind[layer, slot, head] = QueryKind.NONE

    def reserve(self, layer: int, delta: Delta) -> None:
        """From here to the end of its run no other delta may name the delta's places."""
        self.free[layer, delta.slot, delta.head, delta.places - self._settings.sink] = False
        self.open[layer, delta.slot, delta.head] = True

    def release(self, layer: int, delta: Delta) -> None:
        """The run failed and can store no more: what it may have written is free, the old set untouched."""
        _, held = self.held(layer, delta.slot, delta.head)
        free = self.free[layer, delta.slot, delta.head]
        free[delta.places - self._settings.sink] = True
        free[held - self._settings.sink] = False
        self.open[layer, delta.slot, delta.head] = False

    def commit(self, layer: int, delta: Delta) -> None:
        """Set, slot map, label, cover and generation change together."""
        at = (layer, delta.slot, delta.head)
        _, old = self.held(*at)
        free = self.free[at]
        free[old - self._settings.sink] = True
        free[delta.places - self._settings.sink] = False
        count = len(delta.records)
        self.records[at][:count] = delta.records
        self.places[at][:count] = delta.places
        self.counts[at] = count
        self.label[at] = delta.label
        self.label_kind[at] = delta.kind
        self.cover[at] = delta.cover
        self.generation[at] = delta.generation
        self.open[at] = False

    def _selected(self, layer: int, slot: int, head: int) -> NDArray[np.int32]:
        return self.held(layer, slot, head)[1] - self._settings.sink
