"""What comes between a rewrite's beginning and its swap, and what a failed swap leaves; in one process."""

import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from kvstore_service.daemon.disk import learnt_order
from kvstore_service.daemon.disk.catalog import Catalog
from kvstore_service.daemon.store import room
from kvstore_service.daemon.store.retier import Retier, Retiered
from kvstore_service.shared.types import LEARNT, PackReservation, PackRow
from tests.crash.power.node import Node, config_of
from tests.support.world import LAYOUT, TOKENS, candidate, digest

NVME_BYTES, DRAM_BYTES = 64 << 20, 16 << 20


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """With one pack, number 0, of which much is known."""
    running = Node(config_of(tmp_path / "data", NVME_BYTES, DRAM_BYTES))
    session = running.open()
    (reserved,) = running.store.packs.reserve(running.peer, session, [PackReservation(0, TOKENS, digest(0))])
    assert reserved.upload_id is not None
    running.worker.store(reserved.upload_id, 0)
    running.store.packs.commit(running.peer, session, [reserved.upload_id])
    running.close_session(session)
    running.use(running.stored(0))
    yield running
    running.close()


def row_of(node: Node) -> PackRow:
    row = node.row(0)
    assert row is not None
    return row


def files(node: Node) -> set[str]:
    return {path.name for path in node.catalog.packs_dir.iterdir()}


def before_the_swap(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    swap = Retier._swap

    def late(self: Retier, *arguments: object) -> None:
        act()
        swap(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Retier, "_swap", late)


def served_and_whole(node: Node) -> None:
    rows = node.stored(0)
    session, epoch = node.attach(rows)
    node.compare([0], epoch, Random(1))
    node.close_session(session)
    assert [node.store.operation.verify(row) for row in rows] == [([], "")]
    assert [check for check in node.store.operation.audit() if not check.ok] == []


def refused(found: Retiered, code: str) -> None:
    assert found.error is not None
    assert found.error.code == code, found.error
    assert found.bytes == 0


def test_an_eviction_that_comes_first_wins(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    row = row_of(node)
    before_the_swap(monkeypatch, lambda: list(node.store.operation.evict([row.ref.pack_id])))
    refused(node.store.operation.retier(row, False), "ABORTED")
    assert files(node) == set()
    assert [check for check in node.store.operation.audit() if not check.ok] == []


def test_a_session_that_attaches_first_keeps_its_build(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    row = row_of(node)
    sessions = []
    before_the_swap(monkeypatch, lambda: sessions.append(node.attach([row])))
    refused(node.store.operation.retier(row, False), "FAILED_PRECONDITION")
    ((session, epoch),) = sessions
    node.compare([0], epoch, Random(1))
    node.close_session(session)
    assert files(node) == {row.file}
    served_and_whole(node)


def test_a_pin_that_comes_first_holds_the_build(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    row = row_of(node)
    before_the_swap(monkeypatch, lambda: node.store.operation.pin([row.ref.pack_id], True))
    refused(node.store.operation.retier(row, False), "FAILED_PRECONDITION")
    assert files(node) == {row.file}


def test_damage_that_is_met_first_leaves_the_pack_alone(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    row = row_of(node)
    before_the_swap(monkeypatch, lambda: node.catalog.mark_damaged(row, "a test"))
    refused(node.store.operation.retier(row, False), "ABORTED")
    assert files(node) == {row.file}


@pytest.mark.parametrize("committed", [True, False])
def test_an_unknown_outcome_leaves_both_files_to_the_next_start(
    node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, committed: bool
) -> None:
    """Whichever of them the row then names."""
    row = row_of(node)
    replace_pack = Catalog.replace_pack

    def failing(self: Catalog, *arguments: object) -> None:
        if committed:
            with monkeypatch.context() as during:  # as where the stamp cannot be written
                during.setattr(Catalog, "remove_files", lambda *_: None)
                replace_pack(self, *arguments)  # type: ignore[arg-type]
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(Catalog, "replace_pack", failing)
    refused(node.store.operation.retier(row, False), "UNAVAILABLE")
    assert len(files(node)) == 2
    assert node.store.state.room.bounds()[0].promised_bytes == 0
    monkeypatch.undo()
    node.close()
    again = Node(config_of(tmp_path / "data", NVME_BYTES, DRAM_BYTES))
    try:
        now = row_of(again)
        assert (now.ref.build != row.ref.build, now.record_order == LEARNT) == (committed, committed)
        assert files(again) == {now.file}
        served_and_whole(again)
    finally:
        again.close()
        node.close = lambda: None  # type: ignore[method-assign]


def test_what_nobody_expected_is_told_and_logged(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The chore asks nobody for its outcome, and an operator's other packs are not to suffer for one."""
    row = row_of(node)

    def failing(*_: object) -> None:
        raise MemoryError("no memory for samples")

    monkeypatch.setattr(learnt_order, "learn", failing)
    refused(node.store.operation.retier(row, False), "INTERNAL")
    assert any("no memory for samples" in str(vars(record).get("fields")) for record in caplog.records)
    assert files(node) == {row.file}
    monkeypatch.undo()
    assert node.store.operation.retier(row, False).error is None


def test_a_full_disk_is_left_as_it_was(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    row = row_of(node)
    monkeypatch.setattr(room, "free_bytes", lambda _: row.file_bytes - 1)
    refused(node.store.operation.retier(row, False), "RESOURCE_EXHAUSTED")
    assert files(node) == {row.file}
    monkeypatch.undo()
    assert node.store.operation.retier(row, False).error is None
    served_and_whole(node)


def test_a_lookup_waits_for_a_swap_and_names_the_new_build(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    row = row_of(node)
    replace_pack = Catalog.replace_pack
    swapping, go_on = threading.Event(), threading.Event()

    def slow(self: Catalog, *arguments: object) -> None:
        swapping.set()
        assert go_on.wait(20)
        replace_pack(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Catalog, "replace_pack", slow)
    asking = threading.Thread(target=node.store.operation.retier, args=(row, False))
    asking.start()
    assert swapping.wait(20)
    threading.Timer(0.3, go_on.set).start()  # longer than an eviction takes
    (found,) = node.store.prefixes.lookup(node.peer, LAYOUT.fingerprint, [candidate(0)])
    asking.join(20)
    assert found == row_of(node).ref
    assert found.build != row.ref.build


def test_the_daemons_end_ends_a_rewrite(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    row = row_of(node)
    node.store.retier._bytes_per_s = 1 << 20
    found: list[Retiered] = []
    asking = threading.Thread(target=lambda: found.append(node.store.operation.retier(row, False)))
    asking.start()
    while len(files(node)) < 2 and asking.is_alive():
        pass
    node.store.retier.close()
    asking.join(20)
    refused(found[0], "UNAVAILABLE")
    assert files(node) == {row.file}
