"""How one slot's part of the window is laid out; the only place that does its size and offset arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

SLOT_ALIGN = 4096
SIDES = 2  # of a set and its label: the one in use, and the one that is fetched
UNIT_BYTES = SIDES * 8 + 4  # a unit's id and first place, and its stamp
PLACE_BYTES = SIDES * 4  # an attended place


@dataclass(frozen=True, eq=False)
class WindowGeometry:
    """Lanes (layer-major) of one slot, one behind the other.

    An offloaded head's lane is `sink` places, `capacity` ones for what was selected, then `tail`; a resident head's has
    one place for each of `resident_places` tokens. `resident`: bool[layers, kv_heads]; `capacity` and `selected`, how
    many records a selection takes: int32[layers, kv_heads].

    What comes from packs has `record_bytes`; what the worker writes, in tails and resident heads, `own_bytes`, which is
    more where packs are quantised.
    """

    layers: int
    kv_heads: int
    record_bytes: int
    label_bytes: int  # of one offloaded head
    sink: int
    selected: NDArray[np.int32]
    capacity: NDArray[np.int32]
    tail: int
    resident: NDArray[np.bool_]
    resident_places: int
    unit: int = 1  # records that are held together
    own_bytes: int = 0  # 0: as record_bytes

    def __post_init__(self) -> None:
        if self.resident.shape != (self.layers, self.kv_heads):
            raise ValueError(f"resident has shape {self.resident.shape}, expected {(self.layers, self.kv_heads)}")
        if self.record_bytes % 64 or self.record_bytes <= 0:
            raise ValueError(f"record_bytes={self.record_bytes} must be a positive multiple of 64")
        if not self.own_bytes:
            object.__setattr__(self, "own_bytes", self.record_bytes)
        if self.own_bytes % 64 or self.own_bytes < self.record_bytes:
            raise ValueError(f"own_bytes={self.own_bytes} must be a multiple of 64, at least {self.record_bytes}")
        if self.sink < 0 or min(self.tail, self.resident_places, self.selected.min()) < 1:
            raise ValueError("selected, tail and resident_places must be positive, sink not negative")
        if (self.selected > self.capacity).any():
            raise ValueError("a head selects more records than it has places for")

    @cached_property
    def first_tail(self) -> NDArray[np.int64]:
        """Of offloaded heads, int64[layers, kv_heads]; what comes from packs for token t of the tail is delivered to
        place first_tail + t % tail."""
        return self.sink + self.capacity.astype(np.int64)

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """Of each lane, as the daemon counts them, of `record_bytes` each: int64[layers, kv_heads]."""
        return self.lane_bytes // self.record_bytes

    @cached_property
    def lane_bytes(self) -> NDArray[np.int64]:
        """int64[layers, kv_heads]."""
        offloaded = self.first_tail * self.record_bytes + self.tail * self.own_bytes
        return np.where(self.resident, self.resident_places * self.own_bytes, offloaded)

    @cached_property
    def offsets(self) -> NDArray[np.uint64]:
        """Byte offset of place 0 of each lane within the slot's part, uint64[layers, kv_heads]."""
        ends = np.cumsum(self.lane_bytes.ravel()).reshape(self.lane_bytes.shape)
        return (ends - self.lane_bytes).astype(np.uint64)

    @cached_property
    def own_offsets(self) -> NDArray[np.uint64]:
        """Of what the worker writes: the lane of a resident head, the tail of another; uint64[layers, kv_heads].
        Token t lies behind `own_bytes` for each of t, or of t % tail, others."""
        return self.offsets + np.where(self.resident, 0, self.first_tail * self.record_bytes).astype(np.uint64)

    @property
    def window_bytes(self) -> int:
        return int(self.lane_bytes.sum())

    @property
    def slot_bytes(self) -> int:
        """window_bytes in whole pages."""
        return -(-self.window_bytes // SLOT_ALIGN) * SLOT_ALIGN

    def windows(self, slot_offset: int) -> NDArray[np.uint64]:
        """What BindSlot takes: uint64[layers, kv_heads, 2] = (byte offset in the whole window, places)."""
        return np.stack([self.offsets + np.uint64(slot_offset), self.places.astype(np.uint64)], axis=-1)

    # --- figures: device memory and its parts, in bytes ---

    @property
    def resident_bytes(self) -> int:
        return int(self.resident.sum()) * self.resident_places * self.own_bytes

    @property
    def device_bytes(self) -> int:
        """Window (selected, slack, tail, resident), labels and place lists of one slot."""
        offloaded = int((~self.resident).sum())
        units = int(self.capacity[~self.resident].sum()) // self.unit
        places = int(self.selected[~self.resident].sum())
        return self.slot_bytes + SIDES * offloaded * self.label_bytes + units * UNIT_BYTES + places * PLACE_BYTES

    def offloaded_bytes(self, tokens: int) -> int:
        """KV of the heads that are not resident, for a session of this many tokens."""
        return int((~self.resident).sum()) * tokens * self.record_bytes
