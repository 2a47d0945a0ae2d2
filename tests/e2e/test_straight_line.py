"""A step is a straight line: the same launches whatever heads do, none of them torch's, and all that Python adds is
calling them."""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_worker.engine.engine import Engine
from decode_worker.engine.step import Launch
from tests.support.torch_calls import TorchCalls

from .conftest import KV_HEADS, LAYERS, EngineFactory, random_ids

STEPS = 160
PROMPT = 760  # a seal begins at position 784 and is taken over at 896; heads that hit are forced to miss behind 905
STEP_S = 0.01  # at least, so that the seal never takes longer than the steps until it is taken over
SETTINGS = {"retriever": "hash", "recent": 16, "tail": 400, "slots": 2}


class Recorded:
    """Stands in for a loop's way of running its line, and writes down what it runs."""

    def __init__(self, engine: Engine) -> None:
        self.lines: list[list[Launch]] = []
        self.torch_calls: list[str] = []
        run = engine.loop._run

        def recorded(line: Sequence[Launch]) -> None:
            self.lines.append(list(line))
            with TorchCalls() as calls:
                run(line)
            self.torch_calls += calls.names

        engine.loop._run = recorded  # type: ignore[method-assign]


def trace(line: Sequence[Launch]) -> list[tuple[Any, ...]]:
    """Names, scalars, and of tensors shape, type and address."""

    def described(argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            return tuple(argument.shape), argument.dtype, argument.data_ptr()
        return argument

    return [(launch.call.__qualname__, *map(described, launch.arguments)) for launch in line]


def tensors(line: Sequence[Launch]) -> Iterator[torch.Tensor]:
    for launch in line:
        yield from (argument for argument in launch.arguments if isinstance(argument, torch.Tensor))


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """One head of each layer always misses, the others hit as long as they may."""
    path = tmp_path / "profile.json"
    importance = [[(layer + head) % 2 for head in range(KV_HEADS)] for layer in range(LAYERS)]
    path.write_text(json.dumps({"eta": 1.0, "kv_importance": importance}))
    return str(path)


@pytest.mark.timeout(120)
def test_every_step_is_the_same_line_and_torch_has_no_part_in_it(engine: EngineFactory, profile: str) -> None:
    worker = engine(**SETTINGS, profile=profile)
    session, logits = worker.prefill(random_ids(PROMPT, 91), growth=STEPS)
    recorded = Recorded(worker)
    before, stored = worker.policy.counters, session.stored
    for _ in range(STEPS):
        logits = worker.step([session], [int(logits.argmax())])[0]
    after = worker.policy.counters
    assert 0 < after.hits - before.hits < after.lookups - before.lookups, "hits and misses"
    assert after.forced > before.forced
    assert len(recorded.lines) == STEPS
    assert all(trace(line) == trace(recorded.lines[0]) for line in recorded.lines[1:])
    assert recorded.torch_calls == [], "an operation of torch allocates, and may look at data"
    owned = {
        value.untyped_storage().data_ptr() for value in vars(worker.loop._products).values() if torch.is_tensor(value)
    }
    owned.add(worker.loop._lse.untyped_storage().data_ptr())
    assert {tensor.untyped_storage().data_ptr() for tensor in tensors(recorded.lines[0])} <= owned
    assert session.stored >= stored


@pytest.mark.timeout(180)
def test_a_replay_without_the_steps_python_gives_the_same_bits(engine: EngineFactory, profile: str) -> None:
    """Two engines decode the same; of the second only the launches of its first step are ever called again."""
    prompt = random_ids(PROMPT, 92)
    results = []
    for replayed in (False, True):
        worker = engine(**SETTINGS, profile=profile)
        session, logits = worker.prefill(prompt, growth=STEPS)
        seen = [logits]
        first: list[Launch] = []

        def replay(line: Sequence[Launch], first: list[Launch] = first) -> None:
            if not first:
                first.extend(line)
            for launch in first:
                launch.call(*launch.arguments)

        if replayed:
            worker.loop._run = replay  # type: ignore[method-assign]
        for _ in range(STEPS):
            seen.append(worker.step([session], [int(seen[-1].argmax())])[0])
            time.sleep(STEP_S)
        counters = worker.policy.counters
        assert counters.forced > 0
        assert 0 < counters.hits < counters.lookups
        results.append((torch.stack(seen), session.stored, counters))
        worker.close_session(session)
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("policy", ["qsac", "full"])
def test_logits_do_not_depend_on_the_number_of_threads(engine: EngineFactory, policy: str) -> None:
    prompt = random_ids(2100, 93)
    results = []
    for threads in (1, 2, 3):
        worker = engine(policy=policy, retriever="hash", eta=0.35, storage="bfloat16", threads=threads)
        session, logits = worker.prefill(prompt)
        seen = [logits]
        for _ in range(8):
            seen.append(worker.step([session], [int(seen[-1].argmax())])[0])
        results.append(torch.stack(seen))
        worker.close_session(session)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.timeout(120)
def test_the_line_notices_an_operation_of_torch(engine: EngineFactory) -> None:
    """The recorder sees what it must: a launch that looks at data from Python."""
    worker = engine(**SETTINGS)
    session, logits = worker.prefill(random_ids(300, 94))
    recorded = Recorded(worker)
    look_up = worker.loop.kernels.look_up

    def peeking(layer: int, query: torch.Tensor, kind: Any) -> None:
        if query.abs().max().item() >= 0:
            look_up(layer, query, kind)

    worker.loop.kernels.look_up = peeking  # type: ignore[method-assign]
    worker.loop._lines.clear()
    worker.step([session], [int(logits.argmax())])
    assert any("_local_scalar_dense" in name for name in recorded.torch_calls)
