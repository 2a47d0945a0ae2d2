"""The scene on a machine without a GPU: interpreted kernels, a pretended device, doubles of the driver's libraries."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from decode_worker.engine import engine as engine_module
from decode_worker.window import imported
from tests.gpu_check.scale import REHEARSED
from tests.gpu_check.scene import Scene
from tests.support.gpu_double import gpu_double
from tests.support.interpreter import prepared_once
from tests.support.pretend_gpu import PretendGpu, RecordedGraph


@contextlib.contextmanager
def rehearsed(directory: Path) -> Iterator[Scene]:
    """TRITON_INTERPRET must have been set before Triton was imported."""
    graphs: list[Any] = []
    device_of = engine_module.device_of

    def graph(gpu: PretendGpu) -> RecordedGraph:
        graphs.append(RecordedGraph())
        return graphs[-1]

    with (
        gpu_double(directory) as double,
        prepared_once(),
        patch.object(imported, "CUDA_LIBRARY", double.library),
        patch.object(PretendGpu, "graph", graph),
        patch.object(engine_module, "device_of", lambda name: PretendGpu() if name == "triton" else device_of(name)),
    ):
        libraries = (f"--cuda-library={double.library}", f"--gdr-library={double.library}")
        yield Scene(REHEARSED, directory, PretendGpu, graphs, arguments=("--rehearse",), daemon_options=libraries)
