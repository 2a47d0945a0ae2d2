"""libvulkan and libcuda for machines that have neither: vulkan_double.cc says what they do, and what its words mean."""

from __future__ import annotations

import ctypes
import os
import subprocess
from functools import cache
from pathlib import Path

from tests.support.shim_build import ROOT

SOURCE = Path(__file__).with_suffix(".cc")
COMPILE_S = 120.0


@cache
def path() -> str:
    built = ROOT / "build" / "vulkan_double.so"
    if not built.exists() or built.stat().st_mtime < SOURCE.stat().st_mtime:
        built.parent.mkdir(exist_ok=True)
        part = built.with_suffix(f".{os.getpid()}")
        command = ["g++", "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", SOURCE, "-o", part]
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        subprocess.run(command, check=True, timeout=COMPILE_S, env=environment)
        part.rename(built)
    return str(built)


def live() -> int:
    """What was made and not given back."""
    return int(ctypes.CDLL(path()).vulkan_double_live())
