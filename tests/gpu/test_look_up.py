"""What heads that miss hold, fetch and attend to, in Triton, bit for bit as the reference has it."""

import itertools

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from decode_worker.gpu.kernels import delta, select
from decode_worker.policy.cache.base import CACHES, Cache, Stamp
from decode_worker.policy.counters import Counters

from .twins import LAYERS, Twins

CACHED = {
    "exact": (CACHES["exact_set"], "qsac"),
    "whole": (CACHES["whole_set"], "litecache"),
    "always": (CACHES["exact_set"], "infinigen"),
    "lru": (CACHES["lru"], "lru"),
    "lfu": (Cache(keeps=True, stamp=Stamp.COUNT), "lru"),
    "fifo": (Cache(keeps=True), "lru"),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Lists of several blocks in windows of a hundred places."""
    monkeypatch.setattr(select, "BLOCK", 512)
    monkeypatch.setattr(delta, "CHUNK", 32)


@pytest.mark.parametrize("name", CACHED)
def test_state_and_tickets_are_the_references(rng, name):
    cache, preset = CACHED[name]
    unit = int(rng.choice([1, 4])) if cache.keeps else 1
    twins = Twins(
        rng, preset, cache=cache, unit=unit, group=int(rng.integers(1, 5)), budget=int(rng.integers(40, 90)),
        slack=float(rng.choice([0, 0.125, 1])), attended=0.6 if cache.keeps else None,
        tau=rng.uniform(0.2, 0.9, (LAYERS, 2)).astype(np.float32),
    )  # fmt: skip
    twins.bind(0, 768, 790)
    twins.bind(1, 256, 300)
    for number in range(3):
        if number == 1:
            twins.grow(1)
        twins.step({1: 300 + number, 0: 790 + number}, failing=0.2)
        twins.turn(1.0)


def test_a_full_window_gives_its_old_set_up_and_a_cache_its_oldest_units(rng):
    """Queries that share nothing, without slack: every miss clears, and under `lru` evicts as well."""
    for preset in ("qsac", "lru"):
        twins = Twins(rng, preset, slack=0.0, budget=64, unit=1, attended=0.9 if preset == "lru" else None)
        twins.bind(0, 768, 790)
        for number in range(3):
            twins.query = twins.noise(3.0)
            twins.step({0: 790 + number}, failing=0.3 * number)
        assert Counters.of(twins.triton.state.counters.tolist()).cleared > 0


def test_a_session_that_began_empty_fetches_its_sinks_with_its_first_set(rng):
    for preset in ("qsac", "lru"):
        twins = Twins(rng, preset)
        twins.bind(0, 0, 3)
        twins.step({0: 3})
        twins.grow(0)
        twins.query = twins.noise(3.0)
        twins.begin({0: 290})
        ticket = twins.plan(0)
        assert ticket is not None
        for run in ticket.runs:
            places = ticket.pairs[run["first_pair"] : run["first_pair"] + run["pair_count"], 1]
            assert {0, 1, 2, 3} <= set(places.tolist())


def test_a_set_of_everything_and_one_that_needs_nothing(rng):
    """All tokens fit; a second selection of the same ones moves nothing and is in use at once."""
    twins = Twins(rng, "infinigen", budget=400)
    twins.bind(0, 256, 400)
    twins.step({0: 400})
    twins.begin({0: 401})
    before = twins.triton.state.parity[0, 0].clone()
    assert twins.plan(0) is None
    assert torch.equal(twins.triton.state.parity[0, 0], before ^ 1)
    twins.compare()


def test_a_head_near_the_end_of_its_tail_misses_though_its_query_is_the_same(rng):
    twins = Twins(rng, "qsac", tau=np.full((LAYERS, 2), 0.5, np.float32))
    twins.bind(0, 256, 270)
    twins.step({0: 270})
    twins.grow(0)
    twins.step({0: 271})
    assert Counters.of(twins.triton.state.counters.tolist()).forced == 0
    twins.step({0: 254 + twins.settings.tail})
    counted = Counters.of(twins.triton.state.counters.tolist())
    assert counted.forced > 0
    assert counted.hits > 0


def test_a_slot_of_another_session_inherits_nothing(rng):
    twins = Twins(rng, "qsac")
    twins.bind(0, 512, 530)
    twins.step({0: 530})
    for bench in twins.benches:
        bench.unbind(0)
    twins.bind(0, 256, 280)
    twins.step({0: 280})


@pytest.mark.timeout(60)
def test_what_programs_of_an_interrupted_launch_have_counted_is_forgotten(rng, monkeypatch):
    """Nobody interrupts a device's; an interpreted one would wait for programs that are gone."""
    twins = Twins(rng, "qsac")
    twins.bind(0, 512, 530)
    twins.begin({0: 530})
    atomic, calls = InterpreterBuilder.create_atomic_rmw, itertools.count()

    def interrupted(*arguments: object) -> object:
        if next(calls) == 9:
            raise KeyboardInterrupt
        return atomic(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_atomic_rmw", interrupted)
        with pytest.raises(KeyboardInterrupt):
            twins.triton.plan(0, twins.layer_query(0))
    twins.step({0: 530})
