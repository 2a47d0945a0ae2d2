"""Lives of stores, each in a child that the crash model ends: reads seeds from stdin, answers each with a line.

    LD_PRELOAD=libcrash_model.so python -m tests.crash.power.process --native=PATH [--bug=NAME]

It runs on the test build of kvstore_service._native. Everything is imported once; a life is a fork.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

LIFE_S = 120  # a hang
ALWAYS = 1 << 40


@dataclass
class Answer:
    """`failure`: what the store did wrong, with what was known; empty if nothing."""

    seed: int
    crashes: int = 0
    steps: int = 0
    failure: str = ""


def answer(seed: int, bug: str) -> Answer:
    """All lives of a seed: some that end in a crash, and one that finds out what they have left."""
    found = Answer(seed)
    directory = Path(tempfile.mkdtemp(prefix="headgate-cut-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    root, aside = directory / "root", directory / "aside"
    root.mkdir()
    aside.mkdir()
    ledger = os.memfd_create("ledger")
    report = os.memfd_create("report")
    crashing = random.Random(f"lives {seed}").randint(1, 3)
    try:
        for life in range(crashing + 1):
            status = _life_of(seed, life, life == crashing, root, aside, ledger, report, bug)
            said = os.pread(report, 1 << 20, 0).decode()
            if status != (0 if life == crashing else _crashed()):
                facts = os.pread(ledger, 1 << 20, 0).decode()
                found.failure = f"life {life} ended with status {status}\n{said}\nledger:\n{facts}"
                break
            found.crashes += life < crashing
    finally:
        os.close(ledger)
        os.close(report)
        shutil.rmtree(directory)
    return found


def _crashed() -> int:
    from tests.crash.power.disk import CRASHED

    return CRASHED


def _life_of(
    seed: int, number: int, last: bool, root: Path, aside: Path, ledger: int, report: int, bug: str
) -> int:
    """The status that the life ends with; a signal's is negative."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)
    status = 1
    try:
        signal.alarm(LIFE_S)
        os.dup2(report, 2)
        _live(seed, number, last, root, aside, ledger, bug)
        status = 0
    except BaseException:
        os.write(report, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _live(seed: int, number: int, last: bool, root: Path, aside: Path, ledger: int, bug: str) -> None:
    import secrets

    from tests.crash.power.bugs import BUGS
    from tests.crash.power.ledger import Ledger
    from tests.crash.power.life import Life, Plan

    names = random.Random(f"names {seed} {number}")
    secrets.token_bytes = names.randbytes  # type: ignore[assignment]
    secrets.token_hex = lambda count: names.randbytes(count).hex()  # type: ignore[assignment, misc]
    if bug:
        BUGS[bug]()
    Life(Plan(seed, number, last), root, aside, Ledger(ledger)).live()


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
    arguments = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:])
    from tests.support.faulty_daemon import load_native

    load_native(arguments["native"])
    _prepare()
    for line in sys.stdin:
        print(json.dumps(vars(answer(int(line), arguments.get("bug", "")))), flush=True)


if __name__ == "__main__":
    main()
