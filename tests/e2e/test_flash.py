"""An engine on a pretended GPU whose layers are FlashInfer's, by its double: what it says, and when its pieces end."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from decode_worker.config import WorkerConfig
from decode_worker.engine.engine import Engine
from decode_worker.engine.prefill import CHUNK_TOKENS
from decode_worker.gpu import flash, flash_choice
from tests.support import flashinfer_double
from tests.support.daemon_process import Daemon
from tests.support.gpu_double import GpuDouble, double, gpu_daemon
from tests.support.interpreter import patched_once
from tests.support.pretend_gpu import PretendGpu, runs_on

from .conftest import random_ids, worker_settings

__all__ = ["double", "gpu_daemon", "patched_once"]
STEPS = 3  # made launch by launch, captured, replayed
PROMPT = random_ids(CHUNK_TOKENS + 300, 11)


class FlashGpu(PretendGpu):
    """Counts what waits for it."""

    waits = 0

    def operations(self, *arguments: object) -> object:
        return flash_choice.operations(*arguments, self.torch_device)  # type: ignore[arg-type]

    def wait(self) -> None:
        self.waits += 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FlashGpu:
    """What kernels=triton runs on. Here the library has float32, so that the CPU's results are what must come."""
    gpu = FlashGpu()
    runs_on(gpu, monkeypatch)
    library = SimpleNamespace(__version__="0.6.7", **{each.__name__: each for each in flashinfer_double.FUNCTIONS})
    monkeypatch.setitem(sys.modules, "flashinfer", library)  # type: ignore[arg-type]
    for module in (flash, flashinfer_double):
        monkeypatch.setattr(module, "DTYPES", (torch.float32,))
    flashinfer_double.calls.clear()
    return gpu


def decoded(daemon: Daemon, checkpoint: Path, gpu: FlashGpu | None = None) -> torch.Tensor:
    """Logits of a prompt of two chunks, computed and stored, and of steps behind it."""
    settings = {"retriever": "hash", "wait_ms": 60_000, "eta": 0.1, "kernels": "triton" if gpu else "cpu"}
    pieces: list[int] = []

    def progress(done: int, of: int) -> None:
        pieces.append(gpu.waits if gpu else done)

    with closing(Engine(WorkerConfig(**worker_settings(daemon, checkpoint, **settings)))) as engine:
        if gpu:
            gpu.made.clear()  # that of its window's trial
        session, last = engine.prefill(PROMPT, progress, growth=STEPS)
        seen = [engine.compute_only(PROMPT), last]
        for _ in range(STEPS):
            seen += engine.step([session], [int(seen[-1].argmax())])
    assert pieces == sorted(set(pieces)), "no piece of a prompt is left to the device when it ends"
    return torch.stack(seen)


@pytest.mark.timeout(200)
def test_an_engine_with_flashinfer_says_what_one_on_the_cpu_says(
    gpu_daemon: Daemon, double: GpuDouble, checkpoint: Path, gpu: FlashGpu, patched_once: None
) -> None:
    mine = decoded(gpu_daemon, checkpoint, gpu)
    assert set(flashinfer_double.calls) == {each.__name__ for each in flashinfer_double.FUNCTIONS}
    right = decoded(gpu_daemon, checkpoint)
    torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-3)
    assert mine.argmax(-1).tolist() == right.argmax(-1).tolist()
    assert [graph.replays for graph in gpu.made] == [STEPS - 2]
