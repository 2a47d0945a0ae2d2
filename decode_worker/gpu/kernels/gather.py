"""Pulls the records of the ticket that has just arrived from host memory into their places: for windows that a GPU
fills itself. After `arrive`, before `attend`; programs share the ticket's pairs evenly, whatever runs they are of.

Where records lie in the daemon's own frames (`Pull`), who ends last says that they have been read: the daemon may then
have the frames for others. It may have had them before, if that took too long; then its poison is there to be seen once
the records have been read, and the step has failed."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from decode_worker import _native
from decode_worker.gpu.kernels.wishes import FIELDS, FIRST_PAIR, HEAD, PAIRS, SLOT, STATUS, Wishes
from decode_worker.gpu.launch import launch
from decode_worker.gpu.requests import Requests
from decode_worker.gpu.sync import POISONED, ends_last, load_acquire, store_release
from decode_worker.kernels.state import HeadState
from decode_worker.window.base import Frames

WORD_BYTES = 4
LOOK = 8  # pairs of one look of a program

_WORD_BYTES, _LINE = tl.constexpr(WORD_BYTES), tl.constexpr(_native.PULL_LINE_BYTES // WORD_BYTES)
_FIELDS, _STATUS, _OK = tl.constexpr(FIELDS), tl.constexpr(STATUS), tl.constexpr(_native.STATUS_OK)
_SLOT, _HEAD, _PAIRS, _FIRST_PAIR = (tl.constexpr(x) for x in (SLOT, HEAD, PAIRS, FIRST_PAIR))


@dataclass(frozen=True, eq=False)
class Pull:
    """Frames that are read where they lie, and the words that say so.

    released   int64[1], of the requests' header: all that tickets up to this one were answered with has been read
    poison     int64[1], of the completions' header
    error      int32[1]: 0, or POISONED (gpu/sync.py) if nobody knows what was read
    ended      int32[1]: programs that have read their share; zero between launches
    """

    frames: Frames
    released: torch.Tensor
    poison: torch.Tensor
    error: torch.Tensor
    ended: torch.Tensor


def pull_from(frames: Frames, ring: Requests) -> Pull:
    return Pull(frames, ring.released, ring.peer_poison, ring.error, torch.zeros_like(ring.ended))


def gather(
    state: HeadState,
    layer: int,
    wishes: Wishes,
    pairs: torch.Tensor,
    pull: Pull | None,
    source: torch.Tensor,
    window: torch.Tensor,
    record_bytes: int,
    programs: int,
) -> None:
    """pairs: int32[tickets, pairs_max, 2] (record, place), the ring's. source, window: int32[..].

    A record lies in `source` where it goes to in `window`, but for those that lie in frames (`pull`). Runs that did not
    end OK are left out.
    """
    _, slots, heads = state.parity.shape
    tickets, pairs_max, _ = pairs.shape
    words = record_bytes // WORD_BYTES
    launch(
        _gather, (programs,), wishes.landed, wishes.wishes, pairs,
        *((pull.frames.lines, pull.frames.arena, pull.released, pull.poison, pull.error, pull.ended)
          if pull is not None else (pairs,) * 6),
        source, window, state.base, layer,
        wishes.runs, triton.next_power_of_2(wishes.runs), tickets, pairs_max, slots, heads,
        words, triton.next_power_of_2(words), pull is not None, LOOK, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer"])
def _gather(
    landed, wishes, pairs, lines, arena, released, poison, error, ended, source, window, base, layer,
    WISHES: tl.constexpr, WISHES_BLOCK: tl.constexpr, TICKETS: tl.constexpr, PAIRS_MAX: tl.constexpr,
    SLOTS: tl.constexpr, HEADS: tl.constexpr, WORDS: tl.constexpr, WORDS_BLOCK: tl.constexpr,
    PULL: tl.constexpr, BLOCK: tl.constexpr,
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
        inside = there[:, None] & (i < WORDS)[None, :]
        if PULL:
            line = tl.load(lines + to // _LINE, mask=there, other=0)
            from_ = tl.multiple_of((line - 1).to(tl.int64) * _LINE, [16])
            in_frame = (line != 0)[:, None]
            record = tl.load(arena + from_[:, None] + i[None, :], mask=inside & in_frame, other=0)
            record |= tl.load(source + to[:, None] + i[None, :], mask=inside & (in_frame == 0), other=0)
        else:
            record = tl.load(source + to[:, None] + i[None, :], mask=inside, other=0)
        tl.store(window + to[:, None] + i[None, :], record, mask=inside)
    if PULL:
        if ends_last(ended, tl.num_programs(0), "sys"):
            if load_acquire(poison) != 0:
                tl.atomic_cas(error, 0, POISONED)
            store_release(released, number)
