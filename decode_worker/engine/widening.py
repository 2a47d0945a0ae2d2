"""What packs hold of tails and resident heads, in a slot that was just bound: made records of the worker's own kind.

So attention finds packs' records at sinks and attended places only, and a seal reads nothing that was quantised."""

from __future__ import annotations

import torch

from decode_worker.records import RecordFormat
from decode_worker.window.geometry import WindowGeometry

AT_ONCE = 8192  # records: bounds the memory of their elements


def widen(
    slot_window: torch.Tensor, records: RecordFormat, geometry: WindowGeometry, stored: int, covers: torch.Tensor
) -> None:
    """slot_window: uint8, the slot's part of the window, where packs' records lie as they were delivered: the first
    `stored` of a resident head's lane, and from the first place of a tail on those of tokens [cover, stored).
    covers: int32[layers, kv_heads]."""
    if not records.quantised:
        return
    for layer in range(geometry.layers):
        for head in range(geometry.kv_heads):
            first = int(geometry.own_offsets[layer, head])
            end = int(geometry.offsets[layer, head] + geometry.lane_bytes[layer, head])
            if geometry.resident[layer, head]:
                places = torch.arange(stored)
            else:
                places = (torch.arange(int(covers[layer, head]), stored) % geometry.tail).sort().values
            _widen(slot_window[first:end], records, places)


def _widen(memory: torch.Tensor, records: RecordFormat, places: torch.Tensor) -> None:
    """In place, the last ones first: a record of one's own lies at or behind the same place of packs' records."""
    narrow = memory[: len(memory) // records.record_bytes * records.record_bytes].view(-1, records.record_bytes)
    own = records.own
    wide = memory[: len(memory) // own.record_bytes * own.record_bytes].view(-1, own.record_bytes)
    for part in reversed(places.split(AT_ONCE)):
        made = torch.zeros(len(part), own.record_bytes, dtype=torch.uint8)
        own.pack(*records.unpack(narrow[part]), made)
        wide[part] = made
