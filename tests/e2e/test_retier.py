"""Sessions decode behind packs that were rewritten as behind those before, whatever kind their records are."""

from contextlib import closing
from pathlib import Path

import pytest
import torch

from decode_worker.engine.engine import Engine
from kvstore_service.client import AdminClient
from tests.support.daemon_process import Daemon

from .conftest import PACK_TOKENS, joined, random_ids

PROMPT = random_ids(2 * PACK_TOKENS + 1, 11)
QUESTIONS = [random_ids(2, seed) for seed in (12, 13)]
OPTIONS = (
    "--nvme-bytes=1GiB", "--copy-threads=1", f"--pack-tokens={PACK_TOKENS}",
    "--lease-s=0", "--learn-bytes=16MiB", "--disk-cost=15,0.4,2.5",
)  # fmt: skip


def answered(engine: Engine, question: list[int]) -> torch.Tensor:
    """Logits behind each token of a question about what is stored of the prompt."""
    session, rest = engine.attach(PROMPT)
    assert session.stored == 2 * PACK_TOKENS
    rows = [engine.step([session], [token])[0] for token in [*rest, *question]]
    engine.close_session(session)
    return torch.stack(rows[len(rest) :])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["model", "int8", "int4"])
def test_answers_behind_rewritten_packs_are_those_behind_the_packs_before(
    tmp_path: Path, checkpoint: Path, kind: str
) -> None:
    settings = {"policy": "qsac", "storage": "bfloat16", "record_kind": kind, "layer0": "offloaded", "budget": 0.03}
    with Daemon(tmp_path, "4MiB", options=OPTIONS, faulty=True) as daemon:
        with joined(daemon, checkpoint, **settings) as engine:
            session, _ = engine.prefill(PROMPT)
            packs = [pack.ref for pack in session.packs]
            engine.close_session(session)
            before = [answered(engine, question) for question in QUESTIONS]
            for _ in range(12):
                assert torch.equal(answered(engine, QUESTIONS[0]), before[0])
            with closing(AdminClient.connect(daemon.socket, daemon.broker)) as admin:
                rewritten = list(admin.retier([ref.pack_id for ref in packs]))
                assert [(answer.code, answer.message) for answer in rewritten] == [(0, "")] * len(packs)
                assert {pack.build for pack in admin.list_packs()}.isdisjoint(ref.build for ref in packs)
            for question, expected in zip(QUESTIONS, before, strict=True):
                torch.testing.assert_close(answered(engine, question), expected, rtol=1e-4, atol=1e-4)
        daemon.restart()
        with joined(daemon, checkpoint, **settings) as engine:
            for question, expected in zip(QUESTIONS, before, strict=True):
                torch.testing.assert_close(answered(engine, question), expected, rtol=1e-4, atol=1e-4)
