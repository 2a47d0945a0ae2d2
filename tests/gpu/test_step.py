"""Tickets that kernels post: what they say, the credit that they keep, and that a replay of launches is a step."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from decode_worker import _native
from decode_worker.device import Host
from decode_worker.engine.step import DecodeLoop
from decode_worker.gpu import sync
from decode_worker.gpu.kernels.wishes import NO_CREDIT
from decode_worker.gpu.launch import recorded
from decode_worker.kernels.sets import KERNELS
from decode_worker.policy.counters import Counters
from tests.qsac.pretend import RandomRetriever

from .ring import PretendRing
from .twins import LAYERS, WAIT_US, Twins, look_up, reference_ticket, twins_over


@pytest.fixture
def ring() -> Iterator[PretendRing]:
    made = PretendRing()
    yield made
    made.close()


@pytest.mark.parametrize("preset", ["qsac", "lru"])
def test_a_ticket_says_what_the_reference_plans_and_its_answer_is_committed(rng, ring, preset):
    twins = twins_over(ring, rng, preset, tau=np.full((LAYERS, 2), 0.7, np.float32))
    twins.bind(0, 768, 790)
    twins.bind(1, 256, 300)
    seq = number = 0
    while seq <= len(ring.tickets):  # round the ring
        assert number < 20, "misses are too rare"
        twins.begin({0: 790 + number, 1: 300 + number})
        for layer in range(LAYERS):
            look_up(twins, layer)
            right = reference_ticket(twins, layer)
            if right is None:
                assert not ring.posted(seq + 1), "without a miss nothing is posted"
            else:
                seq += 1
                ticket, step = ring.take(seq)
                assert (ticket.layer, step) == (layer, number)
                assert (ticket.runs == right.runs).all()
                assert ticket.pairs.tolist() == right.pairs.tolist()
                statuses = twins.statuses(right, failing=0.2)
                ring.answer(seq, statuses)
                twins.reference.kernels.commit(layer, statuses)
            twins.triton.kernels.await_ticket(layer)
            twins.compare()
        if number != 1:
            twins.turn(9.0)
        number += 1


def test_a_layer_whose_heads_hit_posts_nothing_and_uses_no_number_up(rng, ring):
    twins = twins_over(ring, rng, tau=np.full((LAYERS, 2), 0.5, np.float32))
    twins.bind(0, 512, 530)
    for position, posts in ((530, 1), (531, 0), (532, 0)):
        twins.begin({0: position})
        look_up(twins, 0)
        assert ring.posted(1)
        assert not ring.posted(2)
        if posts:
            ring.answer(1, twins.statuses(ring.take(1)[0], failing=0))
        twins.triton.kernels.await_ticket(0)
    assert Counters.of(twins.triton.state.counters.tolist()).hits == 4


def miss_everywhere(twins: Twins, ring: PretendRing, position: int, seq: int, consumed: bool) -> None:
    twins.query = twins.noise(3.0)
    twins.begin({0: position})
    look_up(twins, 0)
    ring.answer(seq, twins.statuses(ring.take(seq)[0], failing=0), consumed)
    twins.triton.kernels.await_ticket(0)


def test_without_credit_a_row_keeps_its_old_set_and_the_next_step_says_so(rng, ring):
    twins = twins_over(ring, rng, "infinigen", slack=1.0)
    twins.bind(0, 768, 790)
    for seq in range(1, 5):
        miss_everywhere(twins, ring, 790 + seq, seq, consumed=False)
    state = twins.triton.state
    before = [counted.clone() for counted in (state.parity, state.generation, ring_words(ring))]
    twins.query = twins.noise(3.0)
    twins.begin({0: 795})
    look_up(twins, 0)
    twins.triton.kernels.await_ticket(0)
    assert not ring.posted(5)
    assert torch.equal(state.parity, before[0]), "the sets in use stay"
    assert torch.equal(ring_words(ring), before[2]), "the area of a ticket that is not consumed is not touched"
    assert Counters.of(state.counters.tolist()).stale == 2
    with pytest.raises(_native.NoCredit, match="not consumed an earlier ticket"):
        twins.triton.kernels.raise_for_error()
    ring.answer(4, np.full((2, 2), (1, 0), np.uint32))
    miss_everywhere(twins, ring, 796, 5, consumed=True)


class Clock:
    """Goes on while somebody naps, and tells `after` how often that was."""

    def __init__(self, after: Callable[[int], None] = lambda naps: None) -> None:
        self.now_ns, self.naps, self._after = 10**15, 0, after

    def monotonic_ns(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)
        self.naps += 1
        self._after(self.naps)


def test_credit_is_waited_for_by_the_clock(rng, ring, monkeypatch):
    """For WAIT_US, and with naps: as a ticket's answer is."""
    twins = twins_over(ring, rng, "infinigen", slack=1.0)
    twins.bind(0, 768, 790)
    for seq in range(1, 5):
        miss_everywhere(twins, ring, 790 + seq, seq, consumed=False)
    clock = Clock()
    monkeypatch.setattr(sync, "time", clock)
    twins.query = twins.noise(3.0)
    twins.begin({0: 795})
    look_up(twins, 0)
    assert clock.naps == WAIT_US * 1000 / (sync.PAUSE_S * 1e9)
    with pytest.raises(_native.NoCredit):
        twins.triton.kernels.raise_for_error()

    late = Clock(lambda naps: ring.answer(4, np.full((2, 2), (1, 0), np.uint32), consumed=naps > 3))
    monkeypatch.setattr(sync, "time", late)
    twins.query = twins.noise(3.0)
    twins.begin({0: 796})
    look_up(twins, 0)
    twins.triton.kernels.raise_for_error()
    assert late.naps == 4
    assert ring.posted(5)


