"""Parts are run within their time, what they found is kept, and the exit status says what was not right."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu_check import __main__ as command
from tests.gpu_check import runner as runner_module
from tests.gpu_check.parts import PARTS, ROOT, Part, Run
from tests.gpu_check.report import Absent, Check, Outcome, Report, outcome_of, read
from tests.gpu_check.runner import Result, Runner

# In the place of a child: does what its part is called.
CHILD = """
import json, os, signal, subprocess, sys, time
part, report = sys.argv[1], sys.argv[3]
def found(name, outcome):
    with open(report, "a") as file:
        file.write(json.dumps({"name": name, "outcome": outcome, "detail": "", "seconds": 0.0, "figures": {}}) + "\\n")
with open(os.environ["RAN"], "a") as file:
    file.write(part + "\\n")
found("one", "ok")
if part == "wrong":
    found("two", "failed")
if part == "late":
    subprocess.Popen(["sleep", "300"], stdout=open(os.environ["RAN"] + ".pipe", "w"))
    time.sleep(300)
if part == "crash":
    os.kill(os.getpid(), signal.SIGSEGV)
"""
LATE_S = 3.0
NAMES = ("right", "wrong", "late", "crash")


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The parts that have run, a line each."""
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setattr(runner_module, "CHILD", (sys.executable, str(tmp_path / "child.py")))
    return tmp_path / "ran"


def runner(ran: Path, on: str = "this", **folders: Path) -> Runner:
    source = ran.parent / "source.py"
    if not source.exists():
        source.write_text("1")
    inputs = (str(source),)
    parts = {name: Part(never, LATE_S if name == "late" else 60, inputs) for name in NAMES}
    return Runner(parts, on, list(folders.values()) or [ran.parent / "out"], environment={"RAN": str(ran)})


def never() -> Run:
    raise AssertionError("only a child loads a part")


def names(ran: Path) -> list[str]:
    told = ran.read_text().split() if ran.exists() else []
    ran.unlink(missing_ok=True)
    return told


def test_each_part_is_run_and_written_whatever_the_others_do(ran: Path, capfd: pytest.CaptureFixture[str]) -> None:
    results = runner(ran).run(NAMES, anew=False, seconds=200)
    assert names(ran) == list(NAMES)
    assert {name: result.outcome for name, result in results.items() if result} == {
        "right": "ok", "wrong": "failed", "late": "failed", "crash": "failed"
    }  # fmt: skip
    written = {path.stem: json.loads(path.read_text()) for path in (ran.parent / "out").iterdir()}
    assert written.keys() == set(NAMES)
    assert [check["name"] for check in written["late"]["checks"]] == ["one", "all of it"], "what it had found stays"
    assert "not done within 3 s" in written["late"]["checks"][1]["detail"]
    assert signal.SIGSEGV.name in written["crash"]["checks"][1]["detail"]
    command.print_table("a machine", results)
    said = capfd.readouterr().out
    assert "failed: wrong: two" in said
    assert "failed: crash: all of it: the process ended with SIGSEGV, after 1 checks" in said
    assert command.status(results) == 1
    assert command.status({"right": results["right"]}) == 0


def test_what_was_right_is_not_run_again(ran: Path) -> None:
    two = ("right", "wrong")
    runner(ran).run(two, anew=False, seconds=60)
    assert names(ran) == ["right", "wrong"]
    again = runner(ran).run(two, anew=False, seconds=60)
    assert names(ran) == ["wrong"]
    assert again["right"] is not None
    assert again["right"].kept
    runner(ran).run(("right",), anew=True, seconds=60)
    assert names(ran) == ["right"], "it was asked for"
    runner(ran, on="that").run(("right",), anew=False, seconds=60)
    assert names(ran) == ["right"], "another device"
    (ran.parent / "source.py").write_text("2")
    runner(ran, on="that").run(("right",), anew=False, seconds=60)
    assert names(ran) == ["right"], "another source"


def test_results_that_came_along_count(ran: Path) -> None:
    old, new = ran.parent / "old", ran.parent / "new"
    runner(ran, out=old).run(("right",), anew=False, seconds=60)
    names(ran)
    runner(ran, out=new, before=old).run(("right",), anew=False, seconds=60)
    assert names(ran) == []
    assert Result.load(new / "right.json") == Result.load(old / "right.json")


