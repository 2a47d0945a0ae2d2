"""The benchmarks of the GPU path, as many as fit."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.gpu_check.report import Report
from tests.gpu_check.scene import Scene

MODULE = "bench.gpu_decode"
REHEARSED = ("--shape", "tiny", "--kernels", "cpu")
LAST_S = 50.0  # what has begun by then takes a little longer
MARGIN_S = 5.0


def run(report: Report, scene: Scene) -> None:
    with report.check(MODULE) as check:
        told = scene.directory / "figures.json"
        begins_s = max(scene.seconds_left() - LAST_S, 0.0)
        command = [sys.executable, "-m", MODULE, "--quick", "--seconds", f"{begins_s:.0f}", "--out", str(told)]
        try:
            done = subprocess.run(
                [*command, *(REHEARSED if scene.arguments else ())], timeout=scene.seconds_left() - MARGIN_S
            )
        finally:
            if told.exists():  # it is written anew with every figure
                check.figures |= json.loads(told.read_text())
                check.detail = f"{len(check.figures['figures'])} figures"
        assert done.returncode == 0, f"exit status {done.returncode}: {check.figures.get('failed')}"
