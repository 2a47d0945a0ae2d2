"""The test build of the data plane, and daemons over it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dataplane.conftest import directory, rng, seed
from tests.support import shim_build
from tests.support.daemon_process import Daemon
from tests.support.life import Life, living

__all__ = ["directory", "rng", "seed"]


@pytest.fixture(scope="session")
def shim() -> Path:
    """The test build of kvstore_service._native."""
    return shim_build.path()


@pytest.fixture
def daemon(shim: Path, tmp_path: Path) -> Iterator[Daemon]:
    """A real daemon whose disk calls can be made to fail. All lives of a test fit its tier: a hint displaces nothing
    that was used."""
    with Daemon(tmp_path, "256MiB", faulty=True, native=shim) as running:
        yield running


@pytest.fixture
def life(daemon: Daemon) -> Iterator[Life]:
    with living(daemon) as life:
        yield life
