"""A worker outlives its daemon: with the next one it goes on, and its model stays loaded."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from decode_worker.config import WorkerConfig
from decode_worker.scheduler import Request
from decode_worker.worker import Worker
from kvstore_service.client import StoreError
from tests.support.daemon_process import Daemon

from .conftest import random_ids, worker_settings

DOCUMENT, QUESTION = random_ids(1024, 71), random_ids(5, 72)
REQUEST = Request([*DOCUMENT, *QUESTION], 6)


@pytest.fixture
def worker(daemon: Daemon, checkpoint: Path) -> Iterator[Worker]:
    settings = worker_settings(daemon, checkpoint, wait_ms=1000)
    with closing(Worker(WorkerConfig(**settings))) as worker:
        yield worker


@pytest.mark.timeout(60)
def test_a_worker_goes_on_with_a_daemon_that_was_started_again(daemon: Daemon, worker: Worker) -> None:
    generated, answered = list(worker.generate(REQUEST)), worker.answer(DOCUMENT, QUESTION, 4)
    cut_off = worker.generate(REQUEST)
    next(cut_off)
    daemon.kill()
    with pytest.raises(StoreError, match="has ended"):
        list(cut_off)
    for _ in range(2):
        with pytest.raises(StoreError, match="no daemon answers"):
            list(worker.generate(REQUEST))
    daemon.start()
    assert list(worker.generate(REQUEST)) == generated
    assert worker.answer(DOCUMENT, QUESTION, 4).tokens == answered.tokens


@pytest.mark.timeout(60)
def test_a_worker_goes_on_with_a_daemon_that_missed_a_deadline(daemon: Daemon, worker: Worker) -> None:
    generated = list(worker.generate(REQUEST))
    daemon.set_faults(stopped=True)
    with pytest.raises(StoreError, match="has not answered"):
        list(worker.generate(REQUEST))
    daemon.set_faults(stopped=False)
    assert list(worker.generate(REQUEST)) == generated
