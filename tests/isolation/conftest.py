"""A daemon with one copy thread, and the workers that share it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.neighbour import DAEMON_OPTIONS, SMALL, Document, Neighbour
from tests.faults.conftest import shim
from tests.support.daemon_process import Daemon

__all__ = ["shim"]

HOT = Document("hot", 4096)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path, options=DAEMON_OPTIONS) as running:
        yield running


@pytest.fixture
def slow_daemon(shim: Path, tmp_path: Path) -> Iterator[Daemon]:
    """Its disk calls can be delayed. The DRAM tier is small: 512 frames."""
    with Daemon(tmp_path, "8MiB", options=DAEMON_OPTIONS, faulty=True, native=shim) as running:
        yield running


@pytest.fixture
def victim(daemon: Daemon) -> Iterator[Neighbour]:
    """Has its document in DRAM."""
    with Neighbour(daemon, HOT, SMALL) as worker:
        worker.fetch(worker.range(0, HOT.tokens, 2))
        yield worker
