"""Power cuts of a store in one process, on a disk that keeps what was synced and little else."""

from __future__ import annotations

import re
from itertools import product

import pytest

from tests.crash.power import cuts
from tests.crash.power.cuts import replay, run

SEEDS = range(1, 201)
ALL_SEEDS = range(1, 1001)
# With a seed that finds it; where code has changed, another of ALL_SEEDS does.
BUGS = {
    "no sync before the row": 5,
    "no sync of the directory": 24,
    "no sync above the data directory": 32,
    "no sync of the row": 19,
    "a short read taken for whole": 5,
    "commits that share a block of the log": 17,
    "a log that is not cut at the start": 58,
    "a stamp that must be readable": 38,
    "a stamp before moves are durable": 201,
    "an old build removed before its row": 54,
    "a new build without its directory": 5,
}


def test_a_power_cut_loses_nothing_and_leaves_nothing() -> None:
    answers = list(run((seed, "") for seed in SEEDS))
    failures = [f"{each.failure}\nagain: {replay(each.seed)}" for each in answers if each.failure]
    assert not failures, "\n\n".join(failures)
    assert len(answers) == len(SEEDS)
    assert sum(answer.crashes for answer in answers) >= len(SEEDS)


def test_every_planted_bug_is_found() -> None:
    found = {answer.bug for answer in run((seed, bug) for bug, seed in BUGS.items()) if answer.failure}
    for bug in BUGS.keys() - found:
        assert any(answer.failure for answer in run(product(ALL_SEEDS, [bug]))), f"not found: {bug}"


def test_a_failure_replays_from_its_seed(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for _ in range(2):
        assert cuts.main(["--first=24", "--seeds=1", "--bug=no sync of the directory"]) == 1
        said.append(re.sub(r"power-cut-\w+", "", capsys.readouterr().out))
    assert said[0] == said[1]
    assert replay(24, "no sync of the directory") in said[0]
