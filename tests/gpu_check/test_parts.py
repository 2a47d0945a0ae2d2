"""Every part, rehearsed: on a pretended GPU, and with faults that it must find."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decode_worker import device as device_module
from decode_worker.kernels.reference import ReferenceKernels
from tests.gpu_check import bench, death, flash, kernels, replays, sanitizer, steps
from tests.gpu_check import scene as scene_module
from tests.gpu_check.parts import ROOT
from tests.gpu_check.rehearsal import rehearsed
from tests.gpu_check.report import Check, Outcome, Report, read
from tests.gpu_check.scene import Scene, StrictGraph
from tests.support import shim_build
from tests.support.pretend_gpu import PretendGpu

assert shim_build.path, "so that it is built before a test waits for it"
CHILD_S = 120.0


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with rehearsed(tmp_path_factory.mktemp("scene")) as scene:
        yield scene


@pytest.fixture
def one_window(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PretendGpu, "windows", ("bounce",))


def checks(part: Any, scene: Scene, tmp_path: Path) -> dict[str, Check]:
    part.run(Report(tmp_path / "checks"), scene)
    return {check.name: check for check in read(tmp_path / "checks")}


def failed(found: dict[str, Check]) -> list[str]:
    return [name for name, check in found.items() if check.outcome is Outcome.FAILED]


@pytest.mark.timeout(CHILD_S + 20)
def test_a_part_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu_check.child", "kernels", "--rehearse"]
    done = subprocess.run(
        [*command, "--report", str(tmp_path / "checks")], capture_output=True, text=True, timeout=CHILD_S, cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = read(tmp_path / "checks")
    assert {check.outcome for check in found} == {Outcome.OK}
    assert {check.name.split()[0] for check in found} >= {"attend", "append", "decisions"}


def test_kernels_that_compute_something_else_are_found(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, append = ReferenceKernels.attend, ReferenceKernels.append

    def other_attend(self: Any, layer: int, query: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        attend(self, layer, query * 1.001, out, lse)

    def differ(twins: kernels.Twins) -> None:
        raise AssertionError("held differs")

    def other_append(self: Any, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        append(self, layer, key, value + 1)

    monkeypatch.setattr(ReferenceKernels, "attend", other_attend)
    monkeypatch.setattr(ReferenceKernels, "append", other_append)
    monkeypatch.setattr(kernels.Twins, "compare", differ)
    found = checks(kernels, scene, tmp_path)
    assert len(found) == len(failed(found)) + 1, "all but the ticket that nobody answers"


@pytest.mark.timeout(250)
def test_the_whole_step_equals_the_cpu_s(scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The windows that no other part of a rehearsal takes, and that need most of the daemon."""
    monkeypatch.setattr(PretendGpu, "windows", ("gdr", "pull"))
    found = checks(steps, scene, tmp_path)
    assert failed(found) == []
    windows = {check.figures["window"] for check in found.values() if "window" in check.figures}
    assert windows == {"GdrWindow", "PullWindow"}
    assert all(check.figures.get("difference", 0) < 1e-4 for check in found.values())


def test_other_logits_are_found() -> None:
    right = torch.tensor([[1.0, 0.2, 0.0], [0.9, 0.895, 0.0]])
    assert steps._difference(right, right) == 0
    assert steps._difference(right + 0.005, right) > 0
    near = right.clone()
    near[1, 1] += 0.007  # another one is the likeliest, of two that are as good
    steps._difference(near, right)
    for wrong in (right + 0.02, right * torch.nan):
        with pytest.raises(AssertionError):
            steps._difference(wrong, right)


