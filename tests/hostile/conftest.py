"""One daemon per module: it must outlive everything that is done to it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore_service.client import StoreClient
from tests.hostile.victim import Victim
from tests.support.daemon_process import Daemon


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    directory: Path = tmp_path_factory.mktemp("hostile")
    with Daemon(directory) as running:
        yield running


@pytest.fixture(scope="module")
def victim(daemon: Daemon) -> Iterator[Victim]:
    with StoreClient.connect(daemon.socket, daemon.broker, "victim") as client:
        victim = Victim(client)
        yield victim
        victim.close()
