"""Sessions of one engine: what is closed stays closed, what fails leaves alone, and threads may share a worker."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_worker.config import WorkerConfig
from decode_worker.kernels.ends import Row
from decode_worker.scheduler import Request
from decode_worker.worker import Worker
from kvstore_service.client import AdminClient, StoreError
from tests.support.daemon_process import Daemon

from .conftest import greedy, joined, random_checkpoint, random_ids, worker_settings

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
    advance, victim = engine.loop.advance, requests[1].prompt

    def refuse(rows: list[Row]) -> tuple[list[int | None], list[Exception | None]]:
        tokens, faults = advance(rows)
        slots = [row.slot for row in rows]
        for session in engine._open_sessions:
            if session.tokens[:300] == victim and len(session.tokens) > 304 and session.slot in slots:
                faults[slots.index(session.slot)] = StoreError("DATA_LOSS", "a stored block failed its checksum")
        return tokens, faults

    monkeypatch.setattr(engine.loop, "advance", refuse)
    scheduler = worker._scheduler
    made = [scheduler.submit(request) for request in requests]
    assert list(scheduler.stream(made[0])) == alone[0]
    assert list(scheduler.stream(made[2])) == alone[2]
    with pytest.raises(StoreError, match="checksum"):
        list(scheduler.stream(made[1]))
    assert engine.free_slots == SLOTS


@pytest.mark.timeout(120)
def test_a_slot_whose_close_the_store_did_not_answer_serves_again_once_it_does(
    daemon: Daemon, checkpoint: Path
) -> None:
    request = Request(random_ids(300, 8), 6)
    with closing(Worker(WorkerConfig(**worker_settings(daemon, checkpoint, slots=1)))) as worker:
        alone = list(worker.generate(request))
        stream = worker.generate(request)
        next(stream)
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            with pytest.raises(KeyboardInterrupt):
                stream.throw(KeyboardInterrupt())  # type: ignore[attr-defined]
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert list(worker.generate(request)) == alone
        with AdminClient.connect(daemon.socket, daemon.broker) as admin:
            counters = admin.get_status().counters
        assert (counters["sessions"], counters["bound_slots"]) == (0, 0)


@pytest.mark.timeout(120)
def test_other_settings_need_an_idle_worker(worker: Worker) -> None:
    stream = worker.generate(Request(random_ids(300, 5), 12))
    next(stream)
    with pytest.raises(ValueError, match="generating"):
        worker.reconfigure(policy="full")
    stream.close()  # type: ignore[attr-defined]
    worker.reconfigure(policy="full")
    assert len(list(worker.generate(Request(random_ids(300, 5), 12)))) == 12 + 1


@pytest.mark.timeout(120)
def test_settings_that_cannot_be_had_leave_the_worker_as_it_was(worker: Worker) -> None:
    request = Request(random_ids(300, 5), 6)
    before = list(worker.generate(request))
    for changes in ({"budget": -1}, {"profile": "/nonexistent"}, {"slots": 4096}):
        with pytest.raises((ValueError, StoreError)):
            worker.reconfigure(**changes)
        assert list(worker.generate(request)) == before, changes


@pytest.mark.timeout(120)
def test_a_request_that_comes_while_settings_change_is_served_with_the_new_ones(worker: Worker) -> None:
    join, joining, go = worker._join, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        joining.set()
        assert go.wait(60)
        join(*arguments)

    worker._join = slow  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        changing = pool.submit(worker.reconfigure, policy="full")
        assert joining.wait(60)
        asking = pool.submit(lambda: len(list(worker.generate(Request(random_ids(300, 5), 6)))))
        time.sleep(0.2)  # it waits for the engine now
        go.set()
        changing.result(60)
        assert asking.result(60) == 6 + 1


@pytest.mark.timeout(120)
def test_who_asks_for_something_else_beside_a_generation_gets_a_turn(worker: Worker) -> None:
    """A generation asks for the engine again as soon as it has given it back."""
    endless = Request(random_ids(300, 1), 3500, key="endless")
    document, question = random_ids(1024, 2), random_ids(3, 3)
    with ThreadPoolExecutor(1) as pool:
        stream = worker.generate(endless)
        next(stream)
        generating = pool.submit(lambda: sum(output.token is not None for output in stream))
        (running,), produced = worker._scheduler._running, []
        report = worker.prefill_document(document, lambda done, total: produced.append(running.produced))
        assert report.stored_tokens == 1024
        assert produced[-1] > produced[0], "it goes on beside a prefill"
        dense = worker.answer(document, question, 3)
        sparse = worker.answer(document, question, 3, decode_question=True)
        with pytest.raises(ValueError, match="generating"):
            worker.reconfigure(policy="full")
        assert not generating.done()
        worker.cancel("endless")
        assert generating.result(60) < 3499
    assert (dense.steps, sparse.steps) == (2, 5)
    assert dense.tokens[0] == int(worker._engine.compute_only([*document, *question]).argmax())


@pytest.mark.timeout(120)
def test_generations_of_a_worker_that_is_closed_end_with_the_word_for_it(worker: Worker) -> None:
    streams = [worker.generate(Request(random_ids(300, seed), 2000)) for seed in range(SLOTS)]
    for stream in streams:
        next(stream)
    waiting = worker._scheduler.submit(Request(random_ids(300, 9), 6))
    scheduler = worker._scheduler
    worker.close()
    for stream in (*streams, scheduler.stream(waiting)):
        with pytest.raises(ValueError, match="the worker was closed"):
            list(stream)


class Refused(Exception):
    """What a caller's own `progress` raises."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("at", ["first", "last"])
