"""The whole system, real daemon, ring and NVMe included, decodes token by token as the NumPy oracle does."""

from pathlib import Path
from typing import Any

import pytest
from oracle.qsac import Oracle

from decode_worker import _native
from tests.daemon_process import Daemon

from .conftest import EngineFactory, random_ids

STEPS = 24
DELAYS = {"delay_us": 300, "delay_random": True, "reorder": True, "seed": 5}


def engine_tokens(engine: Any, prompt: list[int], steps: int = STEPS) -> list[int]:
    session, logits = engine.prefill(prompt)
    tokens = []
    for _ in range(steps):
        tokens.append(int(logits.argmax()))
        logits = engine.step([session], tokens[-1:])[0]
    engine.close_session(session)
    return tokens


def _decode(engine: Any, session: Any, tokens: list[int]) -> None:
    for token in tokens:
        engine.step([session], [token])


CASES = [
    pytest.param({"policy": "full"}, {"policy": "full"}, id="full"),
    pytest.param({"policy": "none", "retriever": "exact"}, {"policy": "none", "retriever": "exact"}, id="none-exact"),
    pytest.param({"policy": "qsac", "retriever": "exact"}, {"policy": "qsac", "retriever": "exact"}, id="qsac-exact"),
    pytest.param(
        {"policy": "none", "retriever": "hash", "order": "token"},
        {"policy": "none", "retriever": "hash"},
        id="none-hash",
    ),
    pytest.param(
        {"policy": "qsac", "retriever": "hash", "order": "token"},
        {"policy": "qsac", "retriever": "hash"},
        id="qsac-hash",
    ),
    pytest.param(
        {"policy": "qsac", "retriever": "exact", "eta": 0.2},
        {"policy": "qsac", "retriever": "exact", "eta": 0.2},
        id="qsac-mixed",
    ),
    pytest.param(
        {"policy": "qsac", "retriever": "exact", "eta": -1.0},
        {"policy": "qsac", "retriever": "exact", "eta": -1.0},
        id="qsac-all-hit",
    ),
]


@pytest.mark.parametrize("faults", [{}, DELAYS], ids=["plain", "delayed"])
@pytest.mark.parametrize(("ours", "theirs"), CASES)
def test_tokens_equal_the_oracle(
    engine: EngineFactory, daemon: Daemon, checkpoint: Path, ours: dict, theirs: dict, faults: dict
) -> None:
    seed = 11
    prompt = random_ids(1400, seed)
    daemon.set_faults(**faults)
    oracle = Oracle(checkpoint, storage="float32", budget=0.1, **theirs)
    expected = oracle.generate(prompt, STEPS)
    assert engine_tokens(engine(budget=0.1, **ours), prompt) == expected, f"seed {seed}"


@pytest.mark.parametrize(("ours", "theirs"), CASES[1:3])
def test_a_stopped_copy_engine_fails_every_equivalence(
    engine: EngineFactory, daemon: Daemon, ours: dict, theirs: dict
) -> None:
    """The equivalences above measure the daemon: without its copies there is no answer."""
    worker = engine(budget=0.1, wait_ms=300, **ours)
    session, _ = worker.prefill(random_ids(1400, 11))
    daemon.set_faults(stopped=True)
    with pytest.raises(_native.RingTimeout):
        _decode(worker, session, random_ids(STEPS, 12))


def test_permanent_misses_with_k_of_everything_equal_full_attention(engine: EngineFactory, checkpoint: Path) -> None:
    prompt = random_ids(1100, 3)
    expected = Oracle(checkpoint, policy="full").generate(prompt, STEPS)
    tokens = engine_tokens(engine(policy="none", retriever="exact", budget=1.0), prompt)
    assert tokens == expected


def test_attached_session_equals_the_oracle(engine: EngineFactory, checkpoint: Path) -> None:
    document, question = random_ids(1536, 21), random_ids(6, 22)
    worker = engine(policy="qsac", retriever="exact", budget=0.1, eta=0.5)
    session, _ = worker.prefill(document)
    worker.close_session(session)
    oracle = Oracle(checkpoint, policy="qsac", retriever="exact", budget=0.1, eta=0.5)
    expected = oracle.greedy(oracle.attach(document, question), 12)

    session, rest = worker.attach([*document, *question])
    assert rest == question, "every whole pack is attached and nothing else"
    for token in rest:
        logits = worker.step([session], [token])
    tokens = [int(logits[0].argmax())]
    while len(tokens) < 12:
        tokens.append(int(worker.step([session], tokens[-1:])[0].argmax()))
    assert tokens == expected


def test_sealing_equals_the_oracle(engine: EngineFactory, checkpoint: Path) -> None:
    """Long enough to seal twice: the tail becomes packs, and selection goes on over them."""
    prompt, steps = random_ids(600, 31), 640
    oracle = Oracle(checkpoint, policy="qsac", retriever="exact", budget=96, eta=0.5)
    expected = oracle.generate(prompt, steps)
    worker = engine(policy="qsac", retriever="exact", budget=96, eta=0.5, order="token")
    session, logits = worker.prefill(prompt)
    tokens = []
    for _ in range(steps):
        tokens.append(int(logits.argmax()))
        logits = worker.step([session], tokens[-1:])[0]
    assert len(session.packs) > 2, "the tail was sealed"
    assert tokens == expected


def test_slots_decode_side_by_side_as_alone(engine: EngineFactory, checkpoint: Path) -> None:
    """Several slots of different lengths in one batch, one of them reused."""
    prompts = [random_ids(1100, 41), random_ids(800, 42), random_ids(1400, 43)]
    expected = []
    for prompt in prompts:
        oracle = Oracle(checkpoint, policy="qsac", retriever="exact", budget=0.1, eta=0.5)
        expected.append(oracle.generate(prompt, 10))
    worker = engine(policy="qsac", retriever="exact", budget=0.1, eta=0.5, slots=2)
    first, logits_a = worker.prefill(prompts[0])
    second, logits_b = worker.prefill(prompts[1])
    tokens: list[list[int]] = [[int(logits_a.argmax())], [int(logits_b.argmax())]]
    for _ in range(9):
        logits = worker.step([first, second], [tokens[0][-1], tokens[1][-1]])
        for row in range(2):
            tokens[row].append(int(logits[row].argmax()))
    worker.close_session(first)
    assert tokens == expected[:2]
    assert engine_tokens(worker, prompts[2], 10) == expected[2], "a reused slot inherits nothing"
