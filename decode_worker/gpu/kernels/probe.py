"""A window tried as a step uses it: a program posts a ticket and polls its cell while the daemon delivers; what fetches
records for such a window fetches them; and a launch of its own compares what lies where attention reads.

Where the device has graphs, the rounds are a line of launches like a step's: their places and seeds, and the ticket's
number, are read from the device's memory.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

from decode_worker import _native
from decode_worker.device import Device
from decode_worker.engine.graphs import Graphs
from decode_worker.gpu.kernels.gather import gather
from decode_worker.gpu.kernels.wishes import PAIRS, STATUS, Wishes
from decode_worker.gpu.launch import launch
from decode_worker.gpu.requests import Requests, map_ring
from decode_worker.gpu.sync import LATE, POISONED, READY, poll, store_release
from decode_worker.window.base import Window
from decode_worker.window.probes import Probe

LOOK_S = 20e-6
GATHER_PROGRAMS = 32
WORDS_AT_ONCE = 2048
CELLS = 32  # that one look takes in, as in a step (kernels/arrive.py)

_ONE_PROBE, _STATUS = tl.constexpr(1 << 16 | _native.OP_PROBE), tl.constexpr(STATUS)  # runs, op
_SPREAD, _MIX = tl.constexpr(0x9E3779B1), tl.constexpr(0x85EBCA6B)  # csrc/core/probe.h


def ask(window: Window, device: Device, ring: _native.RingProducer, asked: list[Probe], wait_us: int) -> None:
    """WindowError; RingTimeout, after which the ring is poisoned; RingPoisoned. `asked` are of one size."""
    rounds = Rounds(window, device, ring, asked, wait_us * 1000)
    ring.begin_steps()
    try:
        graphs = Graphs(device) if device.graphs else None
        for _ in asked:
            graphs.run("probe", rounds.launch) if graphs is not None else rounds.launch()
        device.wait()
    finally:
        ring.end_steps()
    for probe, (outcome, status, fault, wrong) in zip(asked, rounds.results.tolist(), strict=True):
        if outcome == LATE.value:
            raise _native.RingTimeout("a probe is not done within the deadline; the ring is poisoned")
        if outcome == POISONED.value:
            raise _native.RingPoisoned("the ring is poisoned")
        probe.check(status, fault, wrong)
    _await_consumed(rounds.requests, wait_us)


class Rounds:
    """`results`: int64[rounds, 4], of each its outcome (gpu/sync.py), its run's status and fault, its wrong words."""

    def __init__(
        self, window: Window, device: Device, ring: _native.RingProducer, asked: list[Probe], timeout_ns: int
    ) -> None:
        where, words = device.torch_device, asked[0].count * _native.PROBE_BYTES // 4
        error = torch.zeros(1, dtype=torch.int32, device=where)
        self.requests, self._cells = map_ring(ring, device, error)
        plan = [(probe.part.start, probe.seed) for probe in asked]
        self._plan = torch.tensor(plan, dtype=torch.int64, device=where)
        self._round = torch.zeros(1, dtype=torch.int32, device=where)
        self.results = torch.zeros((len(asked), 4), dtype=torch.int64, device=where)
        self._lines, self._words, self._timeout_ns = asked[0].count, words, timeout_ns
        whole = len(window.tensor) // 4 * 4
        self._window, self._landing = (t[:whole].view(torch.int32) for t in (window.tensor, window.landing))
        self._fetches = window.landing is not window.tensor
        # One head of one slot and layer, whose place i is the probe's line i.
        self._head: Any = SimpleNamespace(
            parity=torch.zeros((1, 1, 1), dtype=torch.uint8, device=where),
            base=torch.zeros((1, 1, 1), dtype=torch.int64, device=where),
        )
        self._wishes = Wishes(1, 2, where)
        self._wishes.wishes[0, 0, PAIRS] = self._lines
        self._pairs = torch.arange(self._lines, dtype=torch.int32, device=where).repeat_interleave(2).view(1, -1, 2)

    def launch(self) -> None:
        r, wishes = self.requests, self._wishes
        launch(
            _ask, (1,), self._plan, self._round, r.next_number, r.runs, r.tickets, r.tickets.view(torch.int64),
            self._cells, r.own_poison, r.peer_poison, self.results, wishes.wishes, wishes.landed, self._head.base,
            self._timeout_ns,
            LINES=self._lines, TICKETS=r.tickets.shape[0], RUNS_MAX=r.runs.shape[1], CELLS=CELLS, num_warps=1,
        )  # fmt: skip
        if self._fetches:
            gather(
                self._head, 0, wishes, self._pairs, None, self._landing, self._window, _native.PROBE_BYTES,
                GATHER_PROGRAMS,
            )  # fmt: skip
        launch(
            _compare, (triton.cdiv(self._words, WORDS_AT_ONCE),), self._plan, self._round, self.results, self._window,
            WORDS=self._words, BLOCK=WORDS_AT_ONCE,
        )  # fmt: skip
        self._round.add_(1)


