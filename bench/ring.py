"""How long does a ticket take from post to completion? Against bare shared memory and a bare futex. Microseconds.

The daemon is a real kvstored; the ticket gathers one record that lies in DRAM. Hot: the daemon spins, as within a step.
Asleep: it has had nothing to do for a while; the worker spins for the answer, or sleeps as well.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.compiled import compiled
from bench.document import StoredDocument, scratch
from decode_worker import _native
from decode_worker.figures import Figure, print_json, print_table
from decode_worker.transport import raise_for_status
from kvstore_service.client.private import PrivateDaemon

ROUNDS = 400
REPEATS = 7
IDLE_S = 0.002
SPIN_US = 1_000_000
TIMEOUT_US = 5_000_000


@dataclass(frozen=True)
class Case:
    """One way to wait, and the mode of pingpong.c that does no more than that."""

    name: str
    idle_s: float  # before each round: the daemon falls asleep
    spin_us: int
    rival: str
    mode: str


CASES = (
    Case("ticket_hot", 0, SPIN_US, "shared-memory ping-pong", "spin"),
    Case("ticket_hot_lines", 0, SPIN_US, "ping-pong with a ticket's lines", "lines"),
    Case("ticket_daemon_asleep", IDLE_S, SPIN_US, "futex wake of a sleeping peer", "wake"),
    Case("ticket_both_asleep", IDLE_S, 0, "futex round trip of two sleepers", "futex"),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.ring", description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = measure()
    print_json(figures) if arguments.json else print_table("Ring round trips", figures)
    return 0


def measure(rounds: int = ROUNDS, repeats: int = REPEATS, cases: Sequence[Case] = CASES) -> list[Figure]:
    ours: dict[str, list[float]] = {case.name: [] for case in cases}
    rivals: dict[str, list[float]] = {case.name: [] for case in cases}
    with scratch() as directory:
        pingpong = compiled("pingpong", Path(directory))
        with PrivateDaemon(Path(directory) / "data", "64MiB") as daemon, StoredDocument(daemon, tokens=1024) as stored:
            for _ in range(repeats):
                for case in cases:
                    ours[case.name].append(_round_trip_us(stored, case, rounds))
                    rivals[case.name].append(_rival_us(pingpong, case.mode, rounds))
    return [Figure.of_runs(case.name, ours[case.name], "us", case.rival, rivals[case.name]) for case in cases]


def _round_trip_us(stored: StoredDocument, case: Case, rounds: int) -> float:
    """Median of the rounds. Hot ones from C++: Python takes longer than the ticket."""
    ring, times_ns = stored.transport.decode, []
    runs, pairs = stored.gather_run(lane=0, records=np.array([5], dtype=np.uint32))
    if not case.idle_s:
        took_ns = ring.round_trips(_native.OP_GATHER, 0, runs, pairs, rounds, TIMEOUT_US, case.spin_us)
        return float(np.median(took_ns)) / 1000
    for step in range(rounds):
        time.sleep(case.idle_s)
        started = time.perf_counter_ns()
        statuses = ring.wait(ring.post(_native.OP_GATHER, step, 0, runs, pairs), TIMEOUT_US, case.spin_us)
        times_ns.append(time.perf_counter_ns() - started)
        raise_for_status(statuses)
    return float(np.median(times_ns)) / 1000


def _rival_us(pingpong: Path, mode: str, rounds: int) -> float:
    command = [str(pingpong), mode, str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return float(np.median([int(line) for line in done.stdout.split()])) / 1000


if __name__ == "__main__":
    sys.exit(main())
