"""Runs parts, each within its time, and keeps what they found: one JSON file for each, written when it has ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from decode_worker.figures import commit, machine
from tests.gpu_check.parts import ROOT, Part
from tests.gpu_check.report import Check, Outcome, outcome_of, read

CHILD = (sys.executable, "-m", "tests.gpu_check.child")
LEAST_S = 20.0  # with less time left no part is begun


@dataclass(frozen=True)
class Result:
    """`on`: the device and what drives it; `inputs`: Part.digest. What another one says of the same two holds here."""

    part: str
    outcome: Outcome
    on: str
    inputs: str
    seconds: float
    checks: list[Check]
    machine: str
    commit: str
    date: str
    kept: bool = False  # from an earlier run

    def write(self, folder: Path) -> None:
        told = {key: value for key, value in asdict(self).items() if key != "kept"}
        part = folder / f"{self.part}.json.part"
        part.write_text(json.dumps(told, indent=2) + "\n")
        part.rename(folder / f"{self.part}.json")

    @classmethod
    def load(cls, path: Path) -> Result:
        told = json.loads(path.read_text())
        checks = [Check(**{**check, "outcome": Outcome(check["outcome"])}) for check in told.pop("checks")]
        return cls(**{**told, "outcome": Outcome(told["outcome"])}, checks=checks)


@dataclass(frozen=True)
class Runner:
    """`folders`: results are written to the first and looked for in all. `arguments`: the child's."""

    parts: Mapping[str, Part]
    on: str
    folders: Sequence[Path]
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None

    def run(self, names: Sequence[str], anew: bool, seconds: float) -> dict[str, Result | None]:
        """In order; None for what there was no time for. anew: also what has been found already."""
        self.folders[0].mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + seconds
        return {name: self._result(name, anew, deadline) for name in names}

    def _result(self, name: str, anew: bool, deadline: float) -> Result | None:
        kept = None if anew else self._kept(name)
        if kept is not None:
            print(f"{name}: found before, kept", flush=True)
            kept.write(self.folders[0])
            return replace(kept, kept=True)
        left = deadline - time.monotonic()
        if left < LEAST_S:
            return None
        part, started = self.parts[name], time.monotonic()
        limit = min(part.limit_s, left)
        print(f"{name}: at most {limit:.0f} s", flush=True)
        checks = self._run(name, limit)
        result = Result(
            name, outcome_of(checks), self.on, part.digest(), time.monotonic() - started, checks, machine(), commit(),
            datetime.now(UTC).isoformat(timespec="seconds"),
        )  # fmt: skip
        result.write(self.folders[0])
        return result

    def _kept(self, name: str) -> Result | None:
        """A result that still holds: right, on the same device, of the same sources."""
        for folder in self.folders:
            path = folder / f"{name}.json"
            if path.exists():
                try:
                    result = Result.load(path)
                except (ValueError, KeyError, TypeError) as error:
                    print(f"{name}: {path} is no result and does not count: {error}", flush=True)
                    continue
                same = (result.on, result.inputs) == (self.on, self.parts[name].digest())
                if same and result.outcome is Outcome.OK:
                    return result
        return None

    def _run(self, name: str, limit_s: float) -> list[Check]:
        """In a session of its own, so that all that it has started ends with it."""
        with tempfile.TemporaryDirectory(prefix="headgate-gpu-") as directory:
            report = Path(directory) / "checks.jsonl"
            command = [*CHILD, name, "--report", str(report), "--seconds", f"{limit_s:.0f}", *self.arguments]
            environment = {**os.environ, **(self.environment or {})}
            process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
            why = ""
            try:
                code = process.wait(limit_s)
                if code != 0:
                    why = f"the process ended with {signal.Signals(-code).name if code < 0 else code}"
            except subprocess.TimeoutExpired:
                why = f"not done within {limit_s:.0f} s"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            checks = read(report)
        if why:
            checks.append(Check("all of it", Outcome.FAILED, f"{why}, after {len(checks)} checks"))
        return checks
