"""What a decode step does and does not do: calls, hits, records, samples, limits."""

import threading
from pathlib import Path
from typing import Any

import pytest

from decode_worker.config import WorkerConfig
from decode_worker.engine.engine import Engine
from decode_worker.engine.session import Session
from decode_worker.model.sampling import Sampling
from decode_worker.scheduler import Request
from decode_worker.worker import Worker
from kvstore_service.client import AdminClient, StoreError
from tests.support.daemon_process import Daemon

from .conftest import KV_HEADS, LAYERS, EngineFactory, Expected, greedy, random_ids, worker_settings

OFFLOADED_HEADS = (LAYERS - 1) * KV_HEADS
STEPS = 16


@pytest.mark.timeout(60)
def test_no_step_makes_a_call_and_a_sealing_calls_from_another_thread(engine: EngineFactory) -> None:
    seed = 71
    print(f"seed {seed}")
    worker = engine(policy="infinigen")
    session, logits = worker.prefill(random_ids(1024, seed))
    callers, call = [], worker.client._call

    def noted(*arguments: Any) -> Any:
        callers.append(threading.get_ident())
        return call(*arguments)

    worker.client._call = noted  # type: ignore[method-assign]
    moved = worker.policy.counters.records_moved
    greedy(worker, session, logits, 320)
    assert worker.policy.counters.records_moved > moved, "the steps missed"
    assert not callers, "nothing is due before position N + 256 + recent"
    greedy(worker, session, logits, 140)
    assert session.stored == 1280
    assert callers, "a sealing was due"
    assert threading.get_ident() not in callers


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("kind", "case"),
    [
        ("hits", {"policy": "qsac", "eta": -1.0}),
        ("mixed", {"policy": "qsac", "eta": 0.0}),
        ("misses", {"policy": "infinigen"}),
        ("mixed", {"policy": "litecache", "eta": 0.0}),
    ],
    ids=["all-hit", "mixed", "all-miss", "whole-sets"],
)
def test_hits_and_records_are_counted_per_step_as_the_oracle_counts_them(
    engine: EngineFactory, expected: Expected, kind: str, case: dict
) -> None:
    seed = 57
    print(f"seed {seed}")
    prompt = random_ids(1100, seed)
    oracle = expected.oracle(retriever="exact", budget=0.1, **case)
    tokens = oracle.generate(prompt, STEPS + 1)
    worker = engine(**case)
    session, _ = worker.prefill(prompt)
    counters = worker.policy.counters
    moved_before = counters.records_moved
    assert (counters.steps, counters.lookups, counters.hits) == (0, 0, 0)
    for number, (token, trace) in enumerate(zip(tokens, oracle.traces, strict=False)):
        hits, moved = counters.hits, counters.records_moved
        worker.step([session], [token])
        counters = worker.policy.counters
        assert counters.steps == number + 1
        assert counters.records_moved - moved == sum(len(head.fetched) for head in trace.heads.values())
        # The first step is in no ratio: its labels come from the prompt.
        assert counters.hits - hits == (sum(head.hit for head in trace.heads.values()) if number else 0)
        assert counters.lookups == number * OFFLOADED_HEADS
    moved = counters.records_moved - moved_before
    print(f"{kind}: hit ratio {counters.hit_ratio:.2f}, {moved} records")
    assert {"hits": counters.hit_ratio == 1, "mixed": 0 < counters.hit_ratio < 1, "misses": counters.hits == 0}[kind]
    assert (moved == 0) == (kind == "hits")


@pytest.mark.timeout(60)
def test_a_sampled_continuation_is_its_seed_s(daemon: Daemon, checkpoint: Path) -> None:
    prompt = random_ids(700, 73)
    worker = Worker(WorkerConfig(**worker_settings(daemon, checkpoint)))
    try:
        first, again, other = (
            list(worker.generate(Request(prompt, 24, Sampling(0.9, 0.95, 0, seed)))) for seed in (5, 5, 6)
        )
    finally:
        worker.close()
    assert first == again, "the second run attaches what the first one stored"
    assert first != other


@pytest.mark.timeout(60)
def test_a_session_ends_at_its_context_with_an_error_that_names_it(engine: EngineFactory) -> None:
    worker = engine(context=530)
    session, logits = worker.prefill(random_ids(522, 74))
    greedy(worker, session, logits, 8)
    for _ in range(2):
        with pytest.raises(StoreError, match="context=530") as failure:
            worker.step([session], [1])
        assert failure.value.code == "RESOURCE_EXHAUSTED"
    assert session.position == 530
    with pytest.raises(ValueError, match="context=530"):
        worker.prefill(random_ids(531, 74))


@pytest.mark.timeout(60)
def test_sessions_share_packs_without_a_copy(daemon: Daemon, engine: EngineFactory) -> None:
    ids = [*random_ids(1024, 75), 1]
    worker, other = engine(policy="qsac", slots=2), engine(policy="qsac")
    session, logits = worker.prefill(ids)
    tokens = greedy(worker, session, logits, 8)
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        before = admin.get_status()
        sessions = [join(member, ids) for member in (worker, other)]
        third = engine(policy="qsac")
        prefilled, logits = third.prefill(ids)
        assert greedy(third, prefilled, logits, 8) == tokens, "it computes everything and stores nothing"
        after = admin.get_status()
    for shared in sessions:
        assert [pack.ref for pack in shared.packs] == [pack.ref for pack in session.packs]
    assert (after.workers, after.sessions) == (3, 4)
    assert (after.packs, after.pack_bytes) == (before.packs, before.pack_bytes)
    assert after.counters["nvme_write_bytes"] == before.counters["nvme_write_bytes"]


def join(worker: Engine, ids: list[int]) -> Session:
    session, rest = worker.attach(ids)
    assert rest == ids[-1:]
    worker.step([session], rest)
    return session