@pytest.mark.timeout(200)
def test_a_daemon_dies_within_a_replay(
    scene: Scene, one_window: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = checks(death, scene, tmp_path)
    assert failed(found) == []
    (check,) = found.values()
    assert check.figures["error_s"] > death.KILL_S


@pytest.mark.timeout(200)
def test_replays_have_the_same_bits_under_delays(scene: Scene, one_window: None, tmp_path: Path) -> None:
    found = checks(replays, scene, tmp_path)
    assert failed(found) == []
    (check,) = found.values()
    assert check.figures["replays"] >= scene.scale.replays


@pytest.mark.timeout(200)
def test_replays_whose_bits_change_are_found(
    scene: Scene, one_window: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cycle, cycles = replays._cycle, []

    def disturbed(*arguments: Any) -> torch.Tensor:
        cycles.append(None)
        seen = cycle(*arguments)
        seen[3] += 1e-6 * (len(cycles) == 2)
        return seen

    monkeypatch.setattr(replays, "_cycle", disturbed)
    (check,) = checks(replays, scene, tmp_path).values()
    assert check.outcome is Outcome.FAILED
    assert "cycle 1 has other logits from step 3 on" in check.detail


# --- programs of others ---


def sanitizer_that(does: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "compute-sanitizer"
    program.write_text(
        f"#!{sys.executable}\nimport json, sys\nreport = sys.argv[sys.argv.index('--report') + 1]\n{does}\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


ONE_CHECK = 'open(report, "w").write(json.dumps({"name": "attend", "outcome": OUTCOME}) + "\\n")\n'


@pytest.mark.parametrize(
    ("does", "outcome", "detail"),
    [
        (ONE_CHECK.replace("OUTCOME", '"ok"') + "print('= ERROR SUMMARY: 0 errors')", "ok", "ERROR SUMMARY: 0 errors"),
        (ONE_CHECK.replace("OUTCOME", '"ok"') + "print('= Invalid read'); sys.exit(99)", "failed", "Invalid read"),
        (ONE_CHECK.replace("OUTCOME", '"failed"'), "failed", "under memcheck fail: attend"),
        ("pass", "failed", "under memcheck fail: all"),
        ("print('Device not supported'); sys.exit(1)", "absent", "does not support this device"),
    ],
)  # fmt: skip
def test_what_a_sanitizer_finds(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, outcome: str, detail: str
) -> None:
    sanitizer_that(does, tmp_path, monkeypatch)
    scene = replace(scene, directory=tmp_path)
    found = checks(sanitizer, scene, tmp_path)
    assert found.keys() == {"memcheck", "racecheck"}
    assert found["memcheck"].outcome == outcome
    assert detail in found["memcheck"].detail


def test_a_program_that_is_not_installed_is_absent(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sanitizer, "PATH", str(tmp_path))
    monkeypatch.setattr(flash, "find_spec", lambda name: None)
    for part in (sanitizer, flash):
        assert {check.outcome for check in checks(part, scene, tmp_path).values()} == {Outcome.ABSENT}


@pytest.mark.parametrize(("says", "outcome"), [("'as torch'", "ok"), ("1 / 0", "failed")])
def test_what_flashinfer_s_check_says(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, outcome: str
) -> None:
    for name in ("told_module", "flashinfer"):
        (tmp_path / f"{name}.py").write_text(f"print({says})\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(flash, "MODULE", "told_module")
    scene = replace(scene, deadline=time.monotonic() + CHILD_S)
    (check,) = checks(flash, scene, tmp_path).values()
    assert check.outcome == outcome, check.detail
    assert outcome == "failed" or check.figures["output"] == ["as torch"]


BENCH = """
import json, pathlib, sys, time
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
out.write_text(json.dumps({"failed": FAILED, "figures": [{"name": "tokens", "value": 3.0}]}))
assert sys.argv[-4:] == ["--shape", "tiny", "--kernels", "cpu"]
"""


@pytest.mark.parametrize(
    ("does", "outcome"),
    [
        (BENCH.replace("FAILED", "[]"), "ok"),
        (BENCH.replace("FAILED", "['main']") + "sys.exit(1)", "failed"),
        (BENCH.replace("FAILED", "[]") + "time.sleep(300)", "failed"),
    ],
    ids=["done", "failed", "late"],
)
def test_figures_of_a_benchmark_are_kept_however_it_ends(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, outcome: str
) -> None:
    (tmp_path / "told_module.py").write_text(does)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(bench, "MODULE", "told_module")
    monkeypatch.setattr(bench, "MARGIN_S", CHILD_S - 5)
    (check,) = checks(bench, replace(scene, deadline=time.monotonic() + CHILD_S), tmp_path).values()
    assert check.outcome == outcome, check.detail
    assert check.figures["figures"] == [{"name": "tokens", "value": 3.0}]


# --- what only a device does ---


def test_a_capture_on_a_device_may_not_synchronise(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Usual:
        def capture(self, launch: Any) -> None:
            told.append("capture")
            launch()

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", told.append)
    monkeypatch.setattr(device_module.CudaGraph, "capture", Usual.capture)
    graph = StrictGraph.__new__(StrictGraph)
    StrictGraph.capture(graph, lambda: told.append("launch"))
    assert told == ["capture", "error", "launch", "default"]


def test_graphs_of_a_device_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    with scene_module.on_a_device(tmp_path) as scene:
        scene.make().graph().replay()
        assert [graph.replays for graph in scene.graphs] == [1]
    assert device_module.CudaGraph is StrictGraph.__mro__[1]