def _await_consumed(requests: Requests, wait_us: int) -> None:
    """A cell is seen before its ticket counts as consumed."""
    posted, deadline = int(requests.next_number) - 1, time.monotonic() + wait_us * 1e-6
    while int(requests.consumed) < posted:
        if time.monotonic() >= deadline:
            raise _native.RingTimeout(f"ticket {posted} is not consumed within {wait_us} us")
        time.sleep(LOOK_S)


@triton.jit(do_not_specialize=["timeout_ns"])
def _ask(
    plan, round_, next_number, runs, tickets, sequences, cells, own_poison, peer_poison, results, wish, landed, base,
    timeout_ns, LINES: tl.constexpr, TICKETS: tl.constexpr, RUNS_MAX: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    i = tl.load(round_)
    byte, seed = tl.load(plan + 2 * i), tl.load(plan + 2 * i + 1)
    number = tl.load(next_number)
    area = number & (TICKETS - 1)
    run = runs + area * (RUNS_MAX * 8)
    for field in tl.static_range(0, 8):
        tl.store(run + field, 0)
    tl.store(run + 2, seed.to(tl.int32))
    tl.store(run + 4, LINES)
    tl.store(run + 6, byte.to(tl.int32))
    tl.store(run + 7, (byte >> 32).to(tl.int32))
    out = tickets + area * 16
    tl.store(out + 2, 0)
    tl.store(out + 3, 0)
    tl.store(out + 4, _ONE_PROBE)
    tl.store(out + 5, 0)
    store_release(sequences + area * 8, number)
    cell = cells + area * (2 * RUNS_MAX)
    outcome = poll(cell + tl.zeros((CELLS,), tl.int32), number, own_poison, peer_poison, timeout_ns)
    answer = tl.full((), 0, tl.int64)
    if outcome == READY:
        answer = tl.load(cell + 1, volatile=True)
    if outcome == LATE:
        store_release(own_poison, tl.full((), -1, tl.int64))
    tl.store(results + 4 * i, outcome.to(tl.int64))
    tl.store(results + 4 * i + 1, answer & 0xFFFFFFFF)
    tl.store(results + 4 * i + 2, answer >> 32)
    tl.store(base, byte)
    tl.store(wish + _STATUS, answer.to(tl.int32))
    tl.store(landed, number)
    tl.store(landed + 1, (outcome == READY).to(tl.int64))
    tl.store(next_number, number + 1)


@triton.jit
def _compare(plan, round_, results, window, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.load(round_)
    first, seed = tl.load(plan + 2 * i) // 4, tl.load(plan + 2 * i + 1)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = n < WORDS
    x = (first + n).to(tl.uint32) * _SPREAD
    x = (x ^ (x >> 16)) * _MIX
    expected = (seed.to(tl.uint32) ^ x ^ (x >> 13)).to(tl.int32, bitcast=True)
    seen = tl.load(window + first + n, mask=there, other=0)
    tl.atomic_add(results + 4 * i + 3, tl.sum((there & (seen != expected)).to(tl.int64), 0))
