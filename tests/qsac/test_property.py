"""Token sets stay disjoint and complete over many random steps: failures, reordering, seals, several slots."""

from dataclasses import replace

import numpy as np
import pytest
from decode_worker.policy.full import FullPolicy
from decode_worker.policy.none import NonePolicy
from decode_worker.policy.qsac import QsacPolicy

from decode_worker.policy.base import TailFull

from .pretend import Bench, RandomRetriever, settings

EVERYTHING = 1 << 20


@pytest.mark.parametrize("policy", [QsacPolicy, NonePolicy, FullPolicy])
@pytest.mark.parametrize("budget", [40, EVERYTHING], ids=["few", "all"])
@pytest.mark.parametrize("failing", [0.0, 0.2], ids=["sound", "failing"])
def test_token_is_in_exactly_one_set(rng, policy, budget, failing):
    bench = Bench(policy(settings(budget=budget), RandomRetriever(rng)), rng)
    bench.bind(0, 512, 700)
    bench.bind(1, 0, 3)  # shorter than the sinks
    for _ in range(345):
        bench.step(failing=failing)
    assert len(bench.packs[0]) == 4
    assert len(bench.packs[1]) == 1


def test_token_is_in_exactly_one_set_when_runs_end_late(rng):
    bench = Bench(NonePolicy(settings(budget=EVERYTHING, slack=1.0), RandomRetriever(rng)), rng)
    bench.bind(0, 512, 700)
    for _ in range(200):
        bench.step(failing=0.1, late=0.5)
    assert bench.policy.counters.stale > 0


def test_token_is_in_exactly_one_set_while_queries_mostly_hit(rng):
    bench = Bench(QsacPolicy(settings(budget=EVERYTHING), RandomRetriever(rng)), rng)
    bench.bind(0, 256, 300)
    query = np.stack([bench.queries(1)] * 3)
    for _ in range(400):
        bench.step(query + 0.05 * rng.standard_normal(query.shape).astype(np.float32), failing=0.1)
    counters = bench.policy.counters
    assert counters.hit_ratio > 0.8
    assert counters.forced > 0, "a tail was never near its end: the test is too short"


class CoverOffByOne(QsacPolicy):
    planted = False

    def _delta(self, *args):
        delta = super()._delta(*args)
        return replace(delta, cover=delta.cover - self.planted)


class CoverOneTooFar(QsacPolicy):
    def _delta(self, *args):
        delta = super()._delta(*args)
        return replace(delta, cover=delta.cover + 1)


def test_tail_token_counted_twice_is_caught(rng):
    policy = CoverOffByOne(settings(budget=EVERYTHING), RandomRetriever(rng))
    bench = Bench(policy, rng)
    bench.bind(0, 512, 520)
    for _ in range(3):
        bench.step()
    policy.planted = True
    with pytest.raises(AssertionError, match="token twice"):
        bench.step()


def test_token_in_no_set_is_caught(rng):
    bench = Bench(CoverOneTooFar(settings(budget=EVERYTHING), RandomRetriever(rng)), rng)
    bench.bind(0, 512, 600)
    with pytest.raises(AssertionError, match="token in no set"):
        bench.step()


def test_full_tail_is_an_error_not_an_overwrite(rng):
    policy = QsacPolicy(settings(), RandomRetriever(rng))
    bench = Bench(policy, rng)
    bench.bind(0, 256, 256)
    query = np.stack([bench.queries(1)] * 3)
    policy.wants_seal = lambda slot, position: False
    for _ in range(settings().tail):
        assert policy.room(0, bench.positions[0]) > 0
        bench.step(query)
    assert policy.room(0, bench.positions[0]) == 0
    with pytest.raises(TailFull):
        bench.step(query)
    assert policy.counters.forced > 0
