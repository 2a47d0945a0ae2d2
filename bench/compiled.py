"""Rivals in C, compiled when they run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


def compiled(name: str, directory: Path) -> Path:
    """The program bench/NAME.c in `directory`. SystemExit without a compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise SystemExit(f"bench/{name}.c is a rival, and there is no C compiler; install gcc")
    program, source = directory / name, Path(__file__).with_name(f"{name}.c")
    subprocess.run([compiler, "-O2", "-pthread", "-o", program, source], check=True, timeout=120)
    return program
