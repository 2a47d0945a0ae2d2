"""Verify the Promela specifications of the ring protocol, and check that every planted bug in them is found."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

SPECS = Path(__file__).resolve().parent.parent / "csrc" / "protocol"
MEMORY_MIB_MAX = 900
SECONDS_MAX = 60
DEPTH_MAX = 20_000

SAFE = "none"
ASSERTION = "assertion violated"
END_STATE = "invalid end state"
CYCLE = "acceptance cycle"


@dataclass(frozen=True)
class Check:
    """One run of the verifier: a Promela specification, a macro that changes it, and what must be found."""

    spec: str
    variant: str = ""
    expect: str = SAFE
    liveness: bool = False

    @property
    def name(self) -> str:
        kind = " (ltl)" if self.liveness else ""
        return f"{self.spec}:{self.variant or 'correct'}{kind}"


@dataclass(frozen=True)
class Result:
    """What the verifier found, with the number of states stored and the wall time in seconds."""

    found: str
    states: int
    seconds: float


def _bugs(spec: str, expect: str, *variants: str) -> tuple[Check, ...]:
    return tuple(Check(spec, variant, expect) for variant in variants)


CHECKS: tuple[Check, ...] = (
    Check("ring_wake"),
    Check("ring_wake", liveness=True),
    *_bugs(
        "ring_wake",
        END_STATE,
        "NO_FENCE_IN_SLEEP",
        "NO_FENCE_IN_RING",
        "BELL_READ_LATE",
        "WAKE_BEFORE_BELL",
        "NO_BELL",
        "NO_RECHECK",
        "ASLEEP_AFTER_RECHECK",
        "SILENT_POISON",
    ),
    Check("ring_bell"),
    *_bugs("ring_bell", END_STATE, "BELL_NOT_ATOMIC"),
    Check("ring_credit"),
    Check("ring_credit", "OVERRUN"),
    *_bugs("ring_credit", END_STATE, "CONSUMED_ONLY"),
    *_bugs(
        "ring_credit",
        ASSERTION,
        "CREDIT_OFF_BY_ONE",
        "CELLS_ONLY",
        "CONSUMED_MAX",
        "CONSUMED_AT_TAKE",
        "CREDIT_ASKED_ONCE",
        "SEQ_BEFORE_RUNS",
        "SEQ_BEFORE_STATUS",
        "CELL_GE_INSTEAD_OF_EQ",
        "TORN_CELL",
    ),
    Check("commit"),
    *_bugs(
        "commit",
        ASSERTION,
        "LABEL_BEFORE_DATA",
        "REUSE_QUARANTINED",
        "COMMIT_ON_ERROR",
        "LATE_COMMIT",
        "NO_CLEAR_FIRST",
        "CLEAR_KEEPS_LABEL",
        "IGNORE_GENERATION",
        "ANSWER_BEFORE_STOP",
    ),
    Check("slices"),
    *_bugs(
        "slices",
        ASSERTION,
        "UNBIND_LEAVES_RUNS",
        "UNBIND_ADMITS_MEANWHILE",
        "UNBIND_BY_THE_CALLER",
        "ADMIT_AT_TAKE",
        "SAME_EPOCH",
        "CANCEL_FORGETS_UNBEGUN",
        "FRAME_FREED_IN_FLIGHT",
        "FRAME_FREED_SILENTLY",
        "TASK_FREED_IN_FLIGHT",
        "LANDING_WAKES_ENDED_RUNS",
        "ABANDONED_COMMAND_STAYS",
        "RUNNING_COMMAND_ABANDONED",
    ),
    Check("poison"),
    Check("poison", liveness=True),
    *_bugs(
        "poison",
        ASSERTION,
        "POISON_NOT_FINAL",
        "CELL_BEFORE_POISON",
        "KEEP_WINDOW",
        "UNMAP_EARLY",
    ),
    Check("device_wake"),
    Check("device_wake", liveness=True),
    *_bugs("device_wake", END_STATE, "MARK_WITHOUT_RING"),
    *_bugs(
        "device_wake",
        ASSERTION,
        "NO_MARK",
        "NO_FENCE_IN_RING",
        "NO_FENCE_IN_SLEEP",
        "SEQUENCE_BEFORE_MARK",
        "CLEAR_BEFORE_END",
        "NO_DEVICE_FENCE",
    ),
    Check("device_wake", "MARK_TRUSTED_FOR_EVER", CYCLE, liveness=True),
    Check("device_window"),
    *_bugs("device_window", END_STATE, "NO_CREDIT"),
    *_bugs(
        "device_window",
        ASSERTION,
        "READ_AFTER_POST",
        "LOAD_BEFORE_CELL",
        "CELL_BEFORE_STORES",
        "FLUSH_BEFORE_FENCE",
        "NO_FENCE_BEFORE_FLUSH",
        "NO_FLUSH",
    ),
    Check("pull"),
    *_bugs(
        "pull",
        ASSERTION,
        "UNPIN_AT_ANSWER",
        "RELEASED_BY_THE_FIRST",
        "RELEASED_BEFORE_READ",
        "RELEASED_TAKEN_AS_NEXT",
        "GATHER_OUT_OF_ORDER",
        "PINS_FOR_EVER",
        "NO_FALLBACK",
        "UNPIN_WITHOUT_POISON",
        "UNPIN_BEFORE_POISON",
        "POISON_NOT_READ",
        "POISON_READ_FIRST",
    ),
)


class ProtocolCheckError(RuntimeError):
    """A tool is missing, a specification does not compile, or a search was cut short."""


def _run(command: list[str], directory: str) -> str:
    try:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=SECONDS_MAX)
    except subprocess.TimeoutExpired as error:
        raise ProtocolCheckError(f"{command[0]} took more than {SECONDS_MAX} s") from error
    output = done.stdout + done.stderr
    if done.returncode != 0:
        raise ProtocolCheckError(f"{' '.join(command)} failed: {output.strip()}")
    return output


def _found(output: str) -> str:
    """The first error that the verifier reports; an incomplete search is not an answer."""
    errors = re.search(r"errors: (\d+)", output)
    if errors is None or "max search depth too small" in output or "-DMEMLIM" in output:
        raise ProtocolCheckError(f"the search was not exhaustive: {output.strip()}")
    if errors[1] == "0":
        return SAFE
    for kind in (ASSERTION, END_STATE, CYCLE):
        if re.search(rf"^pan:\d+: {kind}", output, re.MULTILINE):
            return kind
    raise ProtocolCheckError(f"an error of an unknown kind: {output.strip()}")


def verify(check: Check) -> Result:
    """Run one check in a temporary directory. Raises ProtocolCheckError unless it is exhaustive."""
    for tool, package in (("spin", "spin"), ("gcc", "gcc")):
        if shutil.which(tool) is None:
            raise ProtocolCheckError(f"{tool} is missing: apt-get install {package}")
    begin = time.monotonic()
    macros = [f"-D{check.variant}"] if check.variant else []
    claim = ["-DNFAIR=3"] if check.liveness else ["-DSAFETY", "-DNOCLAIM"]
    search = ["-a", "-f"] if check.liveness else []
    with tempfile.TemporaryDirectory(prefix="protocol_check_") as directory:
        # spin's preprocessor leaves its files where it runs, and reads the specification by its name there
        shutil.copy(SPECS / f"{check.spec}.pml", directory)
        _run(["spin", *macros, "-a", f"{check.spec}.pml"], directory)
        # compiling takes longer than all but the largest searches
        memory = f"-DMEMLIM={MEMORY_MIB_MAX}"
        _run(["gcc", "-O0", "-w", memory, *claim, "-o", "pan", "pan.c"], directory)
        output = _run(["./pan", f"-m{DEPTH_MAX}", *search], directory)
    stored = re.search(r"(\d+) states, stored", output)
    states = int(stored[1]) if stored else 0
    return Result(_found(output), states, time.monotonic() - begin)


def main() -> int:
    wrong = 0
    print(f"{'specification and variant':42} {'states':>9} {'seconds':>7}  result")
    for check in CHECKS:
        try:
            result = verify(check)
        except ProtocolCheckError as error:
            print(f"{check.name}: {error}", file=sys.stderr)
            return 2
        good = result.found == check.expect
        wrong += not good
        verdict = "verified" if result.found == SAFE else f"found: {result.found}"
        if not good:
            verdict += f"  WRONG, expected {check.expect}"
        print(f"{check.name:42} {result.states:9} {result.seconds:7.1f}  {verdict}", flush=True)
    print(f"{len(CHECKS)} checks, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
