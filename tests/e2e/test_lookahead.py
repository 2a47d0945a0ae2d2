"""Whoever looks ahead decodes the same tokens, bit for bit, and what it hints is read before it is wanted."""

import pytest
import torch

from kvstore_service.client import AdminClient
from tests.support.daemon_process import Daemon

from .conftest import DaemonFactory, EngineFactory, random_ids

PROMPT, STEPS = 1400, 40
POLICY = {"policy": "qsac", "retriever": "hash", "eta": 0.2, "budget": 0.1}


def warm_bytes(daemon: Daemon) -> int:
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        return admin.get_status().counters["warm_bytes"]


def logits_of(engine: EngineFactory, prompt: list[int], **settings: str) -> tuple[torch.Tensor, int, int]:
    """Of every step, and how many records were hinted, and not taken."""
    worker = engine(**POLICY, **settings)
    session, logits = worker.prefill(prompt)
    rows = [logits]
    for _ in range(STEPS):
        rows.append(worker.step([session], [int(rows[-1].argmax())])[0])
    worker.close_session(session)
    counters = worker.policy.counters
    return torch.stack(rows), counters.hinted, counters.hints_dropped


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("lookahead", ["next", "1", "8"])
def test_lookahead_changes_no_logit(engine: EngineFactory, daemon: Daemon, kernels: str, lookahead: str) -> None:
    prompt = random_ids(PROMPT, 13)
    off, none, _ = logits_of(engine, prompt, kernels=kernels)
    on, hinted, dropped = logits_of(engine, prompt, kernels=kernels, lookahead=lookahead)
    assert torch.equal(on, off)
    assert none == 0
    assert hinted > dropped >= 0


def test_what_is_hinted_is_read_ahead(start_daemon: DaemonFactory, engine: EngineFactory, daemon: Daemon) -> None:
    prompt = random_ids(PROMPT, 13)
    logits_of(engine, prompt)
    before = warm_bytes(daemon)
    logits_of(engine, prompt, lookahead="next")
    assert warm_bytes(daemon) > before
