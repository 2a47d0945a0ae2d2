"""Lives of stores, each in a child that the crash model ends: reads [seed, bug] from stdin, answers each with a line.

    LD_PRELOAD=libcrash_model.so python -m tests.crash.power.process --native=PATH

It runs on the test build of kvstore_service._native. Everything is imported once; a life is a fork.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

LIFE_S = 120  # a hang
LIVES_MAX = 4


@dataclass
class Answer:
    """`failure`: what the store did wrong, with what was known; empty if nothing. `bug`: planted."""

    seed: int
    bug: str = ""
    crashes: int = 0
    failure: str = ""


@dataclass(frozen=True)
class _Cut:
    """A seed's lives, with what outlives each of them: the directory, and descriptors of ledger and report."""

    seed: int
    bug: str
    directory: Path
    ledger: int
    report: int

    def outcome(self, life: int, last: bool) -> int:
        """The status that a life ends with; a signal's is negative."""
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        status = 1
        try:
            signal.alarm(LIFE_S)
            os.dup2(self.report, 2)
            self._live(life, last)
            status = 0
        except BaseException:
            os.write(self.report, traceback.format_exc().encode())
        finally:
            os._exit(status)

    def _live(self, life: int, last: bool) -> None:
        from tests.crash.power.bugs import BUGS
        from tests.crash.power.ledger import Ledger
        from tests.crash.power.life import Life, Plan

        names = random.Random(f"names {self.seed} {life}")
        secrets.token_bytes = names.randbytes  # type: ignore[assignment]
        secrets.token_hex = lambda count: names.randbytes(count).hex()  # type: ignore[assignment, misc]
        if self.bug:
            BUGS[self.bug]()
        Life(Plan(self.seed, life, last), self.directory / "root", self.directory / "aside", Ledger(self.ledger)).live()

    def said(self) -> str:
        report, ledger = (os.pread(fd, 1 << 20, 0).decode() for fd in (self.report, self.ledger))
        return f"{report}\nledger:\n{ledger}"


def answer(seed: int, bug: str) -> Answer:
    """All lives of a seed: some that end in a crash, and one that finds out what they have left."""
    from tests.crash.power.disk import CRASHED

    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with (
        tempfile.TemporaryDirectory(prefix="power-cut-", dir=memory) as directory,
        open(os.memfd_create("ledger"), "rb") as ledger,
        open(os.memfd_create("report"), "rb") as report,
    ):
        cut = _Cut(seed, bug, Path(directory), ledger.fileno(), report.fileno())
        for name in ("root", "aside"):
            (cut.directory / name).mkdir()
        crashes = random.Random(f"lives {seed}").randint(1, LIVES_MAX - 1)
        for life in range(crashes + 1):
            last = life == crashes
            status = cut.outcome(life, last)
            if status != (0 if last else CRASHED):
                return Answer(seed, bug, life, f"life {life} ended with status {status}\n{cut.said()}")
    return Answer(seed, bug, crashes)


def _prepare() -> None:
    """What lives have in common, made before the first."""
    from functools import cache

    from kvstore_service.daemon.store import upkeep, uploads
    from tests.crash.power import bugs, life  # noqa: F401
    from tests.crash.power.node import NUMBERS
    from tests.support import world

    world.records_of, world.order_of = cache(world.records_of), cache(world.order_of)
    for number in NUMBERS:
        for layer in range(world.LAYERS):
            for lane in range(world.LANES):
                world.records_of(number, layer, lane)
    # One thing after the other, so that a seed does the same again.
    uploads._FINISH_THREADS = 1
    upkeep.TURN_S = 1e6


def main() -> None:
    from tests.support.faulty_daemon import load_native

    load_native(sys.argv[1].removeprefix("--native="))
    _prepare()
    for line in sys.stdin:
        print(json.dumps(vars(answer(*json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
