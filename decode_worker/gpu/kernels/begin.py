"""The beginning of a step: its rows have no fault yet, and go on from where the device has them, or as the host says.

A row is int64 words: its slot (-1: nobody's), the token that it processes and its position, and how its next token is
chosen (decode_worker/model/sampling.py; temperature and top_p are float64). The host's words are read in its memory.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from decode_worker.gpu.launch import launch
from decode_worker.kernels.state import HeadState

ROW_FIELDS = SLOT, TOKEN, POSITION, TEMPERATURE, TOP_P, TOP_K, STREAM = tuple(range(7))
CHANGED = len(ROW_FIELDS)  # of the host's words alone: whether its others are to be taken
NUMBER, STEP = 0, 1  # words that are every row's
_FIELDS, _CHANGED = tl.constexpr(len(ROW_FIELDS)), tl.constexpr(CHANGED)
_SLOT, _TOKEN, _POSITION = tl.constexpr(SLOT), tl.constexpr(TOKEN), tl.constexpr(POSITION)
_NUMBER, _STEP = tl.constexpr(NUMBER), tl.constexpr(STEP)


def clear_faults(state: HeadState, slots: torch.Tensor, rows: int) -> None:
    """slots: int32[..]; those of the first `rows`, but -1."""
    launch(_clear_faults, (1,), slots, state.fault, rows, ROWS_BLOCK=triton.next_power_of_2(slots.numel()), num_warps=1)


def take(
    wanted: torch.Tensor,
    common: torch.Tensor,
    held: torch.Tensor,
    number: torch.Tensor,
    step: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
    model_positions: torch.Tensor,
    state: HeadState,
    rows: int,
) -> None:
    """wanted: int64[fields + 1, slots], common: int64[..], the host's; held: int64[fields, slots]; number: int64[1];
    step, slots, positions: int32, the kernels'; tokens, model_positions: int64, the products'."""
    launch(
        _take, (1,), wanted, common, held, number, step, slots, positions, tokens, model_positions, state.fault, rows,
        SLOTS=held.shape[1], ROWS_BLOCK=triton.next_power_of_2(held.shape[1]), num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _clear_faults(slots, fault, rows, ROWS_BLOCK: tl.constexpr):
    row = tl.arange(0, ROWS_BLOCK)
    slot = tl.load(slots + row, mask=row < rows, other=-1)
    tl.store(fault + slot, tl.zeros((ROWS_BLOCK,), tl.int32), mask=slot >= 0)


@triton.jit(do_not_specialize=["rows"])
def _take(
    wanted, common, held, number, step, slots, positions, tokens, model_positions, fault, rows,
    SLOTS: tl.constexpr, ROWS_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS_BLOCK)
    changed = tl.load(wanted + _CHANGED * SLOTS + row, mask=row < rows, other=0) != 0
    for field in tl.static_range(_FIELDS):
        at = field * SLOTS + row
        tl.store(held + at, tl.load(wanted + at, mask=changed, other=0), mask=changed)
        value = tl.load(held + at, mask=row < rows, other=-1)
        if field == _SLOT:
            tl.store(slots + row, value.to(tl.int32), mask=row < rows)
            tl.store(fault + value, tl.zeros((ROWS_BLOCK,), tl.int32), mask=value >= 0)
        elif field == _TOKEN:
            tl.store(tokens + row, value, mask=row < rows)
        elif field == _POSITION:
            tl.store(positions + row, value.to(tl.int32), mask=row < rows)
            tl.store(model_positions + row, value, mask=row < rows)
    tl.store(number, tl.load(common + _NUMBER))
    tl.store(step, tl.load(common + _STEP).to(tl.int32))
