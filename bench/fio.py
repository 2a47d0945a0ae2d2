"""What fio gets from a disk: the limit of every reader and writer of packs."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.rivals import NotRun

TIMEOUT_S = 120
NAMES_MAX = 3500  # characters of --filename that fio takes


def random_reads_per_s(files: Sequence[Path], size: int, depth: int, seconds: float) -> float:
    """Reads of `size` bytes at random places of the files, O_DIRECT, `depth` in flight; of as many of the files, which
    lie in one directory, as fio takes names. NotRun without fio."""
    names = [file.name for file in files[: NAMES_MAX // (len(files[0].name) + 1)]]
    job = _job("randread", size, depth, f"--filename={':'.join(names)}", "--time_based", f"--runtime={seconds}",
               "--readonly", directory=files[0].parent)  # fmt: skip
    return float(job["read"]["iops"])


def write_bytes_per_s(file: Path, size: int, size_in_all: int, depth: int) -> float:
    """A new file in order, O_DIRECT, until it is durable. NotRun without fio."""
    job = _job("write", size, depth, f"--filename={file}", f"--size={size_in_all}", "--end_fsync=1",
               "--fallocate=posix")  # fmt: skip
    return size_in_all * 1000 / float(job["job_runtime"])


def _job(kind: str, size: int, depth: int, *options: str, directory: Path | None = None) -> dict[str, Any]:
    program = shutil.which("fio")
    if program is None:
        raise NotRun("fio is missing; apt-get install fio")
    command = [program, "--name=rival", f"--rw={kind}", f"--bs={size}", f"--iodepth={depth}", "--ioengine=io_uring",
               "--direct=1", "--randrepeat=0", "--norandommap", "--output-format=json", *options]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True, cwd=directory)
    (job,) = json.loads(done.stdout)["jobs"]
    return dict(job)
