"""Cuts a store's power many times: python -m tests.crash.power.cuts [--seeds N] [--first SEED] [--bug NAME]

Each seed chooses operations and faults of the disk for some lives of one store, all but the last of which end in a
crash (tests/crash/power/life.py). What was counted is added to bench/results/reliability.json, if no bug was planted
and no seed given. Exit status 1 if anything was lost, wrong or left over; a line says how to see it again.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from tests.crash.power.process import LIFE_S, LIVES_MAX, Answer
from tests.support import shim_build
from tests.support.reliability import add_run

PROCESSES = 2
FAILURES_TOLD = 10
PROGRESS_S = 60.0


def run(wanted: Iterable[tuple[int, str]]) -> Iterator[Answer]:
    """Seeds, each with the bug that is planted, or "". The answers, as they come; a caller that has enough closes the
    iterator."""
    left, lock = iter(wanted), threading.Lock()
    answers: queue.Queue[Answer | BaseException | None] = queue.Queue()

    def take() -> tuple[int, str] | None:
        with lock:
            return next(left, None)

    workers = [_Worker() for _ in range(PROCESSES)]

    def work(worker: _Worker) -> None:
        try:
            while (cut := take()) is not None:
                answers.put(worker.answer(*cut))
            answers.put(None)
        except BaseException as error:
            answers.put(error)

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        working = len(threads)
        while working:
            found = answers.get(timeout=(LIVES_MAX + 1) * LIFE_S)
            if isinstance(found, BaseException):
                raise found
            working -= found is None
            if found is not None:
                yield found
    finally:
        with lock:
            left = iter(())
        for worker in workers:
            worker.close()
        for thread in threads:
            thread.join(LIFE_S)


def replay(seed: int, bug: str = "") -> str:
    """The command that shows a failure again."""
    return f"python -m tests.crash.power.cuts --first {seed} --seeds 1" + (f" --bug '{bug}'" if bug else "")


class _Worker:
    """A process that answers seeds, with the model before its libc."""

    def __init__(self) -> None:
        argv = [sys.executable, "-m", "tests.crash.power.process", f"--native={shim_build.path()}"]
        environment = {
            **os.environ,
            "LD_PRELOAD": str(shim_build.crash_model()),
            "PYTHONHASHSEED": "0",
            "OPENBLAS_NUM_THREADS": "1",  # lives are forks
        }
        self._process = subprocess.Popen(
            argv, cwd=shim_build.ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def answer(self, seed: int, bug: str) -> Answer:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps([seed, bug])}\n")
        self._process.stdin.flush()
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            assert ready.select(LIVES_MAX * LIFE_S), f"seed {seed}: no answer"
        line = self._process.stdout.readline()
        assert line, f"seed {seed}: the process has ended with status {self._process.wait(LIFE_S)}"
        return Answer(**json.loads(line))

    def close(self) -> None:
        """After the seed that it is at."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(LIFE_S)
        finally:
            self._process.kill()
            self._process.wait()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.power.cuts", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, help="the first seed; random, and counted, without it")
    parser.add_argument("--bug", default="", help="planted in the store; see tests/crash/power/bugs.py")
    arguments = parser.parse_args(argv)
    first = arguments.first if arguments.first is not None else random.SystemRandom().randrange(1 << 32)
    print(f"cutting the power of {arguments.seeds} stores, first seed {first}", flush=True)
    started_s = told_s = time.monotonic()
    seeds = crashes = failures = 0
    for answer in run((seed, arguments.bug) for seed in range(first, first + arguments.seeds)):
        seeds, crashes, failures = seeds + 1, crashes + answer.crashes, failures + bool(answer.failure)
        if answer.failure and failures <= FAILURES_TOLD:
            print(f"seed {answer.seed}: {answer.failure}\nagain: {replay(answer.seed, arguments.bug)}", flush=True)
        if time.monotonic() - told_s >= PROGRESS_S:
            told_s = time.monotonic()
            print(f"{seeds} seeds, {crashes} crashes, {failures} failures", flush=True)
    print(f"{seeds} seeds, {crashes} crashes, {failures} failures", flush=True)
    if arguments.first is None and not arguments.bug:
        minutes = round((time.monotonic() - started_s) / 60.0, 2)
        add_run("power_cuts", minutes=minutes, seed=first, seeds=seeds, crashes=crashes, failures=failures)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