@pytest.mark.parametrize("ends", ["closes", "raises", "closes-and-raises"])
def test_a_progress_that_closes_its_worker_or_raises_ends_its_prompt_and_leaves_nothing(
    daemon: Daemon, worker: Worker, at: str, ends: str
) -> None:
    engine = worker._engine

    def progress(done: int, total: int) -> None:
        if at == "last" and done < total:
            return
        if ends != "raises":
            worker.close()
            worker.close()
        if ends != "closes":
            raise Refused("no further")

    neighbour = worker.generate(Request(random_ids(300, 6), 2000))
    next(neighbour)
    prompt = worker.generate(Request(random_ids(1100, 7), 6), progress)
    with pytest.raises(Refused if ends != "closes" else ValueError, match=r"no further|the worker was closed"):
        list(prompt)
    if ends == "raises":
        assert next(neighbour).token is not None
        neighbour.close()  # type: ignore[attr-defined]
    else:
        with pytest.raises(ValueError, match="the worker was closed"):
            list(neighbour)
        with pytest.raises(ValueError, match="the worker is closed"):
            list(worker.generate(Request(random_ids(300, 6), 6)))
    assert engine.free_slots == SLOTS
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        deadline = time.monotonic() + 30
        while admin.get_status().workers > (ends == "raises"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        status = admin.get_status()
    assert (status.sessions, status.counters["uploads_open"], status.counters["bound_slots"]) == (0, 0, 0)


@pytest.mark.timeout(120)
def test_a_progress_may_ask_its_worker_for_more(worker: Worker) -> None:
    """Within a piece of one prompt another one is computed and decoded; the first goes on behind it."""
    inner, outer = Request(random_ids(300, 6), 5), Request(random_ids(1100, 7), 6)
    alone = [output.token for output in worker.generate(inner)]
    within: list[int | None] = []

    def progress(done: int, total: int) -> None:
        if not within:
            within.extend(output.token for output in worker.generate(inner))

    found = [output.token for output in worker.generate(outer, progress)]
    assert within == alone
    assert found == [output.token for output in worker.generate(outer)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("changes", [{"compute": "bfloat16"}, {"model": "another"}], ids=["compute", "model"])
def test_another_model_or_computation_is_not_the_loaded_one(
    daemon: Daemon, checkpoint: Path, worker: Worker, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Else packs would be stored, and served to others, as what they were not computed with."""
    if "model" in changes:
        changes = {"model": random_checkpoint(tmp_path, seed=8)}
    ids = random_ids(300, 5)
    worker.reconfigure(**changes)
    with joined(daemon, checkpoint, **changes) as engine:
        assert torch.equal(worker._engine.compute_only(ids), engine.compute_only(ids))


@pytest.mark.timeout(120)
def test_a_session_that_is_not_closed_at_once_costs_no_slot(worker: Worker) -> None:
    document, question = random_ids(600, 1), random_ids(3, 2)
    client = worker._engine.client
    close, refused = client.close_session, []

    def refuse_once(*arguments: Any, **named: Any) -> None:
        if not refused:
            refused.append(arguments)
            raise StoreError("RESOURCE_EXHAUSTED", "too busy", 0.01)
        close(*arguments, **named)

    client.close_session = refuse_once  # type: ignore[method-assign]
    for ask in (lambda: worker.answer(document, question, 3), lambda: worker.prefill_speed(document, stored=True)):
        refused.clear()
        with pytest.raises(StoreError, match="too busy"):
            ask()
        assert worker._engine.free_slots == SLOTS
        ask()


@pytest.mark.timeout(60)
def test_a_closed_worker_says_so_whatever_it_is_asked(worker: Worker) -> None:
    ids = random_ids(30, 2)
    worker.close()
    calls: list[Callable[[], object]] = [
        lambda: list(worker.generate(Request(ids, 5))),
        lambda: worker.prefill_document(ids),
        lambda: worker.prefill_speed(ids, stored=True),
        lambda: worker.prefill_speed(ids, stored=False),
        lambda: worker.answer(ids, [3], 2),
        lambda: worker.reconfigure(policy="full"),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="the worker is closed; make another one"):
            call()
    worker.close()
