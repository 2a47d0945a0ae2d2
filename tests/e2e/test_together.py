"""Several workers with one prompt at once: one of them writes it, the others wait for that and use it."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from decode_worker import pack_writer
from decode_worker.engine.engine import Engine
from decode_worker.engine.prefix import reservations
from kvstore_service.client import AdminClient
from tests.support.daemon_process import Daemon

from .conftest import PACK_TOKENS, EngineFactory, Expected, greedy, joined, random_ids

WORKERS, DOCUMENT, STEPS = 4, 3 * PACK_TOKENS, 6
SETTINGS = {"policy": "infinigen", "wait_ms": 20_000}


def commits(daemon: Daemon) -> tuple[int, int]:
    """(packs, commits that stored one)."""
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        status = admin.get_status()
        return status.packs, status.counters["commits"]


def held_back(worker: Engine, until: threading.Event) -> None:
    """The worker commits only after `until`."""
    commit = worker.client.commit_pack

    def late(*arguments: Any, **named: Any) -> Any:
        assert until.wait(60)
        return commit(*arguments, **named)

    worker.client.commit_pack = late  # type: ignore[method-assign]


def waiting(worker: Engine, told: threading.Event) -> None:
    """`told` is set when the worker asks for what it has left to another: its second reservation."""
    reserve, calls = worker.client.reserve_pack, [0]

    def counted(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] > 1:
            told.set()
        return reserve(*arguments, **named)

    worker.client.reserve_pack = counted  # type: ignore[method-assign]


@pytest.mark.timeout(120)
def test_one_prompt_in_many_workers_is_written_once(daemon: Daemon, checkpoint: Path, expected: Expected) -> None:
    ids = random_ids(DOCUMENT, 65)

    def prefill_and_decode(worker: Engine) -> tuple[list[Any], list[int]]:
        session, logits = worker.prefill(ids)
        return [pack.ref for pack in session.packs], greedy(worker, session, logits, STEPS)

    with ExitStack() as stack:
        workers = [stack.enter_context(joined(daemon, checkpoint, **SETTINGS)) for _ in range(WORKERS)]
        told = [threading.Event() for _ in workers[1:]]
        first_reserved, others = threading.Event(), threading.Event()
        for worker, event in zip(workers[1:], told, strict=True):
            waiting(worker, event)
        held_back(workers[0], others)
        with ThreadPoolExecutor(WORKERS) as pool:
            first = pool.submit(prefill_and_decode, workers[0])
            while not reserved(daemon):
                assert not first.done()
                first_reserved.wait(0.01)
            rest = [pool.submit(prefill_and_decode, worker) for worker in workers[1:]]
            assert all(event.wait(60) for event in told), "each of them waits for the first"
            others.set()
            results = [future.result(60) for future in (first, *rest)]
    assert commits(daemon) == (DOCUMENT // PACK_TOKENS, DOCUMENT // PACK_TOKENS)
    assert all(refs == results[0][0] for refs, _ in results), "all hold the same builds"
    wanted = expected.tokens(ids, STEPS, retriever="exact", budget=0.1, policy="infinigen")
    assert [tokens for _, tokens in results] == [wanted] * WORKERS, "in the winner's order of records"


def reserved(daemon: Daemon) -> int:
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        return admin.get_status().counters["uploads_open"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("gives_up", [True, False], ids=["it-gives-up", "it-is-too-slow"])
def test_what_the_first_writer_does_not_commit_is_written_by_one_that_waited(
    engine: EngineFactory, expected: Expected, monkeypatch: pytest.MonkeyPatch, gives_up: bool
) -> None:
    ids = random_ids(DOCUMENT, 66)
    slow, patient = engine(**SETTINGS), engine(**SETTINGS)
    drafts = slow._writer.reserve(slow.client.open_session(slow.layout, 4096), reservations(ids, PACK_TOKENS))
    assert all(draft.reserved.upload_id is not None for draft in drafts)
    told = threading.Event()
    waiting(patient, told)
    if not gives_up:
        monkeypatch.setattr(pack_writer, "OTHERS_WAIT_S", 0.5)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(patient.prefill, ids)
        assert told.wait(60)
        if gives_up:
            slow.close()
        session, logits = running.result(60)
    assert session.stored == DOCUMENT
    wanted = expected.tokens(ids, STEPS, retriever="exact", budget=0.1, policy="infinigen")
    assert greedy(patient, session, logits, STEPS) == wanted
