"""Nothing here but what no single test should wait for."""

import contextlib
import os
import sys

import pytest

# Before torch is imported, as in the project's commands: threads that spin at the end of each product take the cores
# from those that they wait for.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Brings the test build up to date for tests that use it: minutes, the first time. They say why it failed."""
    shim_build = sys.modules.get("tests.support.shim_build")
    if shim_build is not None and not session.config.option.collectonly:
        with contextlib.suppress(AssertionError):
            shim_build.prepare()
