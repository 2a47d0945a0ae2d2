"""Nothing here but what no single test should wait for."""

import contextlib
import os
import sys

import pytest

from decode_worker.config import ENVIRONMENT

os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported, which others than we may do
os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})


def pytest_collection_finish(session: pytest.Session) -> None:
    """Brings the test build up to date for tests that use it: minutes, the first time. They say why it failed."""
    shim_build = sys.modules.get("tests.support.shim_build")
    if shim_build is not None and not session.config.option.collectonly:
        with contextlib.suppress(AssertionError):
            shim_build.prepare()
