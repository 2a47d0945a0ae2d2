"""One named test for each way in which query-similarity caches have gone wrong."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from decode_worker.engine.step import DecodeLoop
from decode_worker.policy.plan import QueryKind
from decode_worker.work import finish

from .pretend import ERROR, HEAD_DIM, OK, Bench, RandomRetriever, settings

LAYER, SLOT = 1, 0
DATA_LOSS = 15
SIDES = ("held", "held_places", "held_count", "places", "count", "label", "label_kind", "cover", "generation")


@pytest.fixture(params=["cpu", "reference"])
def kernels(request) -> str:
    return request.param


@pytest.fixture
def bench(kernels, rng) -> Bench:
    return settled(kernels, rng, slack=2.0)


def settled(kernels: str, rng: np.random.Generator, slots: int = 1, context: dict | None = None, **changes) -> Bench:
    """Slots with 512 stored tokens, settled into their first sets; the next step's layers before LAYER have run."""
    made = Bench(kernels, settings(**changes), RandomRetriever(7), rng, **(context or {}))
    for slot in range(slots):
        made.bind(slot, 512, 600)
    made.query = np.stack([made.queries(slots)] * 3)
    made.step(made.query)
    begin(made)
    made.write(LAYER)
    return made


def begin(bench: Bench) -> None:
    slots = sorted(bench.positions)
    bench.begin(slots, [bench.positions[slot] for slot in slots])


def snapshot(bench: Bench, slot: int = SLOT) -> list:
    """Of each head of LAYER: the side in use, and what is read."""
    state = bench.state
    heads = [state.side(LAYER, slot, head) for head in (0, 1)]
    sides = [getattr(state, name)[at].numpy().tobytes() for at in heads for name in SIDES]
    return sides + [bench.attended(LAYER, slot, head, bench.positions[slot]) for head in (0, 1)]


def plan_a_miss(bench: Bench):
    begin(bench)
    ticket = bench.plan(LAYER, -bench.query[LAYER])
    assert ticket is not None
    assert len(ticket.runs) == 2 * len(bench.positions)
    return ticket


def results(*statuses: int, aux: int = 0) -> np.ndarray:
    return np.array([[s, aux if s != OK else 0] for s in statuses], np.uint32)


def test_harmonic_mean_with_a_negative_cosine_is_a_miss(kernels, rng):
    bench = Bench(kernels, settings(group=4), RandomRetriever(1), rng)
    bench.bind(SLOT, 512, 600)
    cosines = np.tile([0.9, 0.9, 0.9, -0.31], 2)
    label, query = np.zeros((2, 8, HEAD_DIM), np.float32)
    label[:, 0] = 1
    query[:, 0], query[:, 1] = cosines, np.sqrt(1 - cosines**2)
    bench.step(np.stack([label[None]] * 3))
    begin(bench)
    assert bench.plan(LAYER, query[None]) is not None
    assert bench.policy.counters.hits == 0


@pytest.mark.parametrize("written", ["nothing", "half", "all"])
def test_label_is_never_ahead_of_its_data(bench, written):
    before = snapshot(bench)
    ticket = plan_a_miss(bench)
    for run in range(2):
        if written != "nothing":
            bench.copy(ticket, run, half=written == "half")
    assert snapshot(bench) == before, "a store lands in a live place"
    bench.kernels.commit(LAYER, results(ERROR, ERROR))
    assert bench.faults() == [0], "the old sets still serve"
    assert snapshot(bench) == before
    assert (bench.policy.counters.stale, bench.policy.counters.errors) == (2, 2)


@pytest.mark.parametrize("name", ["label", "places", "parity"])
def test_label_ahead_of_its_data_is_caught(kernels, rng, name):
    """The planted bugs: what changes when records are asked for, not when they are there."""
    bench = settled(kernels, rng, slack=2.0)
    plan, state = bench.plan, bench.state

    def plan_and_change(layer: int, query: np.ndarray):
        ticket = plan(layer, query)
        for head in (0, 1):
            now = state.side(LAYER, SLOT, head)
            if name == "parity":
                state.parity[now[1:]] ^= 1
            else:
                values = getattr(state, name)
                values[now] = values[(1 - now[0], *now[1:])]
        return ticket

    bench.plan = plan_and_change
    with pytest.raises(AssertionError, match=r"live place|another head's record"):
        test_label_is_never_ahead_of_its_data(bench, "nothing")


