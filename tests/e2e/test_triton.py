"""The kernels for a GPU, interpreted, in an engine on a real daemon: the same tokens as the CPU's, over each window."""

from contextlib import closing
from pathlib import Path

import pytest
import torch

from decode_worker import _native
from decode_worker.config import WorkerConfig
from decode_worker.engine.engine import Engine
from decode_worker.model.sampling import Sampling
from decode_worker.policy.counters import Counters
from decode_worker.policy.settings import STAGGER
from decode_worker.window.kinds import WINDOWS
from tests.support.daemon_process import Daemon
from tests.support.gpu_double import GpuDouble, double, gpu_daemon
from tests.support.interpreter import bounded, patched_once
from tests.support.pretend_gpu import PretendGpu, gpu

from .conftest import LAYERS, random_ids, worker_settings

__all__ = ["bounded", "double", "gpu", "gpu_daemon", "patched_once"]
STEPS = 3  # made launch by launch, captured, replayed
# Least tails: after two steps the first session's is sealed, and its index grows.
SETTINGS = {"retriever": "hash", "recent": 1, "tail": 256 + STAGGER + 2, "slots": 4, "wait_ms": 60_000, "eta": 0.1}
PROMPTS = (1023, 300, 530)
SAMPLINGS = (Sampling(1.0, seed=1), Sampling(0.7, 0.9, 20, seed=2), Sampling())


def decoded(
    daemon: Daemon, checkpoint: Path, expected: str, **settings: object
) -> tuple[torch.Tensor, list[int], Counters]:
    """Logits of steps of one session, then of three, of which one grows; their tokens, and what they count."""
    config = WorkerConfig(**worker_settings(daemon, checkpoint, **SETTINGS, **settings))
    with closing(Engine(config)) as engine:
        assert type(engine.transport.window) is WINDOWS[expected]()
        sessions, last = zip(*(engine.prefill(random_ids(n, n), growth=2 * STEPS) for n in PROMPTS), strict=True)
        stored, seen, chosen = sessions[0].stored, list(last), list[int]()
        tokens = [int(row.argmax()) for row in last]
        for together in (1, len(sessions)):
            for _ in range(STEPS):
                if together == 1:
                    (row,) = engine.step(sessions[:1], tokens[:1])
                    seen.append(row)
                    tokens[0] = int(row.argmax())
                else:
                    tokens, faults = engine.advance(sessions, tokens, SAMPLINGS)
                    assert faults == [None] * together
                    seen += engine.loop._products.logits[:together].clone()
                chosen += tokens
                if sessions[0].sealing is not None:
                    sessions[0].sealing.finish()
        assert sessions[0].stored > stored, "the index has grown"
        return torch.stack(seen), chosen, engine.policy.counters


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
    right, tokens, counted = decoded(gpu_daemon, checkpoint, "shm")
    mine, tokens_too, counted_too = decoded(gpu_daemon, checkpoint, window, kernels="triton", **settings)
    torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-3)
    assert mine.argmax(-1).tolist() == right.argmax(-1).tolist()
    assert tokens_too == tokens, "drawn ones, too"
    assert counted_too == counted
    assert counted.records_moved > 0
    assert counted.hits > 0
    parts = LAYERS + 1 if "sync" in settings else 1
    assert [graph.replays for graph in gpu.made] == [STEPS - 2] * 2 * parts, "of one row, and of four"


def interrupted() -> list[int]:
    raise KeyboardInterrupt


@pytest.mark.timeout(200)
def test_a_daemon_that_dies_under_a_replay_is_an_error_behind_the_step(
    gpu_daemon: Daemon, double: GpuDouble, checkpoint: Path, gpu: PretendGpu, patched_once: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """eta=1: heads always miss, so every step waits for the daemon. A step that was interrupted may be made again."""
    settings = worker_settings(gpu_daemon, checkpoint, **SETTINGS | {"eta": 1.0, "wait_ms": 2000}, kernels="triton")
    with closing(Engine(WorkerConfig(**settings))) as engine:
        session, _ = engine.prefill(random_ids(300, 97), growth=STEPS)
        for token in range(STEPS):
            engine.step([session], [token])
        assert [graph.replays for graph in gpu.made] == [1]
        with monkeypatch.context() as patch:
            patch.setattr(engine.loop._ends, "read", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.step([session], [STEPS])
        before = engine.loop._products.logits[:1].clone()
        assert torch.equal(engine.step([session], [STEPS]), before)
        assert session.tokens[-2:] == [STEPS - 1, STEPS]
        gpu_daemon.kill()
        with pytest.raises(_native.RingTimeout, match="not done within the deadline; the ring is poisoned"):
            engine.step([session], [STEPS])
        with pytest.raises(_native.RingPoisoned):
            engine.step([session], [STEPS])
