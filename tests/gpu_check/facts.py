"""What the device, its driver and its bus can do."""

from __future__ import annotations

import torch

from bench import gpu_facts
from tests.gpu_check.report import Absent, Report
from tests.gpu_check.scene import Scene


def run(report: Report, scene: Scene) -> None:
    with report.check("facts") as check:
        if scene.device.torch_device.type != "cuda":
            raise Absent("a pretended GPU has none")
        check.figures |= gpu_facts.facts()
        check.detail = str(torch.cuda.get_device_name(0))
