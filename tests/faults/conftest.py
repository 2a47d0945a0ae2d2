"""The shim build of the data plane, and daemons over it."""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dataplane.conftest import directory, rng, seed
from tests.support.daemon_process import Daemon
from tests.support.life import Life, living

__all__ = ["directory", "rng", "seed"]

ROOT = Path(__file__).parents[2]
BUILD_S = 600.0


@pytest.fixture(scope="session")
def shim() -> Path:
    """kvstore_service._native built with HEADGATE_IO_SHIM; slow once, then incremental."""
    build = ROOT / "build" / "shim"
    build.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    cmake = shutil.which("cmake", path=environment["PATH"])
    assert cmake, "cmake is missing; run `make setup`"
    options = ("HEADGATE_IO_SHIM=ON", "HEADGATE_WORKER=OFF", "CMAKE_BUILD_TYPE=None", "CMAKE_CXX_FLAGS=-O1",
               f"Python_EXECUTABLE={sys.executable}")  # fmt: skip
    configure = [cmake, "-S", ROOT, "-B", build, "-G", "Ninja", *(f"-D{option}" for option in options)]
    commands = [] if (build / "build.ninja").exists() else [configure]
    with (build / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in [*commands, [cmake, "--build", build, "--target", "store_native"]]:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=BUILD_S, check=False
            )
            assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    (module,) = (build / "kvstore_service").glob("_native*.so")
    return module


@pytest.fixture
def daemon(shim: Path, tmp_path: Path) -> Iterator[Daemon]:
    """A real daemon whose disk calls can be made to fail."""
    with Daemon(tmp_path, faulty=True, native=shim) as running:
        yield running


@pytest.fixture
def life(daemon: Daemon) -> Iterator[Life]:
    with living(daemon) as life:
        yield life
