"""The second half of `arrive`: a new token's K and V become one record of each head's window."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from decode_worker import _native
from decode_worker.gpu.launch import launch
from decode_worker.kernels.state import HeadState

_TAIL_FULL = tl.constexpr(_native.FAULT_TAIL_FULL)


def append(
    state: HeadState,
    slots: torch.Tensor,
    positions: torch.Tensor,
    layer: int,
    key: torch.Tensor,
    value: torch.Tensor,
    window: torch.Tensor,
    record_bytes: int,
) -> None:
    """slots, positions: int32[..]; key, value: float32 [rows, H, d]; window: one dimension, in the storage dtype.

    A row of which any head's tail is full has the fault TAIL_FULL; that head and those behind it are not written.
    """
    rows, heads, d = key.shape
    launch(
        _append, (rows, heads), slots, positions, key, value, window,
        state.base, state.capacity, state.cover, state.parity, state.resident, state.fault,
        layer, state.parity.numel(), state.parity.shape[1], heads, triton.next_power_of_2(heads),
        d, triton.next_power_of_2(d), state.shape.sink, state.shape.unit, state.shape.tail,
        record_bytes, window.element_size(), num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer"])
def _append(
    slots, positions, key, value, window, base, capacity, cover, parity, resident, fault, layer,
    SIDE: tl.constexpr, SLOTS: tl.constexpr, HEADS: tl.constexpr, HEADS_BLOCK: tl.constexpr,
    D: tl.constexpr, D_BLOCK: tl.constexpr, SINK: tl.constexpr, UNIT: tl.constexpr, TAIL: tl.constexpr,
    RECORD_BYTES: tl.constexpr, ELEMENT_BYTES: tl.constexpr,
):  # fmt: skip
    append_token(
        tl.program_id(0), tl.program_id(1), slots, positions, key, value, window, base, capacity, cover, parity,
        resident, fault, layer, SIDE, SLOTS, HEADS, HEADS_BLOCK, D, D_BLOCK, SINK, UNIT, TAIL, RECORD_BYTES,
        ELEMENT_BYTES,
    )  # fmt: skip


@triton.jit
def append_token(
    row, head, slots, positions, key, value, window, base, capacity, cover, parity, resident, fault, layer,
    SIDE: tl.constexpr, SLOTS: tl.constexpr, HEADS: tl.constexpr, HEADS_BLOCK: tl.constexpr,
    D: tl.constexpr, D_BLOCK: tl.constexpr, SINK: tl.constexpr, UNIT: tl.constexpr, TAIL: tl.constexpr,
    RECORD_BYTES: tl.constexpr, ELEMENT_BYTES: tl.constexpr,
):  # fmt: skip
    slot, position = tl.load(slots + row), tl.load(positions + row)
    heads = tl.arange(0, HEADS_BLOCK)
    there = heads < tl.where(slot >= 0, HEADS, 0)
    at = (layer * SLOTS + tl.maximum(slot, 0)) * HEADS + heads
    side = tl.load(parity + at, mask=there, other=0).to(tl.int64)
    covered = tl.load(cover + side * SIDE + at, mask=there, other=0)
    selects = tl.load(resident + layer * HEADS + heads, mask=there, other=1) == 0
    full = ((position - covered >= TAIL) & (there & selects)).to(tl.int32)
    if (head == 0) & (tl.max(full, 0) != 0):
        tl.atomic_cas(fault + slot, 0, _TAIL_FULL)
    if (slot >= 0) & (tl.max(tl.where(heads <= head, full, 0), 0) == 0):
        lane = (layer * SLOTS + slot) * HEADS + head
        tail_place = SINK + tl.load(capacity + lane) * UNIT + position % TAIL
        place = tl.where(tl.load(resident + layer * HEADS + head) != 0, position, tail_place)
        first = tl.multiple_of(tl.load(base + lane) // ELEMENT_BYTES, 16)
        record = window + first + place.to(tl.int64) * (RECORD_BYTES // ELEMENT_BYTES)
        i = tl.arange(0, D_BLOCK)
        token, inside = (row * HEADS + head) * D + i, i < D
        k, v = tl.load(key + token, mask=inside, other=0.0), tl.load(value + token, mask=inside, other=0.0)
        tl.store(record + i, stored(k, window.dtype.element_ty), mask=inside)
        tl.store(record + D + i, stored(v, window.dtype.element_ty), mask=inside)


@triton.jit
def stored(x, DTYPE: tl.constexpr):
    """float32 in the storage dtype. Bfloat16 is rounded to nearest even by hand: the interpreter would cut it off."""
    if DTYPE.is_bf16():
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        kept = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, rounded)  # a NaN stays one
        y = kept.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(DTYPE)
    return y
