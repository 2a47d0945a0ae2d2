"""The kernels, on their least shapes, under NVIDIA's compute-sanitizer."""

from __future__ import annotations

import re
import shutil
import sys

from tests.gpu_check.commands import CommandFailed, output
from tests.gpu_check.report import Absent, Outcome, Report, outcome_of, read
from tests.gpu_check.scene import Scene

TOOLS = ("memcheck", "racecheck")  # accesses out of bounds; races for shared memory
PATH = "/usr/local/cuda/bin"  # where it lies unless it is on the path
FOUND = 99  # exit status
TOOL_S = 85
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # so that each tensor has bounds of its own


def run(report: Report, scene: Scene) -> None:
    for tool in TOOLS:
        with report.check(tool) as check:
            program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=PATH)
            if program is None:
                raise Absent("compute-sanitizer is not installed")
            checks = scene.directory / f"{tool}.jsonl"
            command = [
                program, "--tool", tool, "--error-exitcode", str(FOUND),
                sys.executable, "-m", "tests.gpu_check.child", "kernels", "--least", "--report", str(checks),
                *scene.arguments,
            ]  # fmt: skip
            try:
                said = output(command, TOOL_S, ENVIRONMENT)
            except CommandFailed as error:
                if "Device not supported" in error.output:
                    raise Absent("compute-sanitizer does not support this device") from None
                raise
            failed = [each.name for each in read(checks) if each.outcome is Outcome.FAILED]
            assert outcome_of(read(checks)) is Outcome.OK, f"under {tool} fail: {', '.join(failed) or 'all'}"
            summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", said)
            check.detail = summary[-1] if summary else "no summary"
