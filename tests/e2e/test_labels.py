"""Labels that survive a session: whoever attaches its packs starts with them, if they are its own kind, and else as if
there were none."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from decode_worker.engine.engine import Engine
from decode_worker.engine.session import Session
from decode_worker.labels import KIND
from kvstore_service.client import AdminClient, StoreError
from kvstore_service.shared import index_file
from tests.support.daemon_process import Daemon

from .conftest import LAYERS, EngineFactory, greedy, joined, random_ids

DOCUMENT, QUESTION = 1024, 5
IDS = random_ids(DOCUMENT + QUESTION, 71)
SETTINGS = {"policy": "qsac", "labels": "kept"}


def labels_of(engine: Engine, session: Session) -> torch.Tensor:
    """float32[layers - 1, H, g, d]: of all layers but the first, which is resident."""
    labels = engine.policy.labels(session.slot)
    assert labels is not None
    return labels[1:].clone()


def sets_of(engine: Engine, session: Session) -> list[list[int]]:
    """The record ids that each head has, by layer and head."""
    state = engine.policy.state
    found = []
    for layer, head in itertools.product(range(1, LAYERS), range(engine.model.config.kv_heads)):
        side = state.side(layer, session.slot, head)
        found.append(sorted(state.held[side][: int(state.held_count[side])].tolist()))
    return found


def asked(engine: Engine, ids: list[int] = IDS) -> tuple[torch.Tensor, torch.Tensor, list[list[int]], int]:
    """Attaches and processes what is left of `ids`: (logits of each step, labels and sets after the last one, records
    that the first step moved)."""
    session, rest = engine.attach(ids)
    moved = engine.policy.counters.records_moved
    rows = [engine.step([session], rest[:1])[0]]
    moved = engine.policy.counters.records_moved - moved
    rows += [engine.step([session], [token])[0] for token in rest[1:]]
    found = torch.stack(rows), labels_of(engine, session), sets_of(engine, session), moved
    engine.close_session(session)
    return found


@pytest.fixture
def stored(daemon: Daemon, checkpoint: Path) -> Daemon:
    """A daemon with the document, whose session has left no labels."""
    with joined(daemon, checkpoint, labels="off") as engine:
        engine.close_session(engine.prefill(IDS[:DOCUMENT])[0])
    return daemon


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kind", "retriever", "query", "kernels"),
    [
        ("float32", "exact", "speculative", "reference"),
        ("bfloat16", "hash", "speculative", "cpu"),
        ("int8", "hash", "speculative", "cpu"),
        ("int4", "hash", "true", "cpu"),
    ],
)
def test_labels_and_what_they_select_come_back(
    daemon: Daemon, checkpoint: Path, kind: str, retriever: str, query: str, kernels: str
) -> None:
    records = {"storage": "bfloat16", "record_kind": kind} if kind.startswith("int") else {"storage": kind}
    settings = {**SETTINGS, **records, "retriever": retriever, "query": query, "kernels": kernels}
    with joined(daemon, checkpoint, **settings) as engine:
        session, logits = engine.prefill(IDS)
        greedy(engine, session, logits, 20)
        left = labels_of(engine, session)
        engine.close_session(session)
    with joined(daemon, checkpoint, **settings) as engine:
        session, _ = engine.attach(IDS)
        assert session.stored == DOCUMENT
        assert torch.equal(labels_of(engine, session), left)
        selected = engine.policy.settings.budgeted(DOCUMENT)
        limit = engine.policy.state.limit(session.slot, session.position)
        keys = itertools.product(range(1, LAYERS), range(engine.model.config.kv_heads))
        for (layer, head), records_of_head in zip(keys, sets_of(engine, session), strict=True):
            view, label = engine.policy.view(session.slot), left[layer - 1, head].numpy()
            expected = engine.retriever.select(layer, head, view, label, 4, limit, selected)
            overlap = len(set(records_of_head) & set(expected.tolist()))
            assert len(records_of_head) == selected
            assert overlap >= selected - (retriever == "exact"), f"layer {layer} head {head}: a tie at most"
        engine.close_session(session)


@pytest.mark.timeout(60)
def test_the_same_question_hits_at_its_first_step(stored: Daemon, checkpoint: Path) -> None:
    """Its first query is the label, bit for bit: so are its sets those of missing, and its logits."""
    ids = IDS[: DOCUMENT + 1]
    with joined(stored, checkpoint, **SETTINGS) as engine:
        logits, _, sets, moved = asked(engine, ids)
        assert moved > 0
    with joined(stored, checkpoint, **SETTINGS) as engine:
        again, _, same, moved = asked(engine, ids)
    assert moved == 0
    assert same == sets
    assert torch.equal(again, logits)


@pytest.mark.timeout(60)
def test_off_keeps_nothing_and_takes_nothing(stored: Daemon, checkpoint: Path) -> None:
    with joined(stored, checkpoint, **{**SETTINGS, "labels": "off"}) as engine:
        before = asked(engine)
    with AdminClient.connect(stored.socket, stored.broker) as admin:
        assert not any(KIND in pack.sidecars for pack in admin.list_packs())
    with joined(stored, checkpoint, **SETTINGS) as engine:
        asked(engine)
    with joined(stored, checkpoint, **{**SETTINGS, "labels": "off"}) as engine:
        after = asked(engine)
    assert after[3] == before[3] > 0
    assert torch.equal(after[0], before[0])


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "foreign",
    [
        {"budget": 0.2},
        {"eta": 0.5},
        {"query": "true"},
        {"policy": "infinigen"},
        {"policy": "full"},
        {"storage": "bfloat16"},
    ],
    ids=lambda foreign: next(iter(foreign.values())),
)
def test_labels_of_other_settings_are_not_taken(stored: Daemon, checkpoint: Path, foreign: dict[str, object]) -> None:
    with joined(stored, checkpoint, **SETTINGS) as engine:
        asked(engine)
    with joined(stored, checkpoint, **{**SETTINGS, **foreign}) as engine:
        session, _ = engine.attach(IDS)
        assert engine.policy.labels(session.slot) is None
        assert engine.labels.refused == 0
        engine.close_session(session)


def broken(labels: NDArray[np.float32], parameters: bytes, whole: bytes) -> dict[str, bytes]:
    endless = labels.copy()
    endless[-1, -1, -1, -1] = np.inf
    return {
        "nothing": b"",
        "noise": np.random.default_rng(3).bytes(len(whole)),
        "cut": whole[:-7],
        "a flipped bit": whole[:200] + bytes([whole[200] ^ 1]) + whole[201:],
        "no numbers": index_file.save(parameters, np.full_like(labels, np.nan)),
        "endless": index_file.save(parameters, endless),
        "short": index_file.save(parameters, labels[:-1]),
        "other heads": index_file.save(parameters, labels[:, :1]),
        "flat": index_file.save(parameters, labels.reshape(-1)),
        "doubles": index_file.save(parameters, labels.astype(np.float64)),
        "bytes": index_file.save(parameters, np.zeros(labels.nbytes, np.uint8)),
        "another's": index_file.save(bytes(32), labels),
    }


@pytest.mark.timeout(120)
def test_what_cannot_be_labels_is_refused(stored: Daemon, checkpoint: Path) -> None:
    with joined(stored, checkpoint, **{**SETTINGS, "labels": "off"}) as engine:
        without = asked(engine)
    with joined(stored, checkpoint, **SETTINGS) as engine:
        session, rest = engine.attach(IDS)
        engine.step([session], rest[:1])
        ref = session.packs[-1].ref
        engine.close_session(session)
        key = engine.labels._key(ref)
        whole = engine.client.get_sidecar(key)
        assert whole is not None
        parameters, labels = index_file.load(whole)
        for number, (name, content) in enumerate(broken(labels, parameters, whole).items(), 1):
            engine.client.put_sidecar(key, content, replace=True)
            session, rest = engine.attach(IDS)
            assert engine.policy.labels(session.slot) is None, name
            assert engine.labels.refused == number, name
            if number == 1:
                rows = [engine.step([session], [token])[0] for token in rest]
                assert torch.equal(torch.stack(rows), without[0])
            engine.give_up(session, RuntimeError("its labels would take the place of the broken ones"))
        engine.client.put_sidecar(key, whole, replace=True)
        session, _ = engine.attach(IDS)
        assert engine.policy.labels(session.slot) is not None


@pytest.mark.timeout(60)
def test_huge_labels_are_a_miss(stored: Daemon, checkpoint: Path) -> None:
    """Finite, but their norms are not."""
    with joined(stored, checkpoint, **{**SETTINGS, "labels": "off"}) as engine:
        without = asked(engine)
    with joined(stored, checkpoint, **SETTINGS) as engine:
        asked(engine)
        session, _ = engine.attach(IDS)
        key, shape = engine.labels._key(session.packs[-1].ref), engine.policy.state.label.shape
        engine.give_up(session, RuntimeError("never used"))
        huge = np.full((shape[1], *shape[3:]), np.finfo(np.float32).max, np.float32)
        engine.client.put_sidecar(key, index_file.save(key.parameters, huge), replace=True)
        logits, _, sets, moved = asked(engine)
    assert moved > 0
    torch.testing.assert_close(logits, without[0], atol=1e-4, rtol=1e-4)
    assert sets == without[2]


@pytest.mark.timeout(60)
def test_labels_go_with_their_pack(stored: Daemon, checkpoint: Path) -> None:
    with joined(stored, checkpoint, **SETTINGS) as engine:
        asked(engine)
        session, _ = engine.attach(IDS)
        last = session.packs[-1].ref
        engine.close_session(session)
        with AdminClient.connect(stored.socket, stored.broker) as admin:
            admin.evict([last.pack_id])
            assert not any(KIND in pack.sidecars for pack in admin.list_packs())
        session, _ = engine.attach(IDS)
        assert 0 < session.stored < DOCUMENT
        assert engine.policy.labels(session.slot) is None
        engine.close_session(session)


@pytest.mark.timeout(60)
def test_the_latest_of_two_sessions_leaves_its_labels(stored: Daemon, checkpoint: Path) -> None:
    with joined(stored, checkpoint, slots=2, **SETTINGS) as engine:
        sessions = [engine.attach(IDS)[0] for _ in range(2)]
        engine.step(sessions, [1, 2])
        left = [labels_of(engine, session) for session in sessions]
        assert not torch.equal(*left)
        for session, labels in zip(sessions, left, strict=True):
            engine.close_session(session)
            other, _ = engine.attach(IDS)
            assert torch.equal(labels_of(engine, other), labels)
            engine.give_up(other, RuntimeError("it has nothing to leave"))
    assert len([path for path in (stored.data_dir / "sidecars").iterdir() if path.suffix != ".sidecar"]) == 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("end", ["kill", "stop"])
def test_labels_outlive_their_daemon(stored: Daemon, checkpoint: Path, end: str) -> None:
    with joined(stored, checkpoint, **SETTINGS) as engine:
        _, left, _, _ = asked(engine)
        getattr(stored, end)()
    stored.restart()
    with joined(stored, checkpoint, **SETTINGS) as engine:
        session, _ = engine.attach(IDS)
        assert torch.equal(labels_of(engine, session), left)


@pytest.mark.timeout(60)
def test_a_store_that_takes_no_labels_ends_the_session_all_the_same(stored: Daemon, checkpoint: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise StoreError("RESOURCE_EXHAUSTED", "the store is full", 1.0)

    with joined(stored, checkpoint, **SETTINGS) as engine:
        engine.client.put_sidecar = refuse  # type: ignore[method-assign]
        asked(engine)
        assert engine.labels.refused == 1
        assert engine.free_slots == 1


@pytest.mark.timeout(90)
def test_a_tail_that_was_sealed_has_the_labels(engine: EngineFactory) -> None:
    """Also if its session had not gone on with it when it ended."""
    worker = engine(**SETTINGS)
    session, logits = worker.prefill(IDS)
    for _ in range(330):
        logits = worker.step([session], [int(logits.argmax())])[0]
        if session.sealing is not None:
            session.sealing.finish()
            break
    assert session.stored == DOCUMENT
    conversation, left = [*session.tokens, 0], labels_of(worker, session)
    worker.close_session(session)
    other, _ = worker.attach(conversation)
    assert other.stored == DOCUMENT + 256
    assert torch.equal(labels_of(worker, other), left)
