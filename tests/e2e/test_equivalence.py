"""The whole system, real daemon, ring and NVMe included, decodes token by token as the NumPy oracle does."""

import numpy as np
import pytest

from decode_worker import _native
from decode_worker.engine.engine import Engine
from decode_worker.packing import ORDERS
from kvstore_service.client import AdminClient
from tests.support.daemon_process import Daemon

from .conftest import EngineFactory, Expected, greedy, random_ids

STEPS = 24
DELAYS = {"delay_us": 300, "delay_random": True, "reorder": True, "seed": 5}


def engine_tokens(engine: Engine, prompt: list[int], steps: int = STEPS) -> list[int]:
    session, logits = engine.prefill(prompt)
    tokens = greedy(engine, session, logits, steps)
    engine.close_session(session)
    return tokens


# Records lie in clusters: which tokens a head attends to does not depend on it.
CASES = {
    "full": {"policy": "full"},
    **{
        f"{policy}-{retriever}": {"policy": policy, "retriever": retriever}
        for policy in ("infinigen", "litecache", "qsac")
        for retriever in ("exact", "hash")
    },
    "qsac-mixed": {"policy": "qsac", "retriever": "exact", "eta": 0.2},
    "qsac-all-hit": {"policy": "qsac", "retriever": "exact", "eta": -1.0},
}


@pytest.mark.parametrize("faults", [{}, DELAYS], ids=["plain", "delayed"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_tokens_equal_the_oracle(
    engine: EngineFactory, daemon: Daemon, expected: Expected, case: dict, faults: dict
) -> None:
    seed = 11
    print(f"seed {seed}")
    prompt = random_ids(1400, seed)
    daemon.set_faults(**faults)
    tokens = engine_tokens(engine(order="pack", **case), prompt)
    assert tokens == expected.tokens(prompt, STEPS, budget=0.1, **case)


@pytest.mark.parametrize("order", ORDERS.names)
def test_no_order_of_records_changes_a_token(
    engine: EngineFactory, daemon: Daemon, expected: Expected, order: str
) -> None:
    prompt, settings = random_ids(1400, 12), {"policy": "qsac", "retriever": "hash", "eta": 0.2}
    tokens = engine_tokens(engine(order=order, **settings), prompt, 8)
    assert tokens == expected.tokens(prompt, 8, budget=0.1, **settings)
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        assert {pack.record_order for pack in admin.list_packs()} == {order}


@pytest.mark.parametrize("retriever", ["exact", "hash"])
def test_units_of_records_equal_the_oracle(engine: EngineFactory, expected: Expected, retriever: str) -> None:
    """Which tokens lie in a unit is decided by the order of records, so the oracle is told."""
    prompt = random_ids(1400, 11)
    worker = engine(policy="lru", retriever=retriever)
    session, logits = worker.prefill(prompt)
    maps = np.concatenate([pack.order.astype(np.int64) + pack.first_token for pack in session.packs], axis=2)
    tokens = greedy(worker, session, logits, STEPS)
    oracle = expected.oracle(policy="lru", retriever=retriever, budget=0.1)
    assert tokens == oracle.greedy(oracle.prefill(prompt, maps), STEPS)
    assert any((np.diff(maps[layer, head]) != 1).any() for layer, head in oracle.heads.offloaded)


@pytest.mark.parametrize("policy", ["infinigen", "qsac"])
def test_reference_kernels_equal_the_oracle(engine: EngineFactory, expected: Expected, policy: str) -> None:
    prompt, settings = random_ids(1400, 11), {"policy": policy, "retriever": "hash", "eta": 0.2}
    tokens = engine_tokens(engine(kernels="reference", **settings), prompt, 8)
    assert tokens == expected.tokens(prompt, 8, budget=0.1, **settings)


@pytest.mark.parametrize("policy", ["infinigen", "qsac"])
def test_a_stopped_copy_engine_fails_every_equivalence(engine: EngineFactory, daemon: Daemon, policy: str) -> None:
    """The equivalences above measure the daemon: without its copies there is no answer."""
    worker = engine(policy=policy, wait_ms=300)
    session, logits = worker.prefill(random_ids(1400, 11))
    daemon.set_faults(stopped=True)
    with pytest.raises(_native.RingTimeout):
        greedy(worker, session, logits, STEPS)


def test_permanent_misses_with_k_of_everything_equal_full_attention(engine: EngineFactory, expected: Expected) -> None:
    prompt = random_ids(1400, 11)
    tokens = engine_tokens(engine(policy="infinigen", budget=1.0), prompt)
    assert tokens == expected.tokens(prompt, STEPS, budget=0.1, policy="full")


def test_attached_session_equals_the_oracle(engine: EngineFactory, expected: Expected) -> None:
    document, question = random_ids(1536, 21), random_ids(6, 22)
    worker = engine(policy="qsac", eta=0.5)
    session, _ = worker.prefill(document)
    worker.close_session(session)
    oracle = expected.oracle(policy="qsac", retriever="exact", budget=0.1, eta=0.5)
    wanted = oracle.greedy(oracle.attach(document, question), 12)

    session, rest = worker.attach([*document, *question])
    assert rest == question, "every whole pack is attached and nothing else"
    for token in rest:
        logits = worker.step([session], [token])
    assert greedy(worker, session, logits[0], 12) == wanted


def test_sealing_equals_the_oracle(engine: EngineFactory, expected: Expected) -> None:
    """Long enough to seal twice: the tail becomes packs, and selection goes on over them."""
    prompt, steps = random_ids(600, 31), 640
    worker = engine(policy="qsac", budget=96, eta=0.5, order="token")
    session, logits = worker.prefill(prompt)
    tokens = greedy(worker, session, logits, steps)
    assert len(session.packs) > 2, "the tail was sealed"
    assert tokens == expected.tokens(prompt, steps, policy="qsac", retriever="exact", budget=96, eta=0.5)


def test_slots_decode_side_by_side_as_alone(engine: EngineFactory, expected: Expected) -> None:
    """Several slots of different lengths in one batch, one of them reused."""
    prompts = [random_ids(1100, 41), random_ids(800, 42), random_ids(1400, 11)]
    settings = {"policy": "qsac", "retriever": "exact", "budget": 0.1, "eta": 0.5}
    wanted = [expected.tokens(prompt, 10, **settings) for prompt in prompts]
    worker = engine(slots=2, **settings)
    first, logits_a = worker.prefill(prompts[0])
    second, logits_b = worker.prefill(prompts[1])
    tokens: list[list[int]] = [[int(logits_a.argmax())], [int(logits_b.argmax())]]
    for _ in range(9):
        logits = worker.step([first, second], [tokens[0][-1], tokens[1][-1]])
        for row in range(2):
            tokens[row].append(int(logits[row].argmax()))
    worker.close_session(first)
    assert tokens == wanted[:2]
    assert engine_tokens(worker, prompts[2], 10) == wanted[2], "a reused slot inherits nothing"
