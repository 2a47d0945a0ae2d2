"""Pulls the records of the ticket that has just arrived from host memory into their places: for windows that a GPU
fills itself. After `arrive`, before `attend`; programs share the ticket's pairs evenly, whatever runs they are of."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from decode_worker import _native
from decode_worker.gpu.kernels.wishes import FIELDS, FIRST_PAIR, HEAD, PAIRS, SLOT, STATUS, Wishes
from decode_worker.gpu.launch import launch
from decode_worker.kernels.state import HeadState

WORD_BYTES = 4
LOOK = 8  # pairs of one look of a program

_WORD_BYTES = tl.constexpr(WORD_BYTES)
_FIELDS, _STATUS, _OK = tl.constexpr(FIELDS), tl.constexpr(STATUS), tl.constexpr(_native.STATUS_OK)
_SLOT, _HEAD, _PAIRS, _FIRST_PAIR = (tl.constexpr(x) for x in (SLOT, HEAD, PAIRS, FIRST_PAIR))


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
    """pairs: int32[tickets, pairs_max, 2] (record, place), the ring's. source, window: int32[..].

    offsets: int64[tickets, pairs_max], the byte in `source` where each pair's record lies (`pull`), a multiple of 64;
    None: where it goes to in `window` (`bounce`). Runs that did not end OK are left out.
    """
    _, slots, heads = state.parity.shape
    tickets, pairs_max, _ = pairs.shape
    words = record_bytes // WORD_BYTES
    launch(
        _gather, (programs,), wishes.landed, wishes.wishes, pairs, pairs if offsets is None else offsets,
        source, window, state.base, layer,
        wishes.runs, triton.next_power_of_2(wishes.runs), tickets, pairs_max, slots, heads,
        words, triton.next_power_of_2(words), offsets is None, LOOK, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer"])
def _gather(
    landed, wishes, pairs, offsets, source, window, base, layer,
    WISHES: tl.constexpr, WISHES_BLOCK: tl.constexpr, TICKETS: tl.constexpr, PAIRS_MAX: tl.constexpr,
    SLOTS: tl.constexpr, HEADS: tl.constexpr, WORDS: tl.constexpr, WORDS_BLOCK: tl.constexpr,
    SAME_PLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    number, runs = tl.load(landed + 2 * layer), tl.load(landed + 2 * layer + 1).to(tl.int32)
    if runs == 0:
        return
    mine = wishes + layer * (WISHES * _FIELDS)
    last = mine + (runs - 1) * _FIELDS
    total = tl.load(last + _FIRST_PAIR) + tl.load(last + _PAIRS)
    area = (number & (TICKETS - 1)) * PAIRS_MAX
    every = tl.arange(0, WISHES_BLOCK)
    starts = tl.load(mine + every * _FIELDS + _FIRST_PAIR, mask=every < runs, other=0x7FFFFFFF)
    i = tl.arange(0, WORDS_BLOCK)
    for first in range(tl.program_id(0) * BLOCK, total, tl.num_programs(0) * BLOCK):
        n = first + tl.arange(0, BLOCK)
        run = tl.sum((starts[None, :] <= n[:, None]).to(tl.int32), 1) - 1
        there = n < total
        wish = mine + run * _FIELDS
        there = there & (tl.load(wish + _STATUS, mask=there, other=0) == _OK)
        slot, head = tl.load(wish + _SLOT, mask=there, other=0), tl.load(wish + _HEAD, mask=there, other=0)
        lane = tl.load(base + (layer * SLOTS + slot) * HEADS + head, mask=there, other=0)
        place = tl.load(pairs + 2 * (area + n) + 1, mask=there, other=0)
        to = tl.multiple_of(lane // _WORD_BYTES, [16]) + place.to(tl.int64) * WORDS
        from_ = to
        if not SAME_PLACE:
            from_ = tl.multiple_of(tl.load(offsets + area + n, mask=there, other=0) // _WORD_BYTES, [16])
        inside = there[:, None] & (i < WORDS)[None, :]
        record = tl.load(source + from_[:, None] + i[None, :], mask=inside, other=0)
        tl.store(window + to[:, None] + i[None, :], record, mask=inside)
