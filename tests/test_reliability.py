"""The file of soak results: totals follow from the runs, and no run is lost."""

import json
from pathlib import Path

from tests.support.reliability import RESULTS, add_run, total


def test_runs_add_up(tmp_path: Path) -> None:
    results = tmp_path / "results" / "reliability.json"
    add_run("daemon_sigkill", results, seed=7, kills=50, lost=0, restart_s_median=0.3, restart_s_max=0.9)
    add_run("fuzz", results, seed=1, executions=10)
    summed = add_run("daemon_sigkill", results, seed=8, kills=70, lost=1, restart_s_median=0.5, restart_s_max=0.6)
    assert summed == {"runs": 2, "kills": 120, "lost": 1, "restart_s_median": 0.4, "restart_s_max": 0.9}
    written = json.loads(results.read_text())
    assert [run["seed"] for run in written["daemon_sigkill"]["runs"]] == [7, 8]
    assert written["daemon_sigkill"]["total"] == summed
    assert written["fuzz"]["total"] == {"runs": 1, "executions": 10}
    assert list(results.parent.iterdir()) == [results]


def test_the_totals_that_we_publish_are_those_of_the_runs() -> None:
    for kind, content in json.loads(RESULTS.read_text()).items():
        assert content["total"] == total(content["runs"]), f"{kind}: run its soak again, which adds them up"
