"""libcuda and libgdrapi for machines that have neither: gpu_double.cc says what it does, and what its words mean."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from decode_worker.window import imported
from tests.support.daemon_process import Daemon
from tests.support.shim_build import ROOT

SOURCE = Path(__file__).with_suffix(".cc")
COMPILE_S = 120.0


VARIANTS = {"": (), "old": ("-DGPU_DOUBLE_OLD",), "cuda_12": ("-DGPU_DOUBLE_CUDA_12",)}


@cache
def path(variant: str = "") -> Path:
    """The library. old: of a driver and a GDRCopy that lack the newer names; cuda_12: of one whose are others."""
    built = ROOT / "build" / f"gpu_double{variant and '_' + variant}.so"
    if not built.exists() or built.stat().st_mtime < SOURCE.stat().st_mtime:
        built.parent.mkdir(exist_ok=True)
        part = built.with_suffix(f".{os.getpid()}")
        options = (
            "-std=c++20",
            "-O1",
            "-shared",
            "-fPIC",
            "-fvisibility=hidden",
            *VARIANTS[variant],
        )
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        subprocess.run(["g++", *options, SOURCE, "-o", part], check=True, timeout=COMPILE_S, env=environment)
        part.rename(built)
    return built


class GpuDouble:
    """`words` are GPU_DOUBLE's; `calls` what was called so far, in this process and in those that it starts."""

    def __init__(self, log: Path, variant: str) -> None:
        self.library = str(path(variant))
        self.options = {"cuda_library": self.library, "gdr_library": self.library}
        self._log = log
        self._loaded = ctypes.CDLL(self.library)

    def set(self, words: str) -> None:
        os.environ["GPU_DOUBLE"] = words  # of processes that are started from here on
        self._loaded.gpu_double_set(words.encode(), str(self._log).encode())

    def forget(self) -> None:
        """The library stays loaded: it is one that works, and tells nobody."""
        self._loaded.gpu_double_set(b"", b"")

    def calls(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []

    def faults(self) -> list[str]:
        return [line for line in self.calls() if line.startswith("FAULT")]

    def live(self) -> int:
        return int(self._loaded.gpu_double_live())


@contextmanager
def gpu_double(directory: Path, words: str = "", variant: str = "") -> Iterator[GpuDouble]:
    double = GpuDouble(directory / "gpu.log", variant)
    os.environ["GPU_DOUBLE_LOG"] = str(directory / "gpu.log")
    double.set(words)
    try:
        yield double
    finally:
        del os.environ["GPU_DOUBLE_LOG"], os.environ["GPU_DOUBLE"]
        double.forget()


@pytest.fixture
def double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuDouble]:
    """For the windows of workers in this process, and for `gpu_daemon`."""
    with gpu_double(tmp_path) as double:
        monkeypatch.setattr(imported, "CUDA_LIBRARY", double.library)
        yield double
        assert double.faults() == []


@contextmanager
def daemon_over(directory: Path, double: GpuDouble, words: str = "") -> Iterator[Daemon]:
    """Has windows in its GPU's memory, as far as these words let it."""
    double.set(words)
    libraries = (f"--cuda-library={double.library}", f"--gdr-library={double.library}")
    with Daemon(directory, options=("--nvme-bytes=1GiB", "--copy-threads=2", *libraries)) as daemon:
        yield daemon


@pytest.fixture
def gpu_daemon(tmp_path: Path, double: GpuDouble) -> Iterator[Daemon]:
    with daemon_over(tmp_path, double) as daemon:
        yield daemon
