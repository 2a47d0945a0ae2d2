"""Where a part runs: a model with random weights, daemons, and engines on the device beside those on the CPU."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from decode_worker import device as device_module
from decode_worker.config import WorkerConfig
from decode_worker.device import CudaGraph, Device, Gpu
from decode_worker.engine.engine import Engine
from decode_worker.engine.session import Session
from decode_worker.policy.counters import Counters
from decode_worker.synthetic.checkpoint import random_checkpoint
from kvstore_service.client import StoreError
from tests.gpu_check.report import Absent
from tests.gpu_check.scale import DEVICE, SETTINGS, Scale
from tests.support.daemon_process import Daemon

PACK_TOKENS = 256
SEED = 7


@dataclass
class Scene:
    """`make`: a device as an engine takes it. `graphs`: what was captured since the list was last emptied. `arguments`:
    with which a child process (child.py) makes the same scene. `deadline`: monotonic, when the part is ended."""

    scale: Scale
    directory: Path
    make: Callable[[], Device]
    graphs: list[Any]
    deadline: float = float("inf")
    arguments: tuple[str, ...] = ()
    daemon_options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.device = self.make()
        self.checkpoint = random_checkpoint(self.directory / "model", self.scale.shape, SEED)
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def daemon(self, faulty: bool = False) -> Iterator[Daemon]:
        """With a store of its own, all in DRAM."""
        directory = self.directory / f"store{next(self._numbers)}"
        options = (
            "--nvme-bytes=2GiB", "--copy-threads=2", f"--pack-tokens={PACK_TOKENS}", *self.daemon_options
        )  # fmt: skip
        with Daemon(directory, "256MiB", options=options, faulty=faulty) as daemon:
            yield daemon

    @contextlib.contextmanager
    def engine(
        self, daemon: Daemon, kernels: str = "triton", window: str = "auto", **settings: Any
    ) -> Iterator[Engine]:
        """Absent where this machine cannot have the window."""
        config = WorkerConfig(
            model=self.checkpoint, socket=Path(daemon.socket), broker=Path(daemon.broker), kernels=kernels,
            window=window, **{"slots": len(self.scale.prompts), **SETTINGS, **settings},
        )  # fmt: skip
        try:
            engine = Engine(config)
        except StoreError as error:
            if error.code == "FAILED_PRECONDITION" and self._may_lack(window):
                raise Absent(error.message) from None
            raise
        with contextlib.closing(engine):
            yield engine

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def _may_lack(self, window: str) -> bool:
        return window == "gdr" and not self.daemon_options and not Path("/dev/gdrdrv").exists()

    def random_ids(self, count: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(int(self.scale.shape["vocab_size"]), (count,), generator=generator).tolist()


@dataclass(frozen=True, eq=False)
class Decoded:
    """`logits`: float32 [seen, vocab]; `tokens`: of each step, one for each of its rows."""

    logits: torch.Tensor
    tokens: list[list[int]]
    counters: Counters


def decoded(engine: Engine, scene: Scene, tokens: Sequence[Sequence[int]] | None = None) -> Decoded:
    """Steps of one session, then of all, with these tokens or the likeliest."""
    scale = scene.scale
    begun = [engine.prefill(scene.random_ids(n, n), growth=2 * scale.steps) for n in scale.prompts]
    sessions, last = [session for session, _ in begun], [logits for _, logits in begun]
    seen, taken = list(last), []
    for step in range(2 * scale.steps):
        rows = 1 if step < scale.steps else len(sessions)
        taken.append(list(tokens[step]) if tokens else [int(logits.argmax()) for logits in last[:rows]])
        last[:rows] = stepped(engine, sessions[:rows], taken[-1])
        seen += last[:rows]
    counters = engine.policy.counters
    for session in sessions:
        engine.close_session(session)
    return Decoded(torch.stack(seen), taken, counters)


def stepped(engine: Engine, sessions: Sequence[Session], tokens: Sequence[int]) -> list[torch.Tensor]:
    """One step; a seal is as fast, so that an index grows when its time has come."""
    logits = engine.step(sessions, tokens)
    for session in sessions:
        if session.sealing is not None:
            session.sealing.finish()
    return list(logits)


class StrictGraph(CudaGraph):
    """Whoever makes the host wait for the device within a capture is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.replays = 0

    def capture(self, launch: Callable[[], None]) -> None:
        def strictly() -> None:
            torch.cuda.set_sync_debug_mode("error")
            try:
                launch()
            finally:
                torch.cuda.set_sync_debug_mode("default")

        super().capture(strictly)

    def replay(self) -> None:
        self.replays += 1
        super().replay()


@contextlib.contextmanager
def on_a_device(directory: Path, scale: Scale = DEVICE) -> Iterator[Scene]:
    graphs: list[Any] = []

    def made() -> StrictGraph:
        graphs.append(StrictGraph())
        return graphs[-1]

    usual = device_module.CudaGraph
    device_module.CudaGraph = made  # type: ignore[assignment, misc]
    try:
        yield Scene(scale, directory, Gpu, graphs)
    finally:
        device_module.CudaGraph = usual  # type: ignore[misc]