def test_without_time_nothing_is_begun(ran: Path, capfd: pytest.CaptureFixture[str]) -> None:
    results = runner(ran).run(("right",), anew=False, seconds=1)
    assert results == {"right": None}
    assert names(ran) == []
    command.print_table("a machine", results)
    assert "right       not run: no time was left" in capfd.readouterr().out
    assert command.status(results) == 2


def test_a_check_is_written_when_it_ends_and_its_error_is_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    report = Report(tmp_path / "checks")
    with report.check("good") as check:
        check.detail, check.figures["rate"] = "fast", 3.5
    with report.check("bad"):
        raise ValueError("two\nlines")
    with report.check("missing"):
        raise Absent("no such library")
    good, bad, missing = read(tmp_path / "checks")
    assert (good.outcome, good.detail, good.figures) == (Outcome.OK, "fast", {"rate": 3.5})
    assert (bad.outcome, bad.detail) == (Outcome.FAILED, "ValueError: two lines")
    assert (missing.outcome, missing.detail) == (Outcome.ABSENT, "no such library")
    said = capfd.readouterr()
    assert "good: ok (fast)" in said.out
    assert "raise ValueError" in said.err, "a failure shows where it was"


def test_a_part_that_found_nothing_has_failed() -> None:
    assert outcome_of([]) is Outcome.FAILED
    assert outcome_of([Check("a", Outcome.ABSENT)]) is Outcome.ABSENT
    assert outcome_of([Check("a", Outcome.ABSENT), Check("b")]) is Outcome.OK
    assert outcome_of([Check("a", Outcome.FAILED), Check("b")]) is Outcome.FAILED


def test_a_file_that_is_no_result_does_not_count(ran: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = ran.parent / "out"
    out.mkdir()
    for spoiled in ("{", '{"part": "right"}'):
        (out / "right.json").write_text(spoiled)
        result = runner(ran).run(["right"], False, 60)["right"]
        assert result is not None
        assert not result.kept
        assert "right.json is no result" in capfd.readouterr().out


@pytest.mark.parametrize("below", [False, True], ids=["a-file", "below-a-file"])
def test_a_folder_that_cannot_be_written_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, below: bool
) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out" if below else tmp_path / "file"
    monkeypatch.setattr(command, "device", lambda: "this")
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--out", str(out)])
    assert command.main() == command.FAILED
    assert capsys.readouterr().err.startswith(f"gpu_check: --out {out}: ")


# The command with another child, which says who it is.
INTERRUPTED = """
import sys
from tests.gpu_check import __main__ as command, runner
child = "import os, pathlib, time; pathlib.Path(os.environ['PID']).write_text(str(os.getpid())); time.sleep(300)"
runner.CHILD = (sys.executable, "-c", child)
command.device = lambda: "this"
sys.exit(command.main())
"""


@pytest.mark.parametrize("received", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_who_ends_the_check_ends_its_part(tmp_path: Path, received: signal.Signals) -> None:
    pid = tmp_path / "pid"
    command = [sys.executable, "-c", INTERRUPTED, "facts", "--out", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PID": str(pid)})
    try:
        assert until(lambda: pid.exists() and pid.read_text())
        process.send_signal(received)
        assert process.wait(30) == 128 + received
        assert not Path(f"/proc/{pid.read_text()}").exists()
    finally:
        process.kill()


def until(condition: Callable[[], object], deadline_s: float = 60.0) -> bool:
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    assert command.main() == 1
    assert capsys.readouterr().err.startswith("gpu_check: nvidia-smi finds no GPU here; --rehearse")
    monkeypatch.setattr(sys, "argv", ["gpu_check", "kernel"])
    with pytest.raises(SystemExit):
        command.main()
    assert "no part 'kernel'; there are facts, kernels" in capsys.readouterr().err


def test_a_device_is_named_with_what_compiles_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 580.1'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert str(command.device()).startswith("NVIDIA H100 80GB HBM3, 580.1, torch ")
    smi.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert command.device() is None


def test_every_input_of_a_part_exists_and_counts() -> None:
    digests = [part.digest() for part in PARTS.values()]
    assert len(set(digests)) == len(digests)
    for part in PARTS.values():
        for name in part.inputs:
            assert (runner_module.ROOT / name).exists(), name
