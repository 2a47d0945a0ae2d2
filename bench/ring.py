"""How long does a ticket take from post to completion? Hot and asleep, against bare shared memory and a bare futex.

The daemon is a real kvstored; the ticket gathers one record that lies in DRAM. Round trips, microseconds.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.store import StoredDocument
from decode_worker import _native
from decode_worker.figures import Figure, print_json, print_table
from kvstore_service.private import PrivateDaemon

ROUNDS = 400
REPEATS = 5
ASLEEP_S = 0.002


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.ring", description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = measure()
    print_json(figures) if arguments.json else print_table("Ring round trips", figures)
    return 0


def measure() -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="hg-bench-", dir="/var/tmp") as directory:
        rival = _compile(Path(directory))
        with PrivateDaemon(Path(directory) / "data", "64MiB") as daemon, StoredDocument(daemon, tokens=1024) as stored:
            hot, asleep, spin, futex = [], [], [], []
            for _ in range(REPEATS):
                hot.append(_round_trip_us(stored, 0.0))
                spin.append(_rival_us(rival, "spin"))
                asleep.append(_round_trip_us(stored, ASLEEP_S))
                futex.append(_rival_us(rival, "futex"))
    return [
        Figure.of_runs("ticket_hot", hot, "us", "shared-memory ping-pong", spin),
        Figure.of_runs("ticket_asleep", asleep, "us", "futex wake round trip", futex),
    ]


def _round_trip_us(stored: StoredDocument, pause_s: float) -> float:
    """Median of ROUNDS tickets; a pause lets the daemon fall asleep before each."""
    ring, times = stored.transport.decode, []
    runs, pairs = stored.gather_run(lane=0, records=np.array([5], dtype=np.uint32))
    for step in range(ROUNDS if pause_s == 0 else ROUNDS // 4):
        time.sleep(pause_s) if pause_s else None
        started = time.perf_counter_ns()
        seq = ring.post(_native.OP_GATHER, step, 0, runs, pairs)
        ring.wait(seq, 1_000_000)
        times.append(time.perf_counter_ns() - started)
    return float(np.median(times)) / 1000


def _compile(directory: Path) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise SystemExit("bench.ring: no C compiler for the rival; install gcc")
    program = directory / "pingpong"
    source = Path(__file__).with_name("pingpong.c")
    subprocess.run([compiler, "-O2", "-o", program, source], check=True, timeout=120)
    return program


def _rival_us(program: Path, mode: str) -> float:
    rounds = ROUNDS * 10 if mode == "spin" else ROUNDS
    done = subprocess.run([program, mode, str(rounds)], capture_output=True, text=True, timeout=120, check=True)
    return float(np.median([int(line) for line in done.stdout.split()])) / 1000


if __name__ == "__main__":
    sys.exit(main())
