"""FlashInfer's operations beside torch's, where it is installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from tests.gpu_check.commands import output
from tests.gpu_check.report import Absent, Report
from tests.gpu_check.scene import Scene

MARGIN_S = 5.0
MODULE = "decode_worker.gpu.flash_choice"


def run(report: Report, scene: Scene) -> None:
    with report.check("FlashInfer beside torch") as check:
        if find_spec("flashinfer") is None:
            raise Absent("flashinfer is not installed")
        said = output([sys.executable, "-m", MODULE], scene.seconds_left() - MARGIN_S)
        check.figures["output"] = said.splitlines()
