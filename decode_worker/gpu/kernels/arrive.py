"""Waits for the cells of a layer's ticket and commits what came: one program of one warp. With a new token there are
more, which append it behind the commit: whether a tail is full depends on it.

A ticket that does not come in time poisons the ring, finally: the word that the peer polls is set, `error` says so, and
every later wait ends at its first look. Heads whose records did not come keep their set, or their row has a fault.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from decode_worker import _native
from decode_worker.gpu.kernels.append import append_token
from decode_worker.gpu.kernels.wishes import AUX, FIELDS, HAS_OLD_SET, HEAD, PAIRS, SLOT, STATUS, Wishes
from decode_worker.gpu.launch import launch
from decode_worker.gpu.sync import LATE, READY, ends_last, poll, store_release, wait_for
from decode_worker.kernels.state import HeadState
from decode_worker.policy.counters import Counters

RUNS = 32  # that one look takes in

_FIELDS = tl.constexpr(FIELDS)
_SLOT, _HEAD, _HAS_OLD_SET, _PAIRS = (tl.constexpr(x) for x in (SLOT, HEAD, HAS_OLD_SET, PAIRS))
_STATUS, _AUX = tl.constexpr(STATUS), tl.constexpr(AUX)
_OK, _STALE = tl.constexpr(_native.STATUS_OK), tl.constexpr(_native.STATUS_STALE)
_ABORTED, _INTERNAL = tl.constexpr(_native.FAULT_ABORTED), tl.constexpr(_native.FAULT_INTERNAL)
_DATA_LOSS, _NOT_POSTED = tl.constexpr(_native.FAULT_DATA_LOSS), tl.constexpr(_native.FAULT_NOT_POSTED)
_MOVED, _STALES, _ERRORS = (tl.constexpr(Counters.NAMES.index(n)) for n in ("records_moved", "stale", "errors"))


@dataclass(frozen=True, eq=False)
class Completions:
    """What a wait looks at.

    cells                     int64[tickets, runs_max, 2], of the completions memory: sequence, status | aux << 32
    own_poison, peer_poison   int64[1]; own_poison is set at the deadline
    error                     int32[1]: 0, LATE or POISONED (gpu/sync.py), the first that happened
    """

    cells: torch.Tensor
    own_poison: torch.Tensor
    peer_poison: torch.Tensor
    error: torch.Tensor


def await_ticket(
    state: HeadState, layer: int, wishes: Wishes, ring: Completions, timeout_ns: int, stale_fails: bool
) -> None:
    """Waits for the layer's ticket, if there is one, and commits it."""
    _, slots, heads = state.parity.shape
    tickets, runs_max, _ = ring.cells.shape
    launch(
        _await_ticket, (1,), wishes.number, wishes.count, wishes.wishes, wishes.landed,
        ring.cells, ring.own_poison, ring.peer_poison, ring.error,
        state.parity, state.fault, state.counters,
        layer, timeout_ns, wishes.runs, tickets, runs_max, slots, heads, stale_fails, RUNS, num_warps=1,
    )  # fmt: skip


def arrive(
    state: HeadState,
    slots: torch.Tensor,
    positions: torch.Tensor,
    layer: int,
    wishes: Wishes,
    ring: Completions,
    timeout_ns: int,
    stale_fails: bool,
    key: torch.Tensor,
    value: torch.Tensor,
    window: torch.Tensor,
    record_bytes: int,
) -> None:
    """`await_ticket`, then `append` (kernels/append.py)."""
    rows, heads, d = key.shape
    tickets, runs_max, _ = ring.cells.shape
    launch(
        _arrive, (1 + rows * heads,), wishes.number, wishes.count, wishes.wishes, wishes.landed,
        ring.cells, ring.own_poison, ring.peer_poison, ring.error,
        state.parity, state.fault, state.counters, wishes.begun, wishes.ended,
        slots, positions, key, value, window, state.base, state.capacity, state.cover, state.resident,
        layer, timeout_ns, wishes.runs, tickets, runs_max, state.parity.shape[1], heads, stale_fails, RUNS,
        state.parity.numel(), triton.next_power_of_2(heads), d, triton.next_power_of_2(d),
        state.shape.sink, state.shape.unit, state.shape.tail, record_bytes, window.element_size(), num_warps=1,
    )  # fmt: skip


