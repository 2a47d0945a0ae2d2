"""Kills daemons under load for a long time: python -m tests.crash.soak [--minutes M] [--seed S]

Rounds of ROUND_KILLS kills over fresh data, each with a seed of its own. What was counted is added to
bench/results/reliability.json, also after Ctrl-C. Exit status 1 if anything was lost; the data then stays.
"""

import argparse
import itertools
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.crash.crasher import Counts, Crasher
from tests.support.daemon_process import Daemon
from tests.support.reliability import add_run

ROUND_KILLS = 50
PROGRESS_S = 60.0


class Soak:
    def __init__(self, minutes: float, seed: int) -> None:
        self.counts = Counts()
        self._seed = seed
        self._started_s = self._told_s = time.monotonic()
        self._end_s = self._started_s + minutes * 60.0

    @property
    def minutes(self) -> float:
        return (time.monotonic() - self._started_s) / 60.0

    def run(self) -> None:
        for number in itertools.count():
            if time.monotonic() >= self._end_s:
                return
            directory = Path(tempfile.mkdtemp(prefix="headgate-soak-"))
            try:
                self._round(directory, self._seed + number)
            except KeyboardInterrupt:
                shutil.rmtree(directory)
                raise
            shutil.rmtree(directory)

    def _round(self, directory: Path, seed: int) -> None:
        last = self.counts.kills + ROUND_KILLS
        with Crasher(Daemon(directory), seed, self.counts) as crasher:
            while self.counts.kills < last and time.monotonic() < self._end_s:
                crasher.kill()
                if time.monotonic() - self._told_s >= PROGRESS_S:
                    self._told_s = time.monotonic()
                    self.tell()
            crasher.check_all()

    def tell(self) -> None:
        c = self.counts
        print(
            f"{self.minutes:.1f} min: {c.kills} kills, {c.kills_before_commit} of them between reserve and commit; "
            f"{c.packs_acknowledged} packs acknowledged, {c.records_verified} records verified, {c.lost} lost, "
            f"{c.wrong_bytes} wrong, {c.other_failures} other failures; serving again after "
            f"{statistics.median(c.restarts_s or [0.0]):.2f} s, at most {max(c.restarts_s, default=0.0):.2f} s",
            flush=True,
        )

    def record(self) -> None:
        figures = vars(self.counts).copy()
        if restarts_s := figures.pop("restarts_s"):
            figures["restart_s_median"] = round(statistics.median(restarts_s), 3)
            figures["restart_s_max"] = round(max(restarts_s), 3)
        if any(figures.values()):
            add_run("daemon_sigkill", minutes=round(self.minutes, 2), seed=self._seed, **figures)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32), help="of the first round")
    arguments = parser.parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell started us with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    soak = Soak(arguments.minutes, arguments.seed)
    print(f"killing daemons for {arguments.minutes:g} min, first seed {arguments.seed}", flush=True)
    status = 0
    try:
        soak.run()
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except Exception:
        traceback.print_exc()
        status = 1
    soak.tell()
    soak.record()
    return status


if __name__ == "__main__":
    sys.exit(main())
