"""One named test for each way in which query-similarity caches have gone wrong."""

import numpy as np
import pytest
from decode_worker.policy.qsac import QsacPolicy

from decode_worker.policy.plan import QueryKind

from .pretend import ERROR, OK, Bench, RandomRetriever, settings

LAYER, SLOT, HEAD = 1, 0, 0


@pytest.fixture
def bench(rng) -> Bench:
    return settled(QsacPolicy, rng)


def settled(policy: type[QsacPolicy], rng) -> Bench:
    """One slot with 512 stored tokens, settled into its first sets."""
    made = Bench(policy(settings(slack=2.0), RandomRetriever(rng)), rng)
    made.bind(SLOT, 512, 600)
    made.query = np.stack([made.queries(1)] * 3)
    made.step(made.query)
    made.policy.begin_step([SLOT], [601])
    made.write(LAYER, [SLOT], [601])
    return made


def snapshot(bench: Bench) -> list[bytes]:
    state = bench.policy._state
    arrays = (state.records, state.places, state.counts, state.label, state.label_kind, state.cover, state.generation)
    return [a[LAYER, SLOT].tobytes() for a in arrays] + [bench.attended(LAYER, 0, h) for h in (0, 1)]


def plan_a_miss(bench: Bench):
    bench.policy.begin_step([SLOT], [bench.positions[SLOT]])
    plan = bench.policy.plan(LAYER, -bench.query[LAYER])
    assert plan is not None
    assert len(plan.runs) == 2
    return plan


def results(*statuses: int) -> np.ndarray:
    return np.array([[s, 0] for s in statuses], np.uint32)


def test_harmonic_mean_with_a_negative_cosine_is_a_miss(rng):
    bench = Bench(QsacPolicy(settings(group=4), RandomRetriever(rng)), rng)
    bench.bind(SLOT, 512, 600)
    cosines = np.tile([0.9, 0.9, 0.9, -0.31], 2)
    label, query = np.zeros((2, 8, 8), np.float32)
    label[:, 0] = 1
    query[:, 0], query[:, 1] = cosines, np.sqrt(1 - cosines**2)
    bench.step(np.stack([label[None]] * 3))
    bench.policy.begin_step([SLOT], [601])
    assert bench.policy.plan(LAYER, query[None]) is not None
    assert bench.policy.counters.hits == 0


@pytest.mark.parametrize("written", ["nothing", "half", "all"])
def test_label_is_never_ahead_of_its_data(bench, written):
    before = snapshot(bench)
    plan = plan_a_miss(bench)
    for run in range(2):
        if written != "nothing":
            bench.copy(plan, run, half=written == "half")
    assert snapshot(bench) == before, "a late store lands in a live place"
    assert bench.policy.settle(LAYER, results(ERROR, ERROR))
    assert snapshot(bench) == before
    assert bench.policy.counters.stale == 2


class LabelFirst(QsacPolicy):
    """The planted bug: a label that changes when its records are asked for, not when they are there."""

    def _select(self, layer, slot, *args):
        deltas = super()._select(layer, slot, *args)
        for delta in deltas:
            self._state.label[layer, slot, delta.head] = delta.label
        return deltas


def test_label_ahead_of_its_data_is_caught(rng):
    with pytest.raises(AssertionError, match="late store"):
        test_label_is_never_ahead_of_its_data(settled(LabelFirst, rng), "nothing")


def test_failed_head_keeps_its_set_while_another_commits(bench):
    before = snapshot(bench)
    plan = plan_a_miss(bench)
    bench.copy(plan)
    bench.policy.settle(LAYER, results(ERROR, OK))
    after = snapshot(bench)
    assert after[-2] == before[-2]
    assert after[-1] != before[-1]


def test_unresolved_run_stays_quarantined_and_posts_no_other(bench):
    plan = plan_a_miss(bench)
    assert bench.policy.settle(LAYER, results(0, OK))
    bench.policy.begin_step([SLOT], [602])
    again = bench.policy.plan(LAYER, 0.5 * bench.queries(1))
    assert again is None or HEAD not in again.runs["lane"]
    first, count = int(plan.runs["first_pair"][0]), int(plan.runs["pair_count"][0])
    quarantined = plan.pairs[first : first + count, 1]
    assert not np.isin(bench.policy._state.free_places(LAYER, SLOT, HEAD), quarantined).any()
    bench.copy(plan, 0)
    generation = bench.policy._state.generation[LAYER, SLOT, HEAD]
    bench.policy.settle(LAYER, results(OK, OK), plan)
    assert bench.policy._state.generation[LAYER, SLOT, HEAD] == plan.generation[0] > generation


