"""A worker whose tickets several copy threads share decodes as one whose tickets one thread serves."""

import pytest
import torch

from decode_worker import _native
from decode_worker.model.sampling import Sampling
from kvstore_service.client import AdminClient, StoreError
from tests.support.daemon_process import Daemon

from .conftest import PACK_TOKENS, EngineFactory, random_ids
from .pack_files import packs_by_id

STEPS = 12
POLICY = {"policy": "qsac", "retriever": "hash", "eta": 0.2, "budget": 0.3, "layer0": "offloaded"}


def tickets(daemon: Daemon) -> int:
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        return admin.get_status().counters["tickets"]


def decoded(engine: EngineFactory, prompts: list[list[int]], **settings: object) -> tuple[torch.Tensor, object]:
    """Logits of all steps [steps, sessions, vocab], of sessions side by side; what they count."""
    worker = engine(**POLICY, slots=len(prompts), **settings)
    sessions, last = zip(*(worker.prefill(prompt) for prompt in prompts), strict=True)
    rows = [torch.stack(last)]
    for _ in range(STEPS):
        rows.append(worker.step(sessions, rows[-1].argmax(-1).tolist()))
    for session in sessions:
        worker.close_session(session)
    return torch.stack(rows), worker.policy.counters


@pytest.mark.parametrize("lookahead", ["off", "next"])
def test_how_many_rings_share_a_ticket_changes_nothing(engine: EngineFactory, daemon: Daemon, lookahead: str) -> None:
    prompts = [random_ids(tokens, tokens) for tokens in (1400, 700)]
    before = tickets(daemon)
    logits, counters = decoded(engine, prompts, lookahead=lookahead)
    one = tickets(daemon) - before
    for rings in (2, 5):
        before = tickets(daemon)
        again, counted = decoded(engine, prompts, lookahead=lookahead, decode_rings=rings)
        assert torch.equal(again, logits)
        assert counted == counters
        assert tickets(daemon) - before > one


def test_a_run_that_fails_is_its_session_s_whichever_ring_carried_it(daemon: Daemon, engine: EngineFactory) -> None:
    prompts = [random_ids(3 * PACK_TOKENS + 1, seed) for seed in (1, 2)]
    worker = engine(**POLICY, slots=2, decode_rings=4)
    whose = []
    for prompt in prompts:
        session, _ = worker.prefill(prompt)
        whose.append([pack.ref.pack_id for pack in session.packs])
        worker.close_session(session)
    daemon.stop()
    files = packs_by_id(daemon.data_dir)
    second = files[whose[1][1]]  # of the other session, and none that binding reads
    for record in range(0, PACK_TOKENS, 8):
        second.flip(second.offset(3, 1, record))
    daemon.start()
    worker = engine(**POLICY, slots=2, decode_rings=4)
    sessions = [worker.attach(prompt)[0] for prompt in prompts]
    assert [session.stored for session in sessions] == [3 * PACK_TOKENS] * 2
    _, faults = worker.advance(sessions, [prompt[-1] for prompt in prompts], [Sampling()] * 2)
    assert faults[0] is None
    assert isinstance(faults[1], StoreError)
    assert faults[1].code == "DATA_LOSS"


def test_a_ring_that_is_poisoned_ends_the_worker(engine: EngineFactory) -> None:
    worker = engine(**POLICY, decode_rings=3)
    session, _ = worker.prefill(random_ids(1400, 1))
    worker.transport.more_decode[1].poison()
    assert worker.transport.poisoned
    with pytest.raises(_native.RingPoisoned):
        worker.step([session], [1])


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_kernels_that_post_to_one_ring_refuse_more(engine: EngineFactory, kernels: str) -> None:
    with pytest.raises(ValueError, match="give --decode-rings 1 or --kernels cpu"):
        engine(kernels=kernels, decode_rings=2)
