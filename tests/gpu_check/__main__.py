"""Everything that only a machine with an NVIDIA GPU can say, in parts; a part that was found right is not run again.

    scripts/gpu_check.sh [PART ...]       builds what is missing first; see docs/gpu.md
    python -m tests.gpu_check [PART ...]

A part that is named is run in any case. Results go to --out, one JSON file for each part, as soon as it has ended.
Exit status 1 if a part has failed, 2 if there was no time for one: run again, and it goes on there."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from tests.gpu_check.parts import PARTS, ROOT
from tests.gpu_check.report import Outcome
from tests.gpu_check.runner import Result, Runner

RESULTS = ROOT / "bench" / "results" / "gpu-check"
ALL_S = 570.0
QUERY_S = 60
FAILED, NO_TIME = 1, 2


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", RESULTS)), help="default: $OUT")
    parser.add_argument("--seconds", type=float, default=ALL_S, help="that all of it may take (default %(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="on a pretended GPU: does the check itself work?")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.parts if name not in PARTS]
    if unknown:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    on = "a pretended GPU" if arguments.rehearse else device()
    if on is None:
        print("gpu_check: nvidia-smi finds no GPU here; --rehearse runs the check on a pretended one", file=sys.stderr)
        return FAILED
    if why := unwritable(arguments.out):
        print(f"gpu_check: --out {arguments.out}: {why}", file=sys.stderr)
        return FAILED
    for each in (signal.SIGTERM, signal.SIGHUP):  # a child has a session of its own, which nobody else would end
        signal.signal(each, lambda received, _: sys.exit(128 + received))
    folders = [arguments.out] if arguments.rehearse else list(dict.fromkeys([arguments.out, RESULTS]))
    rehearsing = (("--rehearse",), {"TRITON_INTERPRET": "1"}) if arguments.rehearse else ((), {"TRITON_INTERPRET": "0"})
    runner = Runner(PARTS, on, folders, *rehearsing)
    try:
        results = runner.run(arguments.parts or list(PARTS), bool(arguments.parts), arguments.seconds)
    except KeyboardInterrupt:
        print(f"gpu_check: interrupted; the parts that have ended are in {arguments.out}", file=sys.stderr)
        return 128 + signal.SIGINT
    print_table(on, results)
    return status(results)


def unwritable(folder: Path) -> str:
    """Makes it where it is missing. Why nothing can be written there; empty if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (trial := folder / ".trial").touch()
        trial.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def device() -> str | None:
    """The first GPU, its driver, and the packages that compile for it; None if there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_S)
    if done.returncode != 0 or not done.stdout.strip():
        return None
    return ", ".join((done.stdout.strip(), *(f"{name} {version(name)}" for name in ("torch", "triton"))))


def print_table(on: str, results: Mapping[str, Result | None]) -> None:
    print(f"\n{on}\n{'part':12}{'':10}{'checks':>8}{'failed':>8}{'absent':>8}{'s':>8}")
    for name, result in results.items():
        if result is None:
            print(f"{name:12}not run: no time was left; run again")
            continue
        counts = [sum(check.outcome is kind for check in result.checks) for kind in (Outcome.FAILED, Outcome.ABSENT)]
        kept = "  kept" if result.kept else ""
        print(
            f"{name:12}{result.outcome:10}{len(result.checks):8}{counts[0]:8}{counts[1]:8}{result.seconds:8.0f}{kept}"
        )
    for name, result in results.items():
        for check in result.checks if result else ():
            if check.outcome is not Outcome.OK:
                print(f"  {check.outcome}: {name}: {check.name}: {check.detail}")


def status(results: Mapping[str, Result | None]) -> int:
    if any(result is not None and result.outcome is Outcome.FAILED for result in results.values()):
        return FAILED
    return NO_TIME if None in results.values() else 0


if __name__ == "__main__":
    sys.exit(main())