def test_failed_head_keeps_its_set_while_another_commits(bench):
    before = snapshot(bench)
    ticket = plan_a_miss(bench)
    bench.copy(ticket)
    bench.kernels.commit(LAYER, results(ERROR, OK))
    after = snapshot(bench)
    assert after[: len(SIDES)] == before[: len(SIDES)]
    assert after[-2] == before[-2]
    assert after[-1] != before[-1]


def test_ticket_that_was_never_posted_changes_nothing(bench):
    before = snapshot(bench)
    plan_a_miss(bench)
    bench.kernels.commit(LAYER, None)
    assert bench.faults() == [0]
    assert snapshot(bench) == before
    counters = bench.policy.counters
    assert (counters.stale, counters.errors) == (2, 0)
    bench.step(-bench.query)


def test_failure_after_a_cleared_set_is_an_error(kernels, rng):
    bench = settled(kernels, rng, slack=0.0)
    ticket = plan_a_miss(bench)
    assert bench.policy.counters.cleared == 2
    for head in (0, 1):
        now = bench.state.side(LAYER, SLOT, head)
        assert not bench.state.count[now]
        assert not bench.state.label[now].any()
    bench.copy(ticket, 0)
    bench.kernels.commit(LAYER, results(OK, ERROR))
    assert bench.faults() != [0], "a head without a set must not go on"
    begin(bench)
    assert bench.faults() == [0]
    retry = bench.plan(LAYER, -bench.query[LAYER])
    assert retry is not None
    assert retry.runs["lane"].tolist() == [1], "a cleared head always misses"
    bench.copy(retry)
    bench.kernels.commit(LAYER, results(OK))
    assert bench.faults() == [0]


def test_true_query_is_never_compared_with_a_speculative_label(bench):
    same = bench.query[LAYER]
    bench.policy.query_kind = lambda layer: QueryKind.TRUE
    assert bench.plan(LAYER, same) is not None, "the same numbers, but another kind"
    bench.kernels.commit(LAYER, None)
    del bench.policy.query_kind
    assert bench.plan(LAYER, same) is None
    assert {int(bench.state.label_kind[bench.state.side(LAYER, SLOT, head)]) for head in (0, 1)} == {1}


@pytest.mark.parametrize("preset", ["infinigen", "litecache", "lru"])
def test_window_is_never_overwritten_while_read(rng, preset):
    bench = Bench("cpu", settings(preset, slack=0.5), RandomRetriever(2), rng)
    bench.bind(SLOT, 512, 600)
    for _ in range(15):
        bench.step(failing=0.3)  # checks every ticket against the live places
    assert bench.policy.counters.records_moved > 0


def test_window_overwritten_while_read_is_caught(kernels, rng):
    """The planted bug: a set stays in use although its places were given away."""
    bench = Bench(kernels, settings("infinigen", slack=0.0), RandomRetriever(2), rng)
    bench.bind(SLOT, 512, 600)
    bench.step()
    plan, state = bench.plan, bench.state

    def plan_and_keep(layer: int, query: np.ndarray):
        sides = [state.side(layer, SLOT, head) for head in (0, 1)]
        counts = [int(state.count[at]) for at in sides]
        ticket = plan(layer, query)
        for at, count in zip(sides, counts, strict=True):
            state.count[at] = count
        return ticket

    bench.plan = plan_and_keep
    with pytest.raises(AssertionError, match="place that is read"):
        bench.step()


def test_reused_slot_inherits_nothing(bench):
    query, state = bench.query, bench.state
    generation = state.issued[:, SLOT].clone()
    bench.unbind(SLOT)
    for name in ("label", "label_kind", "count", "held_count"):
        assert not getattr(state, name)[:, :, SLOT].any()
    assert (state.places[:, :, SLOT] == -1).all()
    assert (state.generation[:, :, SLOT] >= generation).all()
    bench.bind(SLOT, 256, 300)
    hits = bench.policy.counters.hits
    bench.step(query)  # a token of the old session's 512 would be no record of the new one
    assert bench.policy.counters.hits == hits, "the old session's label answered"
    assert (state.issued[1:, SLOT] > generation[1:]).all()


