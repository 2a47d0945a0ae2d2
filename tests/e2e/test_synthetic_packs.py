"""Packs with random K and V: as whole as others, also where a store or another retriever comes in between."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decode_worker.engine.engine import Engine
from decode_worker.synthetic.packs import inject_packs
from kvstore_service.client import AdminClient, StoreError
from tests.support.daemon_process import Daemon

from .conftest import PACK_TOKENS, joined, random_ids

IDS = random_ids(2 * PACK_TOKENS + 1, 90)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("first", ["pack", "token"])
def test_packs_that_another_retriever_has_indexed_keep_their_order(
    daemon: Daemon, checkpoint: Path, first: str
) -> None:
    """The index of what is stored already lies over the stored records."""
    with joined(daemon, checkpoint, retriever="hash", order=first) as engine:
        inject_packs(engine, IDS, 1)
    with joined(daemon, checkpoint, retriever="exact", order="pack") as engine:
        inject_packs(engine, IDS, 1)
        session, rest = engine.attach(IDS)
        assert (session.stored, len(rest)) == (2 * PACK_TOKENS, 1)
        for pack in session.packs:
            np.testing.assert_array_equal(pack.order, engine.client.get_map(pack.ref))


@pytest.mark.timeout(120)
def test_a_store_that_fails_leaves_no_upload(daemon: Daemon, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with joined(daemon, checkpoint) as engine, AdminClient.connect(daemon.socket, daemon.broker) as admin:
        left: list[int] = []
        fail_and_count(engine, admin, left, monkeypatch)
        with pytest.raises(StoreError, match="no further"):
            inject_packs(engine, IDS, 1)
        assert left == [0], "before its session is closed"


def fail_and_count(engine: Engine, admin: AdminClient, left: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits fail; `left` gets how many uploads are open when the session is closed."""
    close = engine.client.close_session

    def commit(*_: Any, **__: Any) -> None:
        raise StoreError("INTERNAL", "no further")

    def counted(*arguments: Any, **named: Any) -> None:
        left.append(admin.get_status().counters["uploads_open"])
        close(*arguments, **named)

    monkeypatch.setattr(engine.client, "commit_pack", commit)
    monkeypatch.setattr(engine.client, "close_session", counted)
