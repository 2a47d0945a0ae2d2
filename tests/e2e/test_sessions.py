"""Sessions of one engine: what is closed stays closed, what fails leaves alone, and threads may share a worker."""

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from decode_worker.config import WorkerConfig
from decode_worker.scheduler import Request
from decode_worker.worker import Worker
from kvstore_service.client import StoreError
from tests.support.daemon_process import Daemon

from .conftest import greedy, joined, random_ids, worker_settings

SLOTS = 4


@pytest.fixture
def worker(daemon: Daemon, checkpoint: Path) -> Iterator[Worker]:
    with closing(Worker(WorkerConfig(**worker_settings(daemon, checkpoint, slots=SLOTS)))) as worker:
        yield worker


@pytest.mark.timeout(120)
def test_a_closed_session_takes_no_step_and_its_slots_new_owner_none_of_it(daemon: Daemon, checkpoint: Path) -> None:
    with joined(daemon, checkpoint) as engine:
        closed, _ = engine.prefill(random_ids(300, 1))
        engine.close_session(closed)
        owner, logits = engine.prefill(random_ids(300, 2))
        assert owner.slot == closed.slot
        with pytest.raises(ValueError, match="closed"):
            engine.step([closed], [1])
        engine.close_session(closed)
        engine.give_up(closed, StoreError("INTERNAL", "late"))
        assert engine.free_slots == 0
        tokens = greedy(engine, owner, logits, 4)
        engine.close_session(owner)
        fresh, logits = engine.prefill(random_ids(300, 2))
        assert greedy(engine, fresh, logits, 4) == tokens


@pytest.mark.timeout(120)
def test_a_session_takes_one_token_at_a_time(daemon: Daemon, checkpoint: Path) -> None:
    with joined(daemon, checkpoint, slots=2) as engine:
        session, _ = engine.prefill(random_ids(300, 1))
        before = list(session.tokens)
        with pytest.raises(ValueError, match="twice"):
            engine.step([session, session], [1, 2])
        assert session.tokens == before


@pytest.mark.timeout(120)
def test_callers_of_several_threads_get_what_they_would_get_alone(worker: Worker) -> None:
    requests = [Request(random_ids(200 + 40 * number, number), 12) for number in range(2 * SLOTS)]
    alone = [list(worker.generate(request)) for request in requests]
    together: dict[int, list[object]] = {}

    def work(number: int) -> None:
        together[number] = list(worker.generate(requests[number]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert together == dict(enumerate(alone))


@pytest.mark.timeout(120)
def test_a_request_that_fails_leaves_the_others_alone(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store refuses one session's step; the batch goes on without it."""
    requests = [Request(random_ids(300, number), 12) for number in range(3)]
    alone = [list(worker.generate(request)) for request in requests]
    engine = worker._engine
    step, victim = engine.step, requests[1].prompt

    def refuse(sessions: list[object], tokens: list[int]) -> torch.Tensor:
        if any(session.tokens[:300] == victim and len(session.tokens) > 304 for session in sessions):  # type: ignore[attr-defined]
            raise StoreError("DATA_LOSS", "a stored block failed its checksum")
        return step(sessions, tokens)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "step", refuse)
    scheduler = worker._scheduler
    made = [scheduler.submit(request) for request in requests]
    assert list(scheduler.stream(made[0])) == alone[0]
    assert list(scheduler.stream(made[2])) == alone[2]
    with pytest.raises(StoreError, match="checksum"):
        list(scheduler.stream(made[1]))
    assert engine.free_slots == SLOTS


@pytest.mark.timeout(120)
def test_other_settings_need_an_idle_worker(worker: Worker) -> None:
    stream = worker.generate(Request(random_ids(300, 5), 12))
    next(stream)
    with pytest.raises(ValueError, match="generating"):
        worker.reconfigure(policy="full")
    stream.close()  # type: ignore[attr-defined]
    worker.reconfigure(policy="full")
    assert len(list(worker.generate(Request(random_ids(300, 5), 12)))) == 12
