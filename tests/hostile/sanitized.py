"""Builds of the data plane with sanitizers, and a Python that uses one: python -m tests.hostile.sanitized MODULE [...]

Run as a program it puts MODULE in the place of kvstore_service._native, however the package was installed, and hands
the other arguments to pytest.
"""

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNTIMES = {"address": "libasan.so", "thread": "libtsan.so"}


def build(directory: Path, sanitizer: str, *targets: str, compiler: str = "g++") -> None:
    """Builds `targets` under `directory`, with ASan and UBSan ("address") or TSan ("thread")."""
    configure = (
        "cmake", "-S", ROOT, "-B", directory, "-G", "Ninja", "-DHEADGATE_WORKER=OFF", "-DHEADGATE_FUZZ=ON",
        "-DHEADGATE_IO_SHIM=ON", f"-DHEADGATE_SANITIZE={sanitizer}",
        f"-DCMAKE_CXX_COMPILER={shutil.which(compiler)}", f"-DPython_EXECUTABLE={sys.executable}",
    )  # fmt: skip
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    directory.parent.mkdir(exist_ok=True)
    with directory.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two processes that build in one folder break each other's files
        for command in (configure, ("cmake", "--build", directory, "-j2", "--target", *targets)):
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def environment(sanitizer: str, report: Path) -> dict[str, str]:
    """For a Python that loads a sanitized module; what is found goes to files whose names start with `report`."""
    # The runtime must come first, and with it what it intercepts: Python itself does not load the C++ library.
    preload = [_library(RUNTIMES[sanitizer]), _library("libstdc++.so")]
    options = f"log_path={report}:exitcode=66"
    # CPython never frees what lives as long as the process.
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(preload),
        "ASAN_OPTIONS": f"{options}:detect_leaks=0",
        "UBSAN_OPTIONS": f"{options}:print_stacktrace=1",
        "TSAN_OPTIONS": options,
    }


def _library(name: str) -> str:
    command = ("g++", f"-print-file-name={name}")
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(path):
        pytest.skip(f"needs g++'s {name}")
    return path


def _main(module_path: str, arguments: list[str]) -> int:
    import kvstore_service

    spec = importlib.util.spec_from_file_location("kvstore_service._native", module_path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    kvstore_service._native = module
    spec.loader.exec_module(module)
    return pytest.main(arguments)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], sys.argv[2:]))
