"""Packs of quantised records: both kernel sets agree over them, near what unquantised ones give, and nobody who did not
ask for them gets them."""

from pathlib import Path

import pytest
import torch

from decode_worker.engine import prefill
from decode_worker.kernels.cpu import CpuKernels
from kvstore_service.client import PackRef, StoreError
from tests.support.daemon_process import Daemon

from .conftest import DaemonFactory, EngineFactory, greedy, joined, random_ids
from .pack_files import packs_by_id

CHUNK = 512
PROMPT = random_ids(2 * CHUNK + 200, 5)
KINDS = {"int8": 1 / 2, "int4": 1 / 4}  # bytes beside bfloat16's
QUANTISED = {"policy": "qsac", "storage": "bfloat16", "budget": 0.3}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "CHUNK_TOKENS", CHUNK)


def logits_of(engine: EngineFactory, **settings: object) -> torch.Tensor:
    """After the prompt and a few steps behind it, whose packs the first engine of a kind has stored."""
    worker = engine(**{**QUANTISED, **settings})
    session, first = worker.prefill(PROMPT)
    rows = [first, *(worker.step([session], [token])[0] for token in PROMPT[:6])]
    worker.close_session(session)
    return torch.stack(rows)


def divergence(expected: torch.Tensor, got: torch.Tensor) -> float:
    return float((expected.softmax(1) * (expected.log_softmax(1) - got.log_softmax(1))).sum(1).max())


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "near"), [("int8", 0.01), ("int4", 0.5)])
def test_sets_agree_near_what_unquantised_records_give(engine: EngineFactory, kind: str, near: float) -> None:
    full = {"policy": "full", "layer0": "offloaded"}
    plain = logits_of(engine, **full)
    cpu = logits_of(engine, record_kind=kind)
    torch.testing.assert_close(logits_of(engine, record_kind=kind, kernels="reference"), cpu, atol=2e-3, rtol=1e-3)
    resident = logits_of(engine, record_kind=kind, **full)
    assert 0 < divergence(plain, resident) < near


@pytest.mark.timeout(120)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_behind_a_stored_prefix_are_those_of_computing_it(
    engine: EngineFactory, kind: str, compute: str
) -> None:
    worker = engine(**QUANTISED, record_kind=kind, compute=compute)
    computed = worker.compute_only(PROMPT)
    for reused in (0, 2 * CHUNK):
        session, logits = worker.prefill(PROMPT)
        assert session.reused == reused
        assert torch.equal(logits, computed)
        worker.close_session(session)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_share_no_pack(daemon: Daemon, engine: EngineFactory, kind: str) -> None:
    plain, small = engine(**QUANTISED), engine(**QUANTISED, record_kind=kind)
    packs: dict[str, list[PackRef]] = {}
    for worker, name in ((plain, "model"), (small, kind)):
        session, _ = worker.prefill(PROMPT)
        assert session.reused == 0, "packs of the other kind were taken"
        packs[name] = [pack.ref for pack in session.packs]
        worker.close_session(session)
    files = packs_by_id(daemon.data_dir)
    assert {files[ref.pack_id].record_bytes for ref in packs["model"]} == {256}
    assert {files[ref.pack_id].record_bytes for ref in packs[kind]} == {256 * KINDS[kind]}
    session_id = plain.client.open_session(plain.layout, 4096)
    with pytest.raises(StoreError, match="another layout"):
        plain.client.attach_packs(session_id, packs[kind])
    plain.client.close_session(session_id)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_seals_and_packs_outlive_the_daemon(start_daemon: DaemonFactory, checkpoint: Path, kind: str) -> None:
    daemon = start_daemon()
    settings = {**QUANTISED, "record_kind": kind, "recent": 16}
    with joined(daemon, checkpoint, **settings) as worker:
        session, logits = worker.prefill(PROMPT[: CHUNK + 250])
        stored = session.stored
        tokens = greedy(worker, session, logits, 420)
        assert session.stored > stored, "nothing was sealed"
        text, last = list(session.tokens), worker.step([session], [1])[0]
        worker.close_session(session)
    daemon.restart()
    with joined(daemon, checkpoint, **settings) as worker:
        session, rest = worker.attach(text)
        assert session.stored > stored
        assert text[-len(tokens) :] == tokens
        for token in [*rest, 1]:
            logits = worker.step([session], [token])[0]
        assert divergence(last[None], logits[None]) < 1.0


@pytest.mark.timeout(60)
def test_kernels_that_cannot_mix_kinds_refuse_them(engine: EngineFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuKernels, "mixes", False)
    with pytest.raises(ValueError, match="record_kind: these kernels"):
        engine(**QUANTISED, record_kind="int8")
    engine(**QUANTISED)
