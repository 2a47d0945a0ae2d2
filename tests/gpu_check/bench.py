"""The benchmarks of the GPU path, as many as fit."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec

from tests.gpu_check.commands import output
from tests.gpu_check.report import Absent, Report
from tests.gpu_check.scene import Scene

MODULE = "bench.gpu_decode"
BENCH_S = 290


def run(report: Report, scene: Scene) -> None:
    with report.check(MODULE) as check:
        if find_spec(MODULE) is None:
            raise Absent(f"{MODULE} is not installed")
        said = output([sys.executable, "-m", MODULE, "--quick", "--json"], BENCH_S)
        check.figures |= json.loads(said)
