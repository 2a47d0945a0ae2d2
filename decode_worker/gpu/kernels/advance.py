"""The end of a step: each row goes on to its next token and position, and the host is told what it must know of it, in
one block of its own memory. A program per row; who ends last releases the step's number, behind all the others' words.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from decode_worker.gpu.kernels.begin import POSITION, SLOT, TOKEN
from decode_worker.gpu.launch import launch
from decode_worker.gpu.sync import ends_last, store_release
from decode_worker.kernels.state import HeadState
from decode_worker.policy.counters import Counters

TOLD_FIELDS = NEXT, FINITE, FAULT, COVER = tuple(range(4))  # int64 words of a row
NUMBER, ERROR, COUNTED = 0, 1, 2  # int64 words of the step; the last: the first of its counters
NO_COVER = 0x7FFFFFFF  # every head is resident
COMMON = COUNTED + len(Counters.NAMES)
_SLOT, _TOKEN, _POSITION = tl.constexpr(SLOT), tl.constexpr(TOKEN), tl.constexpr(POSITION)
_NEXT, _FINITE, _FAULT, _COVER = (tl.constexpr(field) for field in TOLD_FIELDS)
_NUMBER, _ERROR, _COUNTED = tl.constexpr(NUMBER), tl.constexpr(ERROR), tl.constexpr(COUNTED)
_NO_COVER, _COUNTERS = tl.constexpr(NO_COVER), tl.constexpr(len(Counters.NAMES))
_STEPS = tl.constexpr(Counters.NAMES.index("steps"))


def advance(
    held: torch.Tensor,
    token: torch.Tensor,
    finite: torch.Tensor,
    state: HeadState,
    error: torch.Tensor,
    number: torch.Tensor,
    told: torch.Tensor,
    common: torch.Tensor,
    ended: torch.Tensor,
    rows: int,
) -> None:
    """held: gpu/kernels/begin.py; token, finite: int32[rows]; error, ended: int32[1]; number: int64[1]. The host's:
    told, int64[fields, slots], and common, int64[COMMON]. The error word is the host's from then on, and 0 here."""
    shape = state.shape
    heads = shape.layers * shape.heads
    launch(
        _advance, (rows,), held, token, finite, state.fault, state.cover, state.parity, state.resident, state.counters,
        error, number, told, common, ended,
        SLOTS=shape.slots, LAYERS=shape.layers, HEADS=shape.heads, ALL_BLOCK=triton.next_power_of_2(heads),
        COUNTERS_BLOCK=triton.next_power_of_2(len(Counters.NAMES)), num_warps=1,
    )  # fmt: skip


@triton.jit
def _advance(
    held, token, finite, fault, cover, parity, resident, counters, error, number, told, common, ended,
    SLOTS: tl.constexpr, LAYERS: tl.constexpr, HEADS: tl.constexpr, ALL_BLOCK: tl.constexpr,
    COUNTERS_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(held + _SLOT * SLOTS + row)
    if slot >= 0:
        following = tl.load(token + row).to(tl.int64)
        tl.store(held + _TOKEN * SLOTS + row, following)
        tl.store(held + _POSITION * SLOTS + row, tl.load(held + _POSITION * SLOTS + row) + 1)
        tl.store(told + _NEXT * SLOTS + row, following)
        tl.store(told + _FINITE * SLOTS + row, tl.load(finite + row).to(tl.int64))
        tl.store(told + _FAULT * SLOTS + row, tl.load(fault + slot).to(tl.int64))
        least = _least_cover(cover, parity, resident, slot, SLOTS, LAYERS, HEADS, ALL_BLOCK)
        tl.store(told + _COVER * SLOTS + row, least.to(tl.int64))
    # The scope is the host's: what the count says is over lies in the host's memory.
    if ends_last(ended, tl.num_programs(0), "sys"):
        tl.store(counters + _STEPS, tl.load(counters + _STEPS) + 1)
        tl.debug_barrier()
        every = tl.arange(0, COUNTERS_BLOCK)
        counted = tl.load(counters + every, mask=every < _COUNTERS, other=0)
        tl.store(common + _COUNTED + every, counted, mask=every < _COUNTERS)
        tl.store(common + _ERROR, tl.load(error).to(tl.int64))
        tl.store(error, 0)
        store_release(common + _NUMBER, tl.load(number))


@triton.jit
def _least_cover(
    cover, parity, resident, slot, SLOTS: tl.constexpr, LAYERS: tl.constexpr, HEADS: tl.constexpr,
    ALL_BLOCK: tl.constexpr,
):  # fmt: skip
    """Of the slot's heads that are not resident."""
    lane = tl.arange(0, ALL_BLOCK)
    selects = tl.load(resident + lane, mask=lane < LAYERS * HEADS, other=1) == 0
    at = ((lane // HEADS).to(tl.int64) * SLOTS + slot) * HEADS + lane % HEADS
    side = tl.load(parity + at, mask=selects, other=0).to(tl.int64)
    covers = tl.load(cover + side * (LAYERS * SLOTS * HEADS) + at, mask=selects, other=_NO_COVER)
    return tl.min(covers, 0)
