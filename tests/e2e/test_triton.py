"""The kernels for a GPU, interpreted, in an engine on a real daemon: the same tokens as the CPU's, over each window."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decode_worker import _native, generate
from decode_worker.config import WorkerConfig
from decode_worker.engine.engine import Engine
from decode_worker.model.sampling import Sampling
from decode_worker.policy.counters import Counters
from decode_worker.policy.settings import STAGGER
from decode_worker.window.base import WindowError
from decode_worker.window.kinds import WINDOWS
from kvstore_service.client import AdminClient
from tests.support.daemon_process import Daemon
from tests.support.gpu_double import GpuDouble, daemon_over, double, gpu_daemon
from tests.support.interpreter import bounded, patched_once
from tests.support.pretend_gpu import PretendGpu, gpu

from .conftest import random_checkpoint, random_ids, worker_settings

__all__ = ["bounded", "double", "gpu", "gpu_daemon", "patched_once"]
LAYERS = 2  # one that selects with its true query, and one with a speculative one: interpreted, each takes its time
STEPS = 3  # made launch by launch, captured, replayed
# Least tails: after two steps the first session's is sealed, and its index grows.
SETTINGS = {"retriever": "hash", "recent": 1, "tail": 256 + STAGGER + 2, "slots": 4, "wait_ms": 60_000, "eta": 0.1}
PROMPTS = (1023, 300, 530)
SAMPLINGS = (Sampling(1.0, seed=1), Sampling(0.7, 0.9, 20, seed=2), Sampling())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=7, num_hidden_layers=LAYERS)


def engine_of(config: WorkerConfig, gpu: PretendGpu) -> Engine:
    """Whose graphs, `gpu.made`, are those of its steps."""
    engine = Engine(config)
    gpu.made.clear()
    return engine


def decoded(
    daemon: Daemon, checkpoint: Path, gpu: PretendGpu, prompts: tuple[int, ...], expected: str, **settings: object
) -> tuple[torch.Tensor, list[int], Counters]:
    """Logits of steps of one session, which grows, then of all; their tokens, and what they count."""
    config = WorkerConfig(**worker_settings(daemon, checkpoint, **SETTINGS, **settings))
    with closing(engine_of(config, gpu)) as engine:
        assert type(engine.transport.window) is WINDOWS[expected]()
        sessions, last = zip(*(engine.prefill(random_ids(n, n), growth=2 * STEPS) for n in prompts), strict=True)
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
                    seen += engine.loop._products.logits[:together].to("cpu", copy=True)
                chosen += tokens
                if sessions[0].sealing is not None:
                    sessions[0].sealing.finish()
        assert sessions[0].stored > stored, "the index has grown"
        return torch.stack(seen), chosen, engine.policy.counters


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("window", "prompts", "settings"),
    [
        ("gdr", PROMPTS, {}),
        ("staged", PROMPTS[:1], {"window": "staged"}),
        ("bounce", PROMPTS[:2], {"window": "bounce", "sync": "layer"}),
    ],
    ids=["gdr", "staged", "bounce-layer"],
)
def test_an_engine_on_a_gpu_says_what_one_on_the_cpu_says(
    gpu_daemon: Daemon, double: GpuDouble, checkpoint: Path, gpu: PretendGpu, window: str,
    prompts: tuple[int, ...], settings: dict[str, str], bounded: None, patched_once: None,
) -> None:  # fmt: skip
    right, tokens, counted = decoded(gpu_daemon, checkpoint, gpu, prompts, "shm")
    mine, tokens_too, counted_too = decoded(gpu_daemon, checkpoint, gpu, prompts, window, kernels="triton", **settings)
    torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-3)
    assert mine.argmax(-1).tolist() == right.argmax(-1).tolist()
    assert tokens_too == tokens, "drawn ones, too"
    assert counted_too == counted
    assert counted.records_moved > 0
    assert counted.hits > 0
    parts = LAYERS + 1 if "sync" in settings else 1
    replays = [STEPS - 2] * 2 if len(prompts) > 1 else [2 * STEPS - 2]
    assert [graph.replays for graph in gpu.made] == replays * parts, "of one row, and of several"


@pytest.mark.timeout(200)
def test_labels_that_one_left_are_the_others(
    gpu_daemon: Daemon, checkpoint: Path, gpu: PretendGpu, bounded: None, patched_once: None
) -> None:
    """All layers' sets travel at once, to either."""
    settings = SETTINGS | {"labels": "kept", "layer0": "offloaded"}
    ids, left, sets = random_ids(530, 9), [], []
    for kernels in ("cpu", "cpu", "triton"):
        config = WorkerConfig(**worker_settings(gpu_daemon, checkpoint, **settings, kernels=kernels))
        with closing(engine_of(config, gpu)) as engine:
            session = engine.attach(ids)[0] if left else engine.prefill(ids)[0]
            state, slot = engine.policy.state, session.slot
            left.append(engine.policy.labels(slot))
            heads = [(layer, head) for layer in range(LAYERS) for head in range(engine.model.config.kv_heads)]
            sides = [state.side(layer, slot, head) for layer, head in heads]
            sets.append([sorted(state.held[side].tolist()) for side in sides])
            engine.close_session(session)
    assert left[0] is not None
    assert all(labels is not None and torch.equal(labels, left[0]) for labels in left)
    assert sets[2] == sets[1]
    assert min(map(max, sets[1])) >= 0


