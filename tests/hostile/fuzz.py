"""Fuzzes what a worker may write into its rings with libFuzzer: python -m tests.hostile.fuzz --executions 200000

Starts from csrc/fuzz/corpus and from what earlier runs on this machine found, and adds what it did to
bench/results/reliability.json. `--minimise` then renews the corpus with the smallest set that covers as much.
"""

import argparse
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.hostile import sanitized
from tests.hostile.sanitized import ROOT
from tests.support import reliability

BUILD = ROOT / "build" / "fuzz"
CORPUS = ROOT / "csrc" / "fuzz" / "corpus"
INPUT_BYTES_MAX = 1024
LIBFUZZER = (f"-max_len={INPUT_BYTES_MAX}", "-detect_leaks=0", "-print_final_stats=1", "-timeout=20")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--executions", type=int, default=200_000)
    parser.add_argument("--seconds", type=int, default=0, help="stop after this time; 0: no limit")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--minimise", action="store_true", help="renew the committed corpus")
    parser.add_argument("--results", type=Path, default=reliability.RESULTS)
    options = parser.parse_args()
    compiler = next(filter(None, map(shutil.which, ("clang++-14", "clang++"))), None)
    if compiler is None:
        print("fuzz: clang with libFuzzer is needed; apt-get install clang-14 libclang-rt-14-dev", file=sys.stderr)
        return 1
    sanitized.build(BUILD, "address", "fuzz_requests", compiler=compiler)
    target = BUILD / "fuzz_requests"
    found = BUILD / "corpus"
    found.mkdir(exist_ok=True)
    started_s = time.monotonic()
    command = [target, *LIBFUZZER, f"-runs={options.executions}", f"-max_total_time={options.seconds}"]
    done = subprocess.run(
        [*command, f"-seed={options.seed}", found, CORPUS], cwd=BUILD, stderr=subprocess.PIPE, text=True, check=False
    )
    count = re.search(r"stat::number_of_executed_units:\s*(\d+)", done.stderr)
    executions = int(count[1]) if count else 0
    minutes = round((time.monotonic() - started_s) / 60, 2)
    reliability.add_run(
        "request_fuzzing",
        options.results,
        minutes=minutes,
        seed=options.seed,
        executions=executions,
        failed_inputs=int(done.returncode != 0),
    )
    if done.returncode != 0:
        print(done.stderr[-4000:], file=sys.stderr)
        print(f"fuzz: an input failed after {executions} executions, see {BUILD}", file=sys.stderr)
        return 1
    if options.minimise:
        minimise(target, found)
    print(f"fuzz: {executions} executions in {minutes} min, seed {options.seed}, no input failed")
    return 0


def minimise(target: Path, found: Path) -> None:
    """The smallest inputs that cover what all of `found` and the committed corpus cover."""
    fresh = BUILD / "minimised"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    command = [target, *LIBFUZZER, "-set_cover_merge=1", fresh, CORPUS, found]
    subprocess.run(command, cwd=BUILD, check=True, capture_output=True)
    for path in CORPUS.iterdir():
        if re.fullmatch("[0-9a-f]{40}", path.name):  # libFuzzer's name; what has one of its own is kept
            path.unlink()
    for path in fresh.iterdir():
        shutil.copyfile(path, CORPUS / path.name)


if __name__ == "__main__":
    sys.exit(main())
