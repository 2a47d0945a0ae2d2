"""Other programs that a part runs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

LAST = 600  # characters of what a failed one said


class CommandFailed(RuntimeError):
    """`output`: all that it said."""

    def __init__(self, code: int, output: str) -> None:
        super().__init__(f"exit status {code}: {' '.join(output[-LAST:].split())}")
        self.output = output


def output(command: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None) -> str:
    """What it prints. CommandFailed unless it succeeds; subprocess.TimeoutExpired."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit_s,
        env={**os.environ, **(environment or {})},
    )  # fmt: skip
    if done.returncode != 0:
        raise CommandFailed(done.returncode, done.stdout)
    return done.stdout