def commit(state: HeadState, layer: int, wishes: Wishes, answered: bool, stale_fails: bool) -> None:
    """Commits by the STATUS and AUX that the wishes hold; not answered: none of them was posted."""
    _, slots, heads = state.parity.shape
    launch(
        _commit, (1,), wishes.count, wishes.wishes, state.parity, state.fault, state.counters,
        layer, wishes.runs, slots, heads, int(answered), stale_fails, RUNS, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer", "timeout_ns"])
def _await_ticket(
    number_of, count_of, wishes, landed, cells, own_poison, peer_poison, error, parity, fault, counters,
    layer, timeout_ns, WISHES: tl.constexpr, TICKETS: tl.constexpr, RUNS_MAX: tl.constexpr,
    SLOTS: tl.constexpr, HEADS: tl.constexpr, STALE_FAILS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _collect(
        number_of, count_of, wishes, landed, cells, own_poison, peer_poison, error, parity, fault, counters,
        layer, timeout_ns, WISHES, TICKETS, RUNS_MAX, SLOTS, HEADS, STALE_FAILS, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer", "timeout_ns"])
def _arrive(
    number_of, count_of, wishes, landed, cells, own_poison, peer_poison, error, parity, fault, counters, begun, ended,
    slots, positions, key, value, window, base, capacity, cover, resident,
    layer, timeout_ns, WISHES: tl.constexpr, TICKETS: tl.constexpr, RUNS_MAX: tl.constexpr,
    SLOTS: tl.constexpr, HEADS: tl.constexpr, STALE_FAILS: tl.constexpr, BLOCK: tl.constexpr,
    SIDE: tl.constexpr, HEADS_BLOCK: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr, SINK: tl.constexpr,
    UNIT: tl.constexpr, TAIL: tl.constexpr, RECORD_BYTES: tl.constexpr, ELEMENT_BYTES: tl.constexpr,
):  # fmt: skip
    # The first to begin collects, whichever that is: the others wait for one that runs.
    order = tl.atomic_add(begun, 1, sem="relaxed")
    if order == 0:
        _collect(
            number_of, count_of, wishes, landed, cells, own_poison, peer_poison, error, parity, fault, counters,
            layer, timeout_ns, WISHES, TICKETS, RUNS_MAX, SLOTS, HEADS, STALE_FAILS, BLOCK,
        )  # fmt: skip
    else:
        wait_for(ended, 1)
        append_token(
            (order - 1) // HEADS, (order - 1) % HEADS, slots, positions, key, value, window, base, capacity, cover,
            parity, resident, fault, layer, SIDE, SLOTS, HEADS, HEADS_BLOCK, D, D_BLOCK, SINK, UNIT, TAIL,
            RECORD_BYTES, ELEMENT_BYTES,
        )  # fmt: skip
    if ends_last(ended, tl.num_programs(0), "gpu"):
        tl.store(begun, 0)


@triton.jit
def _collect(
    number_of, count_of, wishes, landed, cells, own_poison, peer_poison, error, parity, fault, counters,
    layer, timeout_ns, WISHES: tl.constexpr, TICKETS: tl.constexpr, RUNS_MAX: tl.constexpr,
    SLOTS: tl.constexpr, HEADS: tl.constexpr, STALE_FAILS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    count = tl.load(count_of + layer)
    if count == 0:
        tl.store(landed + 2 * layer, tl.full((), 0, tl.int64))
        tl.store(landed + 2 * layer + 1, tl.full((), 0, tl.int64))
        return
    number = tl.load(number_of + layer)
    mine = wishes + layer * (WISHES * _FIELDS)
    outcome = tl.full((), LATE, tl.int32)
    if number != 0:
        outcome = _read_cells(mine, count, number, cells, own_poison, peer_poison, timeout_ns, TICKETS, RUNS_MAX, BLOCK)
        if outcome != READY:
            tl.atomic_cas(error, 0, outcome)
        if outcome == LATE:
            store_release(own_poison, tl.full((), -1, tl.int64))
    answered = ((number != 0) & (outcome == READY)).to(tl.int32)
    tl.debug_barrier()  # every lane sees the statuses
    _settle(mine, count, answered, parity, fault, counters, layer, SLOTS, HEADS, STALE_FAILS, BLOCK)
    tl.store(landed + 2 * layer, number * answered)
    tl.store(landed + 2 * layer + 1, (count * answered).to(tl.int64))
    tl.store(number_of + layer, tl.full((), 0, tl.int64))
    tl.store(count_of + layer, 0)


@triton.jit(do_not_specialize=["layer", "answered"])
def _commit(
    count_of, wishes, parity, fault, counters, layer, WISHES: tl.constexpr, SLOTS: tl.constexpr, HEADS: tl.constexpr,
    answered, STALE_FAILS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    count = tl.load(count_of + layer)
    mine = wishes + layer * (WISHES * _FIELDS)
    _settle(mine, count, answered, parity, fault, counters, layer, SLOTS, HEADS, STALE_FAILS, BLOCK)
    tl.store(count_of + layer, 0)


@triton.jit
def _read_cells(
    mine, count, number, cells, own_poison, peer_poison, timeout_ns, TICKETS: tl.constexpr, RUNS_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Every cell of the ticket into its wish's STATUS and AUX. READY, LATE or POISONED."""
    first_cell = cells + (number & (TICKETS - 1)) * (2 * RUNS_MAX)
    outcome = tl.full((), READY, tl.int32)
    first = tl.full((), 0, tl.int32)
    while (first < count) & (outcome == READY):
        run = tl.minimum(first + tl.arange(0, BLOCK), count - 1)
        outcome = poll(first_cell + 2 * run, number, own_poison, peer_poison, timeout_ns)
        if outcome == READY:
            answer = tl.load(first_cell + 2 * run + 1, volatile=True)
            tl.store(mine + run * _FIELDS + _STATUS, answer.to(tl.int32))
            tl.store(mine + run * _FIELDS + _AUX, (answer >> 32).to(tl.int32))
        first += BLOCK
    return outcome


@triton.jit
def _settle(
    mine, count, answered, parity, fault, counters, layer, SLOTS: tl.constexpr, HEADS: tl.constexpr,
    STALE_FAILS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A wish that came is one flip; any other leaves its head as it was."""
    moved, errors, stale = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    for first in range(0, count, BLOCK):
        run = first + tl.arange(0, BLOCK)
        there = run < count
        wish = mine + run * _FIELDS
        status = tl.load(wish + _STATUS, mask=there, other=0)
        came = there & (tl.where(answered != 0, status, 0) == _OK)
        lacks = there & (came == 0)
        slot, head = tl.load(wish + _SLOT, mask=there, other=0), tl.load(wish + _HEAD, mask=there, other=0)
        has_old_set = tl.load(wish + _HAS_OLD_SET, mask=there, other=0)
        at = (layer * SLOTS + slot) * HEADS + head
        side = tl.load(parity + at, mask=came, other=0)
        tl.store(parity + at, side ^ 1, mask=came)
        moved += tl.sum(tl.load(wish + _PAIRS, mask=came, other=0).to(tl.int64), 0)
        errors += tl.sum(lacks.to(tl.int64), 0) * answered
        lost = (answered != 0) & (tl.load(wish + _AUX, mask=lacks, other=0) == _DATA_LOSS)
        stale += tl.sum((lacks & (has_old_set != 0) & (STALE_FAILS == 0) & (lost == 0)).to(tl.int64), 0)
        if tl.max(lacks.to(tl.int32), 0) != 0:
            for i in range(first, tl.minimum(first + BLOCK, count)):
                _fail(mine + i * _FIELDS, answered, fault, STALE_FAILS)
    if moved != 0:
        tl.atomic_add(counters + _MOVED, moved)
    if errors != 0:
        tl.atomic_add(counters + _ERRORS, errors)
    if stale != 0:
        tl.atomic_add(counters + _STALES, stale)


@triton.jit
def _fail(wish, answered, fault, STALE_FAILS: tl.constexpr):
    """A head goes on with its old set, if it has one and may; else its row has a fault. The gravest is kept: a lost
    block before any other, which no old set makes good."""
    status, aux = tl.load(wish + _STATUS), tl.load(wish + _AUX)
    has_old_set = tl.load(wish + _HAS_OLD_SET)
    unnamed = tl.where(status == _STALE, _ABORTED, _INTERNAL)
    code = tl.where(answered != 0, tl.where(aux != 0, aux, unnamed), _NOT_POSTED)
    came = (answered != 0) & (status == _OK)
    fatal = (came == 0) & ((has_old_set == 0) | (STALE_FAILS != 0) | (code == _DATA_LOSS))
    if fatal:
        at = fault + tl.load(wish + _SLOT)
        if code == _DATA_LOSS:
            tl.atomic_xchg(at, code)
        else:
            tl.atomic_cas(at, 0, code)
