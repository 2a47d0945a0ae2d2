"""Nothing here but what no single test should wait for, and which tests must not run beside each other."""

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from decode_worker.config import ENVIRONMENT

os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported, which others than we may do
os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})

# A shell starts with SIGINT ignored what it leaves in the background; so would be what tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

HERE = Path(__file__).parent
# They leave something in /dev/shm meanwhile, or look for what is left.
SHARED_MEMORY = ("input", "demo", "crash/test_crash.py", "e2e/test_ray.py")
# They take minutes each: begun last, one of them would be waited for alone.
LONGEST = ("hostile/test_sanitizers.py", "e2e/test_triton.py", "gpu_check/test_parts.py", "gpu/test_compiled.py")
TOGETHER = "/dev/shm"


@pytest.hookimpl(tryfirst=True)  # xdist looks for groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of several test processes one runs all tests of a file; and one all tests that share what a machine has once.
    Files are taken in this order: the longest, the others, what comes together, and benchmarks beside that."""

    def group(item: pytest.Item) -> str:
        file = item.path.relative_to(HERE).as_posix()
        return TOGETHER if file.startswith(SHARED_MEMORY) else file

    def turn(item: pytest.Item) -> int:
        name = group(item)
        if name in LONGEST:
            return LONGEST.index(name) - len(LONGEST)
        return 1 if name == TOGETHER else 2 * ("/" not in name)

    for item in items:
        item.add_marker(pytest.mark.xdist_group(group(item)))
    items.sort(key=turn)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Brings the test build up to date for tests that use it: minutes, the first time. They say why it failed."""
    shim_build = sys.modules.get("tests.support.shim_build")
    if shim_build is not None and not session.config.option.collectonly:
        with contextlib.suppress(AssertionError):
            shim_build.prepare()
