"""The beginning of a step: its rows have no fault yet."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from decode_worker.gpu.launch import launch
from decode_worker.kernels.state import HeadState


def clear_faults(state: HeadState, slots: torch.Tensor, rows: int) -> None:
    """slots: int32[..]; those of the first `rows`, but -1."""
    launch(_clear_faults, (1,), slots, state.fault, rows, ROWS_BLOCK=triton.next_power_of_2(slots.numel()), num_warps=1)


@triton.jit(do_not_specialize=["rows"])
def _clear_faults(slots, fault, rows, ROWS_BLOCK: tl.constexpr):
    row = tl.arange(0, ROWS_BLOCK)
    slot = tl.load(slots + row, mask=row < rows, other=-1)
    tl.store(fault + slot, tl.zeros((ROWS_BLOCK,), tl.int32), mask=slot >= 0)
