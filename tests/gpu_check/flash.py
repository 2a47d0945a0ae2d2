"""FlashInfer's operations beside torch's, where it is installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from tests.gpu_check.commands import output
from tests.gpu_check.report import Absent, Report
from tests.gpu_check.scene import Scene

MARGIN_S = 5.0
MODULE = "decode_worker.gpu.flash"


def run(report: Report, scene: Scene) -> None:
    with report.check("FlashInfer beside torch") as check:
        for module in (MODULE, "flashinfer"):
            if find_spec(module) is None:
                raise Absent(f"{module} is not installed")
        check.figures["output"] = output(
            [sys.executable, "-m", MODULE, "--check"], scene.seconds_left() - MARGIN_S
        ).splitlines()
