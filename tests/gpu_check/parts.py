"""The parts of the check, in the order in which they are run. One is imported where it runs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.gpu_check.report import Report
    from tests.gpu_check.scene import Scene

ROOT = Path(__file__).parents[2]
SOURCES = {".py", ".cc", ".h", ".inc", ".c", ".proto", ".txt", ".toml"}
HERE = "tests/gpu_check"
KERNELS = (
    "decode_worker/gpu", "decode_worker/kernels", "decode_worker/policy", "decode_worker/retrieval", "csrc/core",
    "tests/gpu", "tests/qsac/pretend.py", f"{HERE}/kernels.py", f"{HERE}/scale.py",
)  # fmt: skip
ENGINE = (
    "csrc", "decode_worker", "kvstore_service", "proto", "CMakeLists.txt", "tests/support", f"{HERE}/scene.py",
    f"{HERE}/scale.py",
)  # fmt: skip

Run = Callable[["Report", "Scene"], None]


@dataclass(frozen=True)
class Part:
    """`limit_s`: how long it may take. `inputs`: files, and folders of sources: while they stay the same, what was
    found stays true."""

    load: Callable[[], Run]
    limit_s: float
    inputs: tuple[str, ...]

    def digest(self, root: Path = ROOT) -> str:
        """Of all inputs, their names included."""
        summed = hashlib.sha256()
        for name in self.inputs:
            paths = [root / name] if (root / name).is_file() else sorted((root / name).rglob("*"))
            for path in paths:
                if path.suffix in SOURCES and "_proto" not in path.parts:
                    summed.update(f"{os.path.relpath(path, root)}\0".encode() + path.read_bytes())
        return summed.hexdigest()[:16]


def _facts() -> Run:
    from tests.gpu_check import facts

    return facts.run


def _kernels() -> Run:
    from tests.gpu_check import kernels

    return kernels.run


def _steps() -> Run:
    from tests.gpu_check import steps

    return steps.run


def _death() -> Run:
    from tests.gpu_check import death

    return death.run


def _flash() -> Run:
    from tests.gpu_check import flash

    return flash.run


def _sanitizer() -> Run:
    from tests.gpu_check import sanitizer

    return sanitizer.run


def _replays() -> Run:
    from tests.gpu_check import replays

    return replays.run


def _bench() -> Run:
    from tests.gpu_check import bench

    return bench.run


PARTS: dict[str, Part] = {
    "facts": Part(_facts, 60, ("bench/gpu_facts.py", "decode_worker/device.py")),
    "kernels": Part(_kernels, 150, KERNELS),
    "steps": Part(_steps, 180, (*ENGINE, f"{HERE}/steps.py")),
    "death": Part(_death, 90, (*ENGINE, f"{HERE}/death.py")),
    "flash": Part(_flash, 180, ("decode_worker/gpu", "decode_worker/model", f"{HERE}/flash.py")),
    "sanitizer": Part(_sanitizer, 180, (*KERNELS, f"{HERE}/sanitizer.py")),
    "replays": Part(_replays, 240, (*ENGINE, f"{HERE}/replays.py")),
    "bench": Part(_bench, 300, (*ENGINE, "bench")),
}