def test_failed_or_partial_store_never_becomes_visible(kernels, rng):
    bench = Bench(kernels, settings(), RandomRetriever(3), rng)
    bench.bind(SLOT, 512, 600)
    begin(bench)
    ticket = bench.plan(LAYER, bench.queries(1))
    bench.copy(ticket, 0, half=True)
    bench.kernels.commit(LAYER, results(ERROR, ERROR))
    assert bench.faults() != [0], "the first set has nothing to fall back to"
    assert not bench.state.count[bench.state.side(LAYER, SLOT, 0)]


def test_lookups_and_hits_are_counted_per_head(kernels, rng):
    bench = Bench(kernels, settings(), RandomRetriever(4), rng)
    bench.bind(0, 256, 300)
    bench.bind(1, 256, 300)
    query = np.stack([bench.queries(2)] * 3)
    for _ in range(5):
        bench.step(query)
    counters = bench.policy.counters
    assert counters.lookups == 4 * 2 * 2 * 2, "steps after the first x slots x offloaded layers x heads"
    assert counters.hits == counters.lookups
    assert counters.hit_ratio == 1.0


def test_forced_misses_are_staggered_over_heads(rng):
    bench = Bench("cpu", settings(), RandomRetriever(5), rng)
    bench.bind(SLOT, 256, 500)
    query = np.stack([bench.queries(1)] * 3)
    forced_at = []
    for _ in range(60):
        before = bench.policy.counters.forced
        bench.step(query)
        forced_at += [bench.positions[SLOT] - 1] * (bench.policy.counters.forced - before)
    assert len(forced_at) == 4
    assert len(set(forced_at)) == 4


# Several rows


def test_fault_of_one_row_leaves_the_other_alone(kernels, rng):
    bench = settled(kernels, rng, slots=2, slack=0.0)
    before = snapshot(bench, 1)
    ticket = plan_a_miss(bench)
    mine = ticket.runs["slot"] == 0
    bench.copy(ticket)
    bench.kernels.commit(LAYER, results(*np.where(mine, ERROR, OK), aux=DATA_LOSS))
    bench.write(LAYER)
    assert bench.faults() == [DATA_LOSS, 0]
    assert snapshot(bench, 1) != before, "the other row has its new sets"
    out, lse = bench.attend(LAYER)
    for head in (0, 1):
        tokens = bench.attended(LAYER, 1, head, bench.positions[1])
        np.testing.assert_allclose(out[1, 2 * head : 2 * head + 2, 2], np.mean(tokens), rtol=1e-5)
        np.testing.assert_allclose(lse[1, 2 * head : 2 * head + 2], np.log(len(tokens)), rtol=1e-5)
    bench.step()
    assert bench.faults() == [0, 0], "the same token can be tried again"


@pytest.mark.parametrize(
    ("aux", "stale_fails", "fault"), [(13, False, 0), (13, True, 13), (DATA_LOSS, False, DATA_LOSS)]
)
def test_lost_block_is_a_fault_even_where_an_old_set_would_do(kernels, rng, aux, stale_fails, fault):
    bench = settled(kernels, rng, context={"stale_fails": stale_fails}, slack=2.0)
    before = snapshot(bench)
    plan_a_miss(bench)
    bench.kernels.commit(LAYER, results(ERROR, ERROR, aux=aux))
    assert bench.faults() == [fault]
    assert snapshot(bench) == before
    assert bench.policy.counters.stale == (0 if fault else 2), "only who goes on with an old set does so"


def test_lost_block_is_the_gravest_fault(kernels, rng):
    bench = settled(kernels, rng, slack=0.0)
    plan_a_miss(bench)
    bench.kernels.commit(LAYER, np.array([[ERROR, 13], [ERROR, DATA_LOSS]], np.uint32))
    assert bench.faults() == [DATA_LOSS]


def test_full_tail_of_one_row_leaves_the_other_alone(kernels, rng):
    bench = settled(kernels, rng, slots=2)
    full = 512 - 16 + bench.settings.tail
    bench.begin([0, 1], [full + 100, bench.positions[1]])
    bench.write(LAYER)
    assert bench.faults() == [-1, 0]
    assert bench.positions[1] in bench.attended(LAYER, 1, 0, bench.positions[1])


