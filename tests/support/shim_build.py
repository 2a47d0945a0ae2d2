"""The test build of the data plane: disk calls, allocations and copies fail, dawdle and stop on order (csrc/shim)."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
BUILD_S = 600.0


@cache
def path() -> Path:
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


def crash_model() -> Path:
    """The library that stands before libc in processes whose disk can crash (csrc/shim/crash_model.h)."""
    return path().parents[1] / "libcrash_model.so"


def prepare() -> None:
    """Builds it, unless this process has a test build already."""
    from kvstore_service import _native

    if not hasattr(_native, "copy_shim_set"):
        path()


@cache
def native() -> ModuleType:
    """That module, beside the ordinary one; or the ordinary one where this process has put a test build in its place.

    Its classes are its own: neither takes objects of the other."""
    from kvstore_service import _native

    if hasattr(_native, "copy_shim_set"):
        return _native
    spec = importlib.util.spec_from_file_location("tests.support._native", path())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
