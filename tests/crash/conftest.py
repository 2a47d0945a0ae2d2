"""A real daemon per test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon_process import Daemon


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path) as running:
        yield running
