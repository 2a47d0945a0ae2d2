"""The layer's ticket, if one was claimed: the pairs of all heads that fetch something, one run each, and the word that
hands it over. A program per run and block of pairs; who ends last describes the ticket and releases its sequence: the
daemon sees all of the above, or nothing.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from decode_worker import _native
from decode_worker.gpu.kernels.delta import Delta
from decode_worker.gpu.kernels.wishes import FIELDS, FIRST_PAIR, HEAD, PAIRS, SLOT, Wishes
from decode_worker.gpu.launch import launch
from decode_worker.gpu.requests import Requests
from decode_worker.gpu.sync import ends_last, store_release
from decode_worker.kernels.state import HeadState

CHUNK = 1024  # pairs that a program copies
_FIELDS, _SLOT, _HEAD = tl.constexpr(FIELDS), tl.constexpr(SLOT), tl.constexpr(HEAD)
_PAIRS, _FIRST_PAIR = tl.constexpr(PAIRS), tl.constexpr(FIRST_PAIR)
_GATHER = tl.constexpr(_native.OP_GATHER)


def post(
    state: HeadState, rows: int, step: torch.Tensor, layer: int, delta: Delta, wishes: Wishes, requests: Requests
) -> None:
    """Hands the claimed ticket over. step: int32[1]."""
    heads, r = state.shape.heads, requests
    tickets, runs_max, pairs_max = r.tickets.shape[0], r.runs.shape[1], r.pairs.shape[1]
    chunks = -(-delta.pairs.shape[1] // CHUNK)
    launch(
        _post, (rows * heads, chunks), wishes.count, wishes.number, wishes.wishes, delta.pairs, state.epoch,
        state.issued, step, r.runs, r.pairs, r.tickets, r.tickets.view(torch.int64), r.ended, layer,
        SLOTS=state.shape.slots, HEADS=heads, WISHES=wishes.runs, WISHES_BLOCK=triton.next_power_of_2(wishes.runs),
        STAGED=delta.pairs.shape[1], TICKETS=tickets, RUNS_MAX=runs_max, PAIRS_MAX=pairs_max, CHUNK=CHUNK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer"])
def _post(
    count, number_of, wishes, staged, epoch, issued, step, runs, pairs, tickets, sequences, ended, layer,
    SLOTS: tl.constexpr, HEADS: tl.constexpr, WISHES: tl.constexpr, WISHES_BLOCK: tl.constexpr, STAGED: tl.constexpr,
    TICKETS: tl.constexpr, RUNS_MAX: tl.constexpr, PAIRS_MAX: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    run, chunk = tl.program_id(0), tl.program_id(1)
    run_count = tl.load(count + layer)
    if run >= run_count:
        return
    number = tl.load(number_of + layer)
    if number == 0:
        return
    mine = wishes + layer * (WISHES * _FIELDS)
    total = tl.load(mine + run * _FIELDS + _PAIRS)
    if chunk * CHUNK >= total:
        return
    area = number & (TICKETS - 1)
    _write(
        mine + run * _FIELDS, staged, epoch, issued + layer * (SLOTS * HEADS), runs + (area * RUNS_MAX + run) * 8,
        pairs + area * (2 * PAIRS_MAX), chunk, total, HEADS, STAGED, CHUNK,
    )  # fmt: skip
    every = tl.arange(0, WISHES_BLOCK)
    of_each = tl.load(mine + every * _FIELDS + _PAIRS, mask=every < run_count, other=0)
    # The scope is the host's: what the count says is over lies in the host's memory.
    if ends_last(ended, tl.sum(tl.cdiv(of_each, CHUNK), 0), "sys"):
        out = tickets + area * 16
        tl.store(out + 2, tl.load(step))
        tl.store(out + 3, layer)  # and micro-batch 0
        tl.store(out + 4, (run_count << 16) | _GATHER)
        tl.store(out + 5, 0)
        store_release(sequences + area * 8, number)


@triton.jit
def _write(
    wish, staged, epoch, issued, run, pairs, chunk, total,
    HEADS: tl.constexpr, STAGED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A block of a run's pairs, and with the first the run itself."""
    slot, head, first = tl.load(wish + _SLOT), tl.load(wish + _HEAD), tl.load(wish + _FIRST_PAIR)
    i = chunk * (2 * CHUNK) + tl.arange(0, 2 * CHUNK)
    from_ = staged + (slot * HEADS + head).to(tl.int64) * (2 * STAGED)
    tl.store(pairs + 2 * first + i, tl.load(from_ + i, mask=i < 2 * total), mask=i < 2 * total)
    if chunk == 0:
        tl.store(run, slot)
        tl.store(run + 1, tl.load(epoch + slot).to(tl.int32))
        tl.store(run + 2, tl.load(issued + slot * HEADS + head))
        tl.store(run + 3, first)
        tl.store(run + 4, total)
        tl.store(run + 5, head)  # lane, and kind 0
        tl.store(run + 6, 0)
        tl.store(run + 7, 0)