def test_row_without_a_slot_takes_no_part(kernels, rng):
    bench = settled(kernels, rng, slots=2)
    window, faults = bench.window.copy(), bench.state.fault.clone()
    bench.begin([-1, 1], [0, bench.positions[1]])
    ticket = bench.plan(LAYER, -bench.query[LAYER])
    assert set(ticket.runs["slot"].tolist()) == {1}
    bench.copy(ticket)
    bench.kernels.commit(LAYER, results(OK, OK))
    bench.write(LAYER)
    out, lse = bench.attend(LAYER)
    assert (out[0] == 0).all()
    assert (lse[0] == -np.inf).all()
    assert np.isfinite(lse[1]).all()
    mine = slice(0, bench.slot_bytes)
    assert (bench.window[mine] == window[mine]).all()
    assert (bench.state.fault == faults).all()
    bench.begin([-1, -1], [0, 0])
    lookups = bench.policy.counters.lookups
    assert bench.plan(LAYER, bench.queries(2)) is None
    assert bench.policy.counters.lookups == lookups


def test_a_row_behind_a_fault_looks_nothing_up(bench):
    """What it computes means nothing: it must not choose sets, nor make labels, that the repeated step could hit."""
    before = snapshot(bench)
    begin(bench)
    counters = bench.policy.counters
    bench.state.fault[SLOT] = DATA_LOSS
    assert bench.plan(LAYER, -bench.query[LAYER]) is None
    assert snapshot(bench) == before
    assert bench.policy.counters == counters


class Wrong(RandomRetriever):
    ids: tuple[int, ...] = ()

    def select(self, *arguments):
        return np.array(self.ids, np.int32)


@pytest.mark.parametrize("ids", [(3, 2), (2, 2), (-1, 2), (10, 512)], ids=["unsorted", "twice", "negative", "beyond"])
def test_ids_that_no_pack_has_are_refused(rng, ids):
    bench = Bench("cpu", settings(), Wrong(1), rng)
    bench.bind(SLOT, 512, 600)
    begin(bench)
    bench.policy.retriever.ids = ids
    with pytest.raises(ValueError, match=f"selected {ids[1] if ids[0] >= 0 else ids[0]} behind"):
        bench.plan(LAYER, bench.queries(1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_host_process_may_have_another_default_dtype(rng, dtype):
    torch.set_default_dtype(dtype)
    try:
        bench = Bench("cpu", settings(), RandomRetriever(1), rng)
    finally:
        torch.set_default_dtype(torch.float32)
    assert bench.state.label.dtype == torch.float32
    bench.bind(SLOT, 512, 600)
    query = np.stack([bench.queries(1)] * 3)
    bench.step(query)
    bench.step(query)
    assert bench.policy.counters.hits == bench.policy.counters.lookups > 0


def test_what_a_prompt_selected_by_is_speculative_under_every_setting(rng):
    """They are made from the layer before's input, but for layer 0's."""
    bench = Bench("cpu", settings(speculative=False), RandomRetriever(7), rng)
    bench.bind(SLOT, 512, 600)
    kinds = []

    class Carried:
        """Kernels whose tickets the bench carries out."""

        def __getattr__(self, name):
            return getattr(bench.kernels, name)

        def begin(self, rows, step):
            begin(bench)

        def look_up(self, layer, query, kind):
            kinds.append((layer, kind))
            bench.kernels.commit(layer, bench.serve(bench.kernels.plan(layer, query, kind), 0.0))

        def await_ticket(self, layer):
            pass

    products = SimpleNamespace(query=torch.empty(2, 4, HEAD_DIM))
    transport = SimpleNamespace(wait_us=1000, require_alive=lambda: None, steps=contextlib.nullcontext)
    loop = DecodeLoop(bench.policy, products, transport, Carried())
    finish(loop.seed(SLOT, 600, list(torch.from_numpy(bench.queries(3)))))
    assert kinds == [(1, QueryKind.SPECULATIVE), (2, QueryKind.SPECULATIVE)]
