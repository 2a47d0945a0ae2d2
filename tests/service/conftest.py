"""A real daemon per test, and the small world that the tests store in it."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore_service.client import AdminClient, StoreClient
from tests.support.daemon_process import Daemon
from tests.support.world import TestWorker


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(os.environ.get("HEADGATE_TEST_SEED", time.time_ns() % 1_000_000))
    print(f"HEADGATE_TEST_SEED={seed}")
    return np.random.default_rng(seed)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path) as running:
        yield running


@pytest.fixture
def client(daemon: Daemon) -> Iterator[StoreClient]:
    with StoreClient.connect(daemon.socket, daemon.broker, "test", timeout_s=10.0) as connected:
        yield connected


@pytest.fixture
def worker(client: StoreClient) -> Iterator[TestWorker]:
    made = TestWorker(client)
    yield made
    made.close()


@pytest.fixture
def admin(daemon: Daemon) -> Iterator[AdminClient]:
    with AdminClient.connect(daemon.socket, daemon.broker) as connected:
        yield connected
