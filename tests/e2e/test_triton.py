"""The kernels for a GPU, interpreted, in an engine on a real daemon: the same tokens as the CPU's, over each window."""

from contextlib import closing
from pathlib import Path

import pytest
import torch

from decode_worker import _native
from decode_worker.config import WorkerConfig
from decode_worker.engine import engine as engine_module
from decode_worker.engine.engine import Engine
from decode_worker.policy.counters import Counters
from decode_worker.policy.settings import STAGGER
from decode_worker.window.kinds import WINDOWS
from kvstore_service.client import AdminClient
from tests.support.daemon_process import Daemon
from tests.support.gpu_double import GpuDouble, double, gpu_daemon
from tests.support.interpreter import bounded, patched_once
from tests.support.pretend_gpu import PretendGpu

from .conftest import LAYERS, random_ids, worker_settings

__all__ = ["bounded", "double", "gpu_daemon", "patched_once"]
STEPS = 3  # made launch by launch, captured, replayed
# Least tails: after two steps the first session's is sealed, and its index grows.
SETTINGS = {"retriever": "hash", "recent": 1, "tail": 256 + STAGGER + 2, "slots": 4, "wait_ms": 60_000, "eta": 0.1}
PROMPTS = (1023, 300, 530)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PretendGpu:
    """What kernels=triton runs on."""
    gpu = PretendGpu()
    device_of = engine_module.device_of
    monkeypatch.setattr(engine_module, "device_of", lambda kernels: gpu if kernels == "triton" else device_of(kernels))
    return gpu


def decoded(daemon: Daemon, checkpoint: Path, expected: str, **settings: object) -> tuple[torch.Tensor, Counters]:
    """Logits of steps of one session, then of three, of which one grows; and what they count."""
    config = WorkerConfig(**worker_settings(daemon, checkpoint, **SETTINGS, **settings))
    with closing(Engine(config)) as engine:
        assert type(engine.transport.window) is WINDOWS[expected]()
        sessions, last = zip(*(engine.prefill(random_ids(n, n), growth=2 * STEPS) for n in PROMPTS), strict=True)
        stored, seen = sessions[0].stored, list(last)
        for together in (1, len(sessions)):
            for _ in range(STEPS):
                tokens = [int(row.argmax()) for row in last[:together]]
                last = (*engine.step(sessions[:together], tokens), *last[together:])
                seen += last
                if sessions[0].sealing is not None:
                    sessions[0].sealing.finish()
        assert sessions[0].stored > stored, "the index has grown"
        return torch.stack(seen), engine.policy.counters


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("window", "settings"),
    [("gdr", {}), ("bounce", {"window": "bounce", "sync": "layer"})],
    ids=["gdr", "bounce-layer"],
)
def test_an_engine_on_a_gpu_says_what_one_on_the_cpu_says(
    gpu_daemon: Daemon, double: GpuDouble, checkpoint: Path, gpu: PretendGpu, window: str, settings: dict[str, str],
    bounded: None, patched_once: None,
) -> None:  # fmt: skip
    right, counted = decoded(gpu_daemon, checkpoint, "shm")
    mine, counted_too = decoded(gpu_daemon, checkpoint, window, kernels="triton", **settings)
    torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-3)
    assert mine.argmax(-1).tolist() == right.argmax(-1).tolist()
    assert counted_too == counted
    assert counted.records_moved > 0
    assert counted.hits > 0
    parts = LAYERS + 1 if "sync" in settings else 1
    assert [graph.replays for graph in gpu.made] == [STEPS - 2] * 2 * parts, "of one row, and of four"


@pytest.mark.timeout(280)
def test_an_engine_that_pulls_says_the_same_over_a_tier_smaller_than_a_ticket(
    tmp_path: Path, checkpoint: Path, gpu: PretendGpu, bounded: None, patched_once: None
) -> None:
    """eta=1: every head asks anew at each step. Of what it asks for some lies in the arena, and some is delivered."""
    settings = SETTINGS | {"eta": 1.0}
    options = ("--nvme-bytes=1GiB", "--copy-threads=2", "--dram-bytes=4MiB", "--arena-bytes=256KiB")
    said, counted = {}, []
    with Daemon(tmp_path, options=options) as daemon:
        for kernels, window in (("cpu", "shm"), ("triton", "pull")):
            config = WorkerConfig(**worker_settings(daemon, checkpoint, **settings, kernels=kernels, window=window))
            with closing(Engine(config)) as engine:
                assert type(engine.transport.window) is WINDOWS[window]()
                session, logits = engine.prefill(random_ids(530, 5), growth=STEPS)
                seen = [logits]
                for _ in range(STEPS):
                    seen += engine.step([session], [int(seen[-1].argmax())])
                said[kernels] = torch.stack(seen)
                counted.append(engine.policy.counters)
                with AdminClient.connect(daemon.socket, daemon.broker) as admin:
                    counters = admin.get_status().counters
        assert counters["arenas"] == 1
        assert 0 < counters["records_pulled"] < counted[1].records_moved
    torch.testing.assert_close(said["triton"], said["cpu"], rtol=1e-3, atol=1e-3)
    assert said["triton"].argmax(-1).tolist() == said["cpu"].argmax(-1).tolist()
    assert counted[0] == counted[1]
    assert [graph.replays for graph in gpu.made] == [STEPS - 2]


@pytest.mark.timeout(200)
def test_a_daemon_that_dies_under_a_replay_is_an_error_behind_the_step(
    gpu_daemon: Daemon, double: GpuDouble, checkpoint: Path, gpu: PretendGpu, patched_once: None
) -> None:
    """eta=1: heads always miss, so every step waits for the daemon."""
    settings = worker_settings(gpu_daemon, checkpoint, **SETTINGS | {"eta": 1.0, "wait_ms": 2000}, kernels="triton")
    with closing(Engine(WorkerConfig(**settings))) as engine:
        session, _ = engine.prefill(random_ids(300, 97), growth=STEPS)
        for token in range(STEPS):
            engine.step([session], [token])
        assert [graph.replays for graph in gpu.made] == [1]
        gpu_daemon.kill()
        with pytest.raises(_native.RingTimeout, match="not done within the deadline; the ring is poisoned"):
            engine.step([session], [STEPS])
        with pytest.raises(_native.RingPoisoned):
            engine.step([session], [STEPS])
