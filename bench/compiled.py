"""Rivals in C, compiled when a benchmark starts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


def compile_c(source: Path, output: Path, *flags: str) -> Path:
    """`output`, built from `source` with -O3 for this machine. SystemExit without a compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise SystemExit("bench: no C compiler for the rival; install gcc")
    subprocess.run([compiler, "-O3", "-march=native", *flags, "-o", output, source], check=True, timeout=120)
    return output
