"""Pulls the records of a committed ticket from host memory into their places: for windows that a GPU fills itself.

After `arrive` in the same stream, before `attend`. A whole record travels in words of 16 bytes, many at a time.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from decode_worker import _native
from decode_worker.gpu.kernels.arrive import AUX, FIELDS, FIRST_PAIR, HEAD, PAIRS, SLOT, STATUS, Wishes
from decode_worker.kernels.state import HeadState

WORD_BYTES = 4
PAIRS_OF_A_LOOK = 8

_FIELDS = tl.constexpr(FIELDS)
_SLOT, _HEAD, _PAIRS, _FIRST_PAIR = (tl.constexpr(x) for x in (SLOT, HEAD, PAIRS, FIRST_PAIR))
_STATUS, _AUX, _OK = tl.constexpr(STATUS), tl.constexpr(AUX), tl.constexpr(_native.STATUS_OK)


def gather(
    state: HeadState,
    layer: int,
    wishes: Wishes,
    pairs: torch.Tensor,
    offsets: torch.Tensor | None,
    source: torch.Tensor,
    window: torch.Tensor,
    record_bytes: int,
    programs: int,
) -> None:
    """pairs: int32[pairs_max, 2] (record, place) of the layer's ticket, in device memory.

    source, window: int32 views of host and device memory. offsets: int64[pairs_max], where in `source`, in bytes, each
    pair's record lies (`pull`); None: where it goes to in `window` (`bounce`). Runs that did not end OK are left out.
    """
    _, slots, heads = state.parity.shape
    words = record_bytes // WORD_BYTES
    _gather[(programs,)](
        wishes.landed, wishes.wishes, pairs, pairs if offsets is None else offsets, source, window, state.base,
        layer, wishes.runs, slots, heads, words, triton.next_power_of_2(words), offsets is None, PAIRS_OF_A_LOOK,
        num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer"])
def _gather(
    landed, wishes, pairs, offsets, source, window, base, layer,
    WISHES: tl.constexpr, SLOTS: tl.constexpr, HEADS: tl.constexpr, WORDS: tl.constexpr, WORDS_BLOCK: tl.constexpr,
    SAME_PLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, WORDS_BLOCK)
    for run in range(tl.load(landed + layer)):
        wish = wishes + (layer * WISHES + run) * _FIELDS
        count = tl.load(wish + _PAIRS)
        if tl.load(wish + _STATUS) != _OK:
            count = 0
        first_pair = tl.load(wish + _FIRST_PAIR)
        slot, head = tl.load(wish + _SLOT), tl.load(wish + _HEAD)
        lane = tl.load(base + (layer * SLOTS + slot) * HEADS + head)
        for first in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
            n = first + tl.arange(0, BLOCK)
            there = n < count
            place = tl.load(pairs + 2 * (first_pair + n) + 1, mask=there, other=0)
            to = tl.multiple_of(lane // 4, 16) + place.to(tl.int64) * WORDS
            from_ = to
            if not SAME_PLACE:
                from_ = tl.multiple_of(tl.load(offsets + first_pair + n, mask=there, other=0) // 4, [16])
            mask = there[:, None] & (i < WORDS)[None, :]
            record = tl.load(source + from_[:, None] + i[None, :], mask=mask, other=0)
            tl.store(window + to[:, None] + i[None, :], record, mask=mask)