def test_ticket_that_was_never_posted_changes_nothing(bench):
    before = snapshot(bench)
    free = bench.policy._state.free[LAYER, SLOT].copy()
    plan_a_miss(bench)
    assert bench.policy.settle(LAYER, None)
    assert snapshot(bench) == before
    np.testing.assert_array_equal(bench.policy._state.free[LAYER, SLOT], free)


def test_failure_after_a_cleared_set_is_an_error(rng):
    bench = Bench(QsacPolicy(settings(slack=0.0), RandomRetriever(rng)), rng)
    bench.bind(SLOT, 512, 600)
    bench.query = np.stack([bench.queries(1)] * 3)
    bench.step(bench.query)
    plan = plan_a_miss(bench)
    assert bench.policy.counters.cleared == 2
    state = bench.policy._state
    assert not state.counts[LAYER, SLOT].any()
    assert not state.label[LAYER, SLOT].any()
    bench.copy(plan, 0)
    assert not bench.policy.settle(LAYER, results(OK, ERROR)), "a head without a set must not go on"
    bench.policy.begin_step([SLOT], [602])
    retry = bench.policy.plan(LAYER, -bench.query[LAYER])
    assert retry is not None
    assert retry.runs["lane"].tolist() == [1], "a cleared head always misses"
    bench.copy(retry)
    assert bench.policy.settle(LAYER, results(OK))


def test_true_query_is_never_compared_with_a_speculative_label(bench):
    same = bench.query[LAYER]
    bench.policy.begin_step([SLOT], [601])
    assert bench.policy.plan(LAYER, same, true_query=True) is not None, "the same numbers, but another kind"
    bench.policy.settle(LAYER, None)
    assert bench.policy.plan(LAYER, same) is None
    assert (bench.policy._state.label_kind[LAYER, SLOT] == QueryKind.SPECULATIVE).all()


def test_window_is_never_overwritten_while_read(rng):
    bench = Bench(QsacPolicy(settings(slack=0.5), RandomRetriever(rng)), rng)
    bench.bind(SLOT, 512, 600)
    for _ in range(40):
        bench.step(failing=0.3)  # checks every ticket against the live places
    assert bench.policy.counters.records_moved > 0


def test_reused_slot_inherits_nothing(bench):
    plan = plan_a_miss(bench)
    generation = bench.policy._state.issued[:, SLOT].copy()
    query = bench.query
    bench.unbind(SLOT)
    bench.bind(SLOT, 256, 300)
    assert not bench.policy.settle(LAYER, results(OK, OK), plan) or not bench.policy._state.counts[:, SLOT].any()
    state = bench.policy._state
    for array in (state.label, state.label_kind, state.counts, state.open):
        assert not array[:, SLOT].any()
    assert (state.generation[:, SLOT] >= generation).all()
    hits = bench.policy.counters.hits
    bench.step(query)
    assert bench.policy.counters.hits == hits, "the old session's label answered"


def test_failed_or_partial_store_never_becomes_visible(rng):
    bench = Bench(QsacPolicy(settings(), RandomRetriever(rng)), rng)
    bench.bind(SLOT, 512, 600)
    bench.policy.begin_step([SLOT], [600])
    plan = bench.policy.plan(LAYER, bench.queries(1))
    bench.copy(plan, 0, half=True)
    assert not bench.policy.settle(LAYER, results(ERROR, ERROR)), "the first set has nothing to fall back to"
    assert not bench.policy._state.counts[LAYER, SLOT].any()


def test_counters_advance_per_step_not_per_layer(rng):
    bench = Bench(QsacPolicy(settings(), RandomRetriever(rng)), rng)
    bench.bind(0, 256, 300)
    bench.bind(1, 256, 300)
    query = np.stack([bench.queries(2)] * 3)
    for _ in range(5):
        bench.step(query)
    counters = bench.policy.counters
    assert counters.steps == 5
    assert counters.lookups == 4 * 2 * 2 * 2, "steps after the first x slots x offloaded layers x heads"
    assert counters.hits == counters.lookups
    assert counters.hit_ratio == 1.0


def test_forced_misses_are_staggered_over_heads(rng):
    bench = Bench(QsacPolicy(settings(), RandomRetriever(rng)), rng)
    bench.bind(SLOT, 256, 272)
    query = np.stack([bench.queries(1)] * 3)
    forced_at = []
    for _ in range(settings().tail):
        before = bench.policy.counters.forced
        bench.step(query)
        forced_at += [bench.positions[SLOT] - 1] * (bench.policy.counters.forced - before)
    assert len(forced_at) >= 4
    assert len(set(forced_at[:4])) == 4