@pytest.mark.timeout(200)
def test_generate_tells_which_window_it_took_and_why_not_the_others(
    double: GpuDouble, checkpoint: Path, gpu: PretendGpu, patched_once: None, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """One token, which comes of the prompt: there is no step."""
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(" ".join(f"w{token}" for token in random_ids(40, 3)))
    with daemon_over(tmp_path, double, "bar_spoils=70000") as daemon:
        config = WorkerConfig(**worker_settings(daemon, checkpoint, **SETTINGS, kernels="triton"))
        generate.run(config, prompt, 1, Sampling(), (), private=False, as_json=True)
        told = json.loads(capsys.readouterr().out)
        assert told["window"] == "pull"
        assert list(told["windows_refused"]) == ["gdr"]
        generate.run(config, prompt, 1, Sampling(), (), private=False, as_json=False)
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("window pull, not gdr: the daemon cannot read back what it has delivered")
        with pytest.raises(WindowError, match="window gdr: the daemon cannot read back"):
            generate.run(replace(config, window="gdr"), prompt, 1, Sampling(), (), private=False, as_json=False)


def interrupted() -> list[int]:
    raise KeyboardInterrupt


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
            with closing(engine_of(config, gpu)) as engine:
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
    gpu_daemon: Daemon, double: GpuDouble, checkpoint: Path, gpu: PretendGpu, patched_once: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """eta=1: heads always miss, so every step waits for the daemon. A step that was interrupted may be made again."""
    settings = worker_settings(gpu_daemon, checkpoint, **SETTINGS | {"eta": 1.0, "wait_ms": 2000}, kernels="triton")
    with closing(engine_of(WorkerConfig(**settings), gpu)) as engine:
        session, _ = engine.prefill(random_ids(300, 97), growth=STEPS)
        for token in range(STEPS):
            engine.step([session], [token])
        assert [graph.replays for graph in gpu.made] == [1]
        with monkeypatch.context() as patch:
            patch.setattr(engine.loop._ends, "read", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.step([session], [STEPS])
        before = engine.loop._products.logits[:1].cpu()
        assert torch.equal(engine.step([session], [STEPS]), before)
        assert session.tokens[-2:] == [STEPS - 1, STEPS]
        gpu_daemon.kill()
        with pytest.raises(_native.RingTimeout, match="not done within the deadline; the ring is poisoned"):
            engine.step([session], [STEPS])
        with pytest.raises(_native.RingPoisoned):
            engine.step([session], [STEPS])
