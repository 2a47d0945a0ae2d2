"""The layer's ticket: the pairs of all heads that fetch something, one run each, and the word that hands it over.

    wishes   lists the heads that fetch, in order of (row, head), and asks the ring for its next ticket
    pairs    copies their pairs and describes their runs, a program per run and block of pairs
    ticket   describes the ticket and releases its sequence: the daemon sees all of the above, or nothing

The number of the next ticket lives in device memory. Without a wish nothing is posted, and no number is used up. A
ticket that cannot be posted leaves its wishes without one: `arrive` settles them, and `error` says why.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from decode_worker import _native
from decode_worker.device import Device
from decode_worker.gpu.kernels.arrive import FIELDS, FIRST_PAIR, HAS_OLD_SET, HEAD, PAIRS, SLOT, Wishes
from decode_worker.gpu.kernels.delta import Delta
from decode_worker.gpu.launch import launch
from decode_worker.gpu.sync import POISONED, load_acquire, store_release
from decode_worker.kernels.state import HeadState

CHUNK = 1024  # pairs that a program copies
NO_CREDIT, TOO_LARGE = 4, 5  # values of `error`, beside those of gpu/sync.py
_NO_CREDIT, _TOO_LARGE = tl.constexpr(NO_CREDIT), tl.constexpr(TOO_LARGE)
_FIELDS, _SLOT, _HEAD = tl.constexpr(FIELDS), tl.constexpr(SLOT), tl.constexpr(HEAD)
_HAS_OLD_SET, _PAIRS, _FIRST_PAIR = tl.constexpr(HAS_OLD_SET), tl.constexpr(PAIRS), tl.constexpr(FIRST_PAIR)
_GATHER = tl.constexpr(_native.OP_GATHER)


@dataclass(frozen=True, eq=False)
class Requests:
    """A ring's memories, as its producer on a device uses them (csrc/core/ring.h).

    tickets       int32[tickets, 16]    runs       int32[tickets, runs_max, 8]    pairs  int32[tickets, pairs_max, 2]
    own_poison, peer_poison, consumed   int64[1], of the requests' and the completions' header
    next_number   int64[1]: of the next ticket                       claimed  int64[1]: of the present one; 0: none
    error         int32[1]: 0, or why a ticket was not posted, the first that happened
    """

    tickets: torch.Tensor
    runs: torch.Tensor
    pairs: torch.Tensor
    own_poison: torch.Tensor
    peer_poison: torch.Tensor
    consumed: torch.Tensor
    next_number: torch.Tensor
    claimed: torch.Tensor
    error: torch.Tensor


def map_ring(ring: _native.RingProducer, device: Device, error: torch.Tensor) -> tuple[Requests, torch.Tensor]:
    """The requests, and the cells: int64[tickets, runs_max, 2]. Valid until the ring or the device is closed."""
    at, requests = ring.layout, device.share(ring.requests)
    completions = device.share(ring.completions, read_only=True)

    def part(memory: torch.Tensor, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        size = int(np.prod(shape)) * dtype.itemsize
        return memory[at[name] : at[name] + size].view(dtype).view(shape)

    n, runs_max = ring.tickets, ring.runs_max
    return Requests(
        tickets=part(requests, "tickets", torch.int32, n, 16),
        runs=part(requests, "runs", torch.int32, n, runs_max, 8),
        pairs=part(requests, "pairs", torch.int32, n, ring.pairs_max, 2),
        own_poison=part(requests, "poison", torch.int64, 1),
        peer_poison=part(completions, "daemon_poison", torch.int64, 1),
        consumed=part(completions, "consumed", torch.int64, 1),
        next_number=torch.ones(1, dtype=torch.int64, device=device.torch_device),
        claimed=torch.zeros(1, dtype=torch.int64, device=device.torch_device),
        error=error,
    ), part(completions, "cells", torch.int64, n, runs_max, 2)


def list_wishes(
    state: HeadState,
    slots: torch.Tensor,
    rows: int,
    layer: int,
    delta: Delta,
    wishes: Wishes,
    requests: Requests | None,
    looks: int,
) -> None:
    """Fills the layer's wishes, and claims a ticket for them where there is a ring. looks: at the credit, at most."""
    lanes = rows * state.shape.heads
    common = (slots, delta.pair_count, delta.has_old_set, wishes.count, wishes.number, wishes.wishes, layer)
    constants = {
        "LAYERS": state.shape.layers, "LAYERS_BLOCK": triton.next_power_of_2(state.shape.layers), "LANES": lanes,
        "LANES_BLOCK": triton.next_power_of_2(lanes), "HEADS": state.shape.heads, "WISHES": wishes.runs,
    }  # fmt: skip
    if requests is None:
        none = wishes.number
        launch(
            _wishes, (1,), *common, looks, none, none, none, none, none, wishes.count,
            RUNS_MAX=0, PAIRS_MAX=0, TICKETS=0, num_warps=1, **constants,
        )  # fmt: skip
        return
    r = requests
    launch(
        _wishes, (1,), *common, looks, r.own_poison, r.peer_poison, r.consumed, r.next_number, r.claimed, r.error,
        RUNS_MAX=r.runs.shape[1], PAIRS_MAX=r.pairs.shape[1], TICKETS=r.tickets.shape[0],
        num_warps=1,  # which sees one value of each word that the daemon changes
        **constants,
    )  # fmt: skip


