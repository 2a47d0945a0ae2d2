"""What a part of the check has found, written down as soon as it is known: whatever ends a part, that stays."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

LINE = 200  # characters of an error


class Outcome(StrEnum):
    OK = "ok"
    FAILED = "failed"
    ABSENT = "absent"  # what it needs is not to be had on this machine


class Absent(Exception):
    """What a check needs and this machine has not."""


@dataclass
class Check:
    """`detail`: one line. `figures`: what was measured, JSON."""

    name: str
    outcome: Outcome = Outcome.OK
    detail: str = ""
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)


class Report:
    """Each check is a line of JSON in `path` and one on the terminal."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._started = time.monotonic()

    @contextmanager
    def check(self, name: str) -> Iterator[Check]:
        """Of what happens within the block, which may fill in `detail` and `figures`. Its errors are the check's; the
        next one is made all the same."""
        check, started = Check(name), time.monotonic()
        try:
            yield check
        except Absent as reason:
            check.outcome, check.detail = Outcome.ABSENT, str(reason)
        except Exception as error:
            traceback.print_exc()
            check.outcome = Outcome.FAILED
            check.detail = f"{type(error).__name__}: {' '.join(str(error).split())}"[:LINE]
        check.seconds = time.monotonic() - started
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(check)) + "\n")
        said = f" ({check.detail})" if check.detail else ""
        print(f"{time.monotonic() - self._started:7.1f} s  {name}: {check.outcome}{said}", flush=True)


def read(path: Path) -> list[Check]:
    """The checks that have ended."""
    if not path.exists():
        return []
    told = [json.loads(line) for line in path.read_text().splitlines()]
    return [Check(**{**check, "outcome": Outcome(check["outcome"])}) for check in told]


def outcome_of(checks: Sequence[Check]) -> Outcome:
    """Of a part: none of its checks has failed, and not all were absent."""
    outcomes = {check.outcome for check in checks}
    if not checks or Outcome.FAILED in outcomes:
        return Outcome.FAILED
    return Outcome.OK if Outcome.OK in outcomes else Outcome.ABSENT
