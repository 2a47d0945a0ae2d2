"""The Ray actor is a thin shell: the same answers as in process, the same errors, one worker per node."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from decode_worker import cluster
from decode_worker.actor import RemoteWorker, local_ray
from decode_worker.config import WorkerConfig
from decode_worker.scheduler import Request
from decode_worker.worker import Answer, Worker
from kvstore_service.client import AdminClient, StoreError
from tests.support.daemon_process import Daemon

from .conftest import random_checkpoint, random_ids

QUESTIONS = 3
LONG = Request(random_ids(200, 9), 16000)


@pytest.fixture(scope="module")
def running_ray() -> Iterator[None]:
    with local_ray(cpus=2):
        yield


@pytest.fixture
def config(daemon: Daemon, checkpoint: Path) -> WorkerConfig:
    return WorkerConfig(
        model=checkpoint, socket=Path(daemon.socket), broker=Path(daemon.broker), context=2048, profile="off"
    )


@pytest.fixture(scope="module")
def endless_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its texts have no end of their own."""
    return random_checkpoint(tmp_path_factory.mktemp("endless"), seed=7, eos_token_id=None)


@pytest.fixture
def endless(config: WorkerConfig, endless_checkpoint: Path) -> WorkerConfig:
    return replace(config, model=endless_checkpoint, context=16384)


def ask(worker: Worker | RemoteWorker) -> list[list[int]]:
    document = random_ids(1024, 51)
    report = worker.prefill_document(document)
    assert report.stored_tokens == 1024
    answers: list[Answer] = [worker.answer(document, random_ids(3, 60 + i), 4) for i in range(QUESTIONS)]
    return [answer.tokens for answer in answers]


def test_an_actor_answers_as_the_engine_does(running_ray: None, config: WorkerConfig) -> None:
    remote = RemoteWorker(config)
    through_ray = ask(remote)
    remote.close()
    local = Worker(config)
    assert ask(local) == through_ray
    local.close()


def test_an_error_of_the_store_keeps_its_code_across_ray(running_ray: None, config: WorkerConfig) -> None:
    remote = RemoteWorker(config)
    document = random_ids(1024, 51)
    remote.prefill_document(document)
    with pytest.raises(StoreError) as caught:
        remote.answer(document, random_ids(3, 1), 5000)
    assert caught.value.code == "RESOURCE_EXHAUSTED"
    remote.close()


def test_every_node_gets_one_worker(running_ray: None, config: WorkerConfig) -> None:
    nodes = cluster.place_workers(config)
    assert nodes == cluster.place_workers(config), "placing again changes nothing"
    assert len(nodes) == 1
    actor = ray.get_actor(cluster.actor_name(nodes[0]))
    document = random_ids(512, 2)
    report = ray.get(actor.prefill_document.remote(document), timeout=60)
    assert report.tokens == 512
    ray.kill(actor)


@pytest.mark.timeout(180)
def test_an_actor_generates_for_several_callers_at_once(running_ray: None, config: WorkerConfig) -> None:
    requests = [Request(random_ids(200, number), 8) for number in range(4)]
    with closing(Worker(config)) as local:
        expected = {number: list(local.generate(request)) for number, request in enumerate(requests)}
    with RemoteWorker(replace(config, slots=2)) as remote:
        endless = remote.generate(Request(random_ids(200, 9), 1500))
        next(endless)
        endless.close()  # type: ignore[attr-defined]
        with ThreadPoolExecutor(len(requests)) as pool:
            together = pool.map(lambda request: list(remote.generate(request)), requests)
            assert dict(enumerate(together)) == expected
        with pytest.raises(ValueError, match="empty"):
            list(remote.generate(Request([], 4)))


@pytest.mark.timeout(180)
def test_what_is_cancelled_before_the_actor_begins_it_never_runs(
    running_ray: None, endless: WorkerConfig, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode_worker.actor.CONCURRENCY", 1)
    with RemoteWorker(replace(endless, recent=16000)) as remote:  # so the first one seals nothing
        first = remote.generate(LONG)
        next(first)
        with monkeypatch.context() as patch:
            patch.setattr(remote, "_call_s", 0.0)
            with pytest.raises(TimeoutError):
                list(remote.generate(Request(random_ids(1024, 10), 1)))
        first.close()  # type: ignore[attr-defined]
        list(remote.generate(Request(random_ids(200, 11), 2)))
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        assert admin.get_status().packs == 0, "the cancelled prompt was computed and stored"


@pytest.mark.timeout(180)
def test_an_actor_closes_although_calls_of_generate_have_all_its_threads(
    running_ray: None, endless: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode_worker.actor.CONCURRENCY", 1)
    monkeypatch.setattr("decode_worker.actor.CLOSE_S", 170.0)
    remote = RemoteWorker(endless)
    generating = remote.generate(LONG)
    next(generating)
    remote.close()
    with pytest.raises((ValueError, RuntimeError), match=r"was closed|died"):
        list(generating)