def post(
    state: HeadState, rows: int, step: torch.Tensor, layer: int, delta: Delta, wishes: Wishes, requests: Requests
) -> None:
    """Hands the claimed ticket over. step: int32[1]."""
    heads, r = state.shape.heads, requests
    tickets, runs_max, pairs_max = r.tickets.shape[0], r.runs.shape[1], r.pairs.shape[1]
    chunks = -(-delta.pairs.shape[1] // CHUNK)
    launch(
        _pairs, (rows * heads, chunks), wishes.count, wishes.wishes, delta.pairs, state.epoch, state.issued,
        r.claimed, r.runs, r.pairs, layer, SLOTS=state.shape.slots, HEADS=heads, WISHES=wishes.runs,
        STAGED=delta.pairs.shape[1], TICKETS=tickets, RUNS_MAX=runs_max, PAIRS_MAX=pairs_max, CHUNK=CHUNK,
    )  # fmt: skip
    launch(
        _ticket, (1,), wishes.count, wishes.number, step, r.claimed, r.next_number, r.tickets,
        r.tickets.view(torch.int64), layer, TICKETS=tickets, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer", "looks"])
def _wishes(
    slots, pair_count, has_old_set, count, number, wishes, layer, looks,
    own_poison, peer_poison, consumed, next_number, claimed, error,
    LAYERS: tl.constexpr, LAYERS_BLOCK: tl.constexpr, LANES: tl.constexpr, LANES_BLOCK: tl.constexpr,
    HEADS: tl.constexpr, WISHES: tl.constexpr, RUNS_MAX: tl.constexpr, PAIRS_MAX: tl.constexpr, TICKETS: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, LANES_BLOCK)
    pairs = tl.load(pair_count + lane, mask=lane < LANES, other=0)
    fetches = (pairs > 0).to(tl.int32)
    wish = wishes + (layer * WISHES + tl.cumsum(fetches, 0) - 1) * _FIELDS
    there = fetches != 0
    tl.store(wish + _SLOT, tl.load(slots + lane // HEADS, mask=there, other=0), mask=there)
    tl.store(wish + _HEAD, lane % HEADS, mask=there)
    tl.store(wish + _HAS_OLD_SET, tl.load(has_old_set + lane, mask=there, other=0), mask=there)
    tl.store(wish + _PAIRS, pairs, mask=there)
    tl.store(wish + _FIRST_PAIR, tl.cumsum(pairs, 0) - pairs, mask=there)
    runs = tl.sum(fetches, 0)
    tl.store(count + layer, runs)
    if TICKETS > 0:
        next_ = tl.load(next_number)
        tl.store(claimed, tl.full((), 0, tl.int64))
        if runs != 0:
            refusal = tl.full((), _TOO_LARGE, tl.int32)
            if (runs <= RUNS_MAX) & (tl.sum(pairs, 0) <= PAIRS_MAX):
                refusal = _refusal(
                    number, next_ - TICKETS, own_poison, peer_poison, consumed, looks, LAYERS, LAYERS_BLOCK
                )
            if refusal == 0:
                tl.store(claimed, next_)
            else:
                tl.atomic_cas(error, 0, refusal)


@triton.jit
def _refusal(
    number, before, own_poison, peer_poison, consumed, looks, LAYERS: tl.constexpr, LAYERS_BLOCK: tl.constexpr
):
    """Why the ticket that takes the area of ticket `before` may not be posted; 0 if it may. That one must have been
    collected here and consumed there, and a cell can be seen before it counts as consumed: looks again."""
    layer = tl.arange(0, LAYERS_BLOCK)
    open_ = tl.load(number + layer, mask=layer < LAYERS, other=0)
    if tl.max(((open_ > 0) & (open_ <= before)).to(tl.int32), 0) != 0:
        looks = 0
    refusal = tl.full((), _NO_CREDIT, tl.int32)
    look = tl.full((), 0, tl.int32)
    while (look < looks) & (refusal == _NO_CREDIT):
        if (load_acquire(own_poison) | load_acquire(peer_poison)) != 0:
            refusal = tl.full((), POISONED, tl.int32)
        elif load_acquire(consumed) >= before:
            refusal = tl.full((), 0, tl.int32)
        look += 1
    return refusal


@triton.jit(do_not_specialize=["layer"])
def _pairs(
    count, wishes, staged, epoch, issued, claimed, runs, pairs, layer,
    SLOTS: tl.constexpr, HEADS: tl.constexpr, WISHES: tl.constexpr, STAGED: tl.constexpr, TICKETS: tl.constexpr,
    RUNS_MAX: tl.constexpr, PAIRS_MAX: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    run, chunk = tl.program_id(0), tl.program_id(1)
    if run >= tl.load(count + layer):
        return
    number = tl.load(claimed)
    if number == 0:
        return
    wish = wishes + (layer * WISHES + run) * _FIELDS
    slot, head = tl.load(wish + _SLOT), tl.load(wish + _HEAD)
    first, total = tl.load(wish + _FIRST_PAIR), tl.load(wish + _PAIRS)
    area = number & (TICKETS - 1)
    i = chunk * (2 * CHUNK) + tl.arange(0, 2 * CHUNK)
    from_ = staged + (slot * HEADS + head).to(tl.int64) * (2 * STAGED)
    words = tl.load(from_ + i, mask=i < 2 * total)
    tl.store(pairs + (area * PAIRS_MAX + first) * 2 + i, words, mask=i < 2 * total)
    if chunk == 0:
        out = runs + (area * RUNS_MAX + run) * 8
        tl.store(out, slot)
        tl.store(out + 1, tl.load(epoch + slot).to(tl.int32))
        tl.store(out + 2, tl.load(issued + (layer * SLOTS + slot) * HEADS + head))
        tl.store(out + 3, first)
        tl.store(out + 4, total)
        tl.store(out + 5, head)  # lane, and kind 0
        tl.store(out + 6, 0)
        tl.store(out + 7, 0)


@triton.jit(do_not_specialize=["layer"])
def _ticket(count, number, step, claimed, next_number, tickets, sequences, layer, TICKETS: tl.constexpr):
    mine = tl.load(claimed)
    tl.store(number + layer, mine)
    if mine == 0:
        return
    area = mine & (TICKETS - 1)
    out = tickets + area * 16
    tl.store(out + 2, tl.load(step))
    tl.store(out + 3, layer)  # and micro-batch 0
    tl.store(out + 4, (tl.load(count + layer) << 16) | _GATHER)
    tl.store(out + 5, 0)
    tl.store(next_number, mine + 1)
    store_release(sequences + area * 8, mine)