def ring_words(ring: PretendRing) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([ring.pairs.ravel(), ring.runs.view(np.uint32).ravel()]).astype(np.int64))


def test_a_ticket_of_ones_own_that_was_not_collected_gives_no_credit(rng):
    ring = PretendRing(tickets=2)
    twins = twins_over(ring, rng, "infinigen", slack=1.0)
    twins.bind(0, 768, 790)
    twins.begin({0: 790})
    for layer in (0, 1):
        look_up(twins, layer)
    ring.answer(1, np.full((2, 2), (1, 0), np.uint32))
    ring.answer(2, np.full((2, 2), (1, 0), np.uint32))
    twins.triton.kernels.await_ticket(1)
    twins.query = twins.noise(3.0)
    look_up(twins, 1)
    assert not ring.posted(3)
    with pytest.raises(_native.NoCredit):
        twins.triton.kernels.raise_for_error()
    ring.close()


def test_a_poisoned_ring_takes_no_ticket(rng, ring):
    twins = twins_over(ring, rng)
    twins.bind(0, 768, 790)
    ring.poison()
    twins.begin({0: 790})
    look_up(twins, 0)
    assert not ring.posted(1)
    twins.triton.kernels.settle(WAIT_US)
    assert twins.triton.faults() == [_native.FAULT_NOT_POSTED], "there was no old set"
    with pytest.raises(_native.RingPoisoned):
        twins.triton.kernels.raise_for_error()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("a launch")])
def test_what_a_step_that_was_given_up_says_is_not_the_next_one_s(rng, ring, error):
    kernels = twins_over(ring, rng).triton.kernels
    transport = SimpleNamespace(steps=contextlib.nullcontext)
    loop = SimpleNamespace(_transport=transport, _device=Host(), kernels=kernels)
    kernels._error[:] = NO_CREDIT
    with pytest.raises(type(error)), DecodeLoop._posting(loop):
        raise error
    kernels.raise_for_error()


@pytest.mark.parametrize("limits", [{"runs_max": 1}, {"pairs_max": 50}])
def test_misses_that_do_not_fit_a_ticket_are_not_posted(rng, limits):
    ring = PretendRing(**limits)
    twins = twins_over(ring, rng)
    twins.bind(0, 768, 790)
    twins.begin({0: 790})
    look_up(twins, 0)
    assert not ring.posted(1)
    with pytest.raises(_native.RingError, match="do not fit a ticket"):
        twins.triton.kernels.raise_for_error()
    ring.close()


def test_the_launches_of_one_step_carry_out_every_later_one(rng, ring):
    """As a captured graph does: hits, misses, forced ones, and an index that has grown in between."""
    twins = twins_over(ring, rng, tau=np.full((LAYERS, 2), 0.7, np.float32))
    twins.bind(0, 256, 280)
    twins.bind(1, 768, 790)
    query = [torch.from_numpy(twins.layer_query(layer)) for layer in range(LAYERS)]
    lines: list = [None] * LAYERS
    seq, traces = 0, []
    positions = {0: 280, 1: 790}
    for number in range(6):
        if number == 2:
            twins.grow(0)
        if number == 4:
            positions = {0: 254 + twins.settings.tail, 1: positions[1]}
        twins.begin(positions)
        for layer in range(LAYERS):
            query[layer].copy_(torch.from_numpy(twins.layer_query(layer)))
            with recorded() as launches:
                if number == 0:
                    twins.triton.kernels.look_up(layer, query[layer], twins.triton.policy.query_kind(layer))
                    lines[layer] = launches
                else:
                    for replayed in lines[layer]:
                        replayed()
            right = reference_ticket(twins, layer)
            if right is not None:
                seq += 1
                statuses = twins.statuses(right, failing=0)
                assert ring.take(seq)[0].pairs.tolist() == right.pairs.tolist()
                ring.answer(seq, statuses)
                twins.reference.kernels.commit(layer, statuses)
            twins.triton.kernels.await_ticket(layer)
            twins.compare()
        traces.append(seq)
        twins.turn(1.0)
        positions = {slot: position + 1 for slot, position in positions.items()}
    counted = Counters.of(twins.triton.state.counters.tolist())
    assert counted.forced > 0
    assert 0 < counted.hits < counted.lookups


def test_the_trace_does_not_depend_on_what_heads_do(rng, ring):
    twins = twins_over(ring, rng, tau=np.full((LAYERS, 2), 0.5, np.float32))
    twins.bind(0, 768, 790)
    query = torch.from_numpy(twins.layer_query(1))
    traces = []
    for position in (790, 791):
        twins.begin({0: position})
        with recorded() as launches:
            twins.triton.kernels.look_up(1, query, twins.triton.policy.query_kind(1))
        if position == 790:
            ring.answer(1, twins.statuses(ring.take(1)[0], failing=0))
        twins.triton.kernels.await_ticket(1)
        traces.append(
            [(x.name, x.grid, [a.data_ptr() if torch.is_tensor(a) else a for a in x.arguments], x.options)
             for x in launches]
        )  # fmt: skip
    assert traces[0] == traces[1]
    assert Counters.of(twins.triton.state.counters.tolist()).hits == 2, "the second time both heads hit"


def test_a_retriever_that_selects_in_python_is_refused(rng):
    context = Twins(rng, "qsac").reference.kernels.context
    with pytest.raises(ValueError, match="kernels='triton' select by hash codes, not with retriever='random'"):
        KERNELS["triton"](replace(context, retriever=RandomRetriever(1)))
