"""A full store makes room by itself: what is used least goes, and nothing that anybody holds."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest

from kvstore_service.client import (
    NO_PARENT,
    AdminClient,
    PackImportance,
    PackRef,
    SidecarKey,
    StoreClient,
    StoreError,
)
from kvstore_service.daemon.config import load
from kvstore_service.daemon.disk.catalog import Catalog
from kvstore_service.daemon.store import registry, room
from kvstore_service.daemon.store.prefixes import Prefixes
from kvstore_service.daemon.store.registry import Limits, Registry
from kvstore_service.daemon.store.room import Room
from kvstore_service.shared.types import PackRow
from tests.service.test_administration import chain
from tests.service.test_catalog import pack_row
from tests.support.daemon_process import Daemon
from tests.support.life import until
from tests.support.world import LANES, LAYERS, LAYOUT, TOKENS, TestWorker, candidate, expected, reservation

PACK_BYTES = 286_720  # of a pack of tests.support.world
RECORDS = np.arange(TOKENS, dtype=np.uint32)


@contextmanager
def store(directory: Path, packs: float, *options: str) -> Iterator[tuple[Daemon, TestWorker, AdminClient]]:
    """A daemon with room for so many packs, where what was found or written may go at once; and one worker."""
    bound = (f"--nvme-bytes={int(packs * PACK_BYTES)}", "--lease-s=0", "--copy-threads=1")
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(directory, options=(*bound, *options)))
        worker = TestWorker(stack.enter_context(StoreClient.connect(daemon.socket, daemon.broker)))
        stack.callback(worker.close)
        yield daemon, worker, stack.enter_context(AdminClient.connect(daemon.socket, daemon.broker))


def stored(worker: TestWorker, number: int) -> bool:
    """Looks it up, which is a use."""
    return bool(worker.client.lookup_prefix(LAYOUT.fingerprint, [candidate(number)]))


def write(worker: TestWorker, number: int) -> PackRef:
    session = worker.client.open_session(LAYOUT, 4096)
    pack = worker.commit(session, number)
    worker.client.close_session(session)
    return pack


def ids(admin: AdminClient) -> set[bytes]:
    return {pack.pack_id for pack in admin.list_packs()}


def test_what_was_used_least_goes_first(tmp_path: Path) -> None:
    with store(tmp_path, 6.5, "--evict-high=1", "--evict-low=1") as (_, worker, admin):
        packs = [write(worker, number) for number in range(1, 7)]
        assert stored(worker, 1)
        write(worker, 7)
        write(worker, 8)
        gone = {pack.pack_id for pack in packs} - ids(admin)
        assert gone == {packs[1].pack_id, packs[2].pack_id}
        counters = admin.get_status().counters
        assert (counters["packs_evicted_room"], counters["packs_evicted_operator"]) == (2, 0)
        assert [check for check in admin.audit() if not check.ok] == []


def test_a_chain_goes_from_its_end(tmp_path: Path) -> None:
    with store(tmp_path, 4.5, "--evict-high=1", "--evict-low=1") as (_, worker, admin):
        session = worker.client.open_session(LAYOUT, 4096)
        packs = chain(worker, session, [1, 2, 3, 4])
        worker.client.close_session(session)
        write(worker, 9)
        write(worker, 10)
        assert {pack.pack_id for pack in packs} & ids(admin) == {pack.pack_id for pack in packs[:2]}


def test_what_is_hinted_hot_stays_longer(tmp_path: Path) -> None:
    with store(tmp_path, 4.5, "--evict-high=1", "--evict-low=1") as (_, worker, admin):
        hot, *cold = [write(worker, number) for number in range(1, 5)]
        session = worker.client.open_session(LAYOUT, 4096)
        worker.client.hint_importance(session, [PackImportance(hot, np.full((LAYERS, LANES), TOKENS, np.uint32))])
        for number in (11, 12, 13):
            write(worker, number)
        assert hot.pack_id in ids(admin)
        assert not {pack.pack_id for pack in cold} & ids(admin)


def test_above_the_high_watermark_it_evicts_down_to_the_low_one(tmp_path: Path) -> None:
    with store(tmp_path, 10, "--evict-high=0.8", "--evict-low=0.4") as (_, worker, admin):
        for number in range(1, 9):
            write(worker, number)
        assert len(ids(admin)) == 8
        write(worker, 9)
        until(lambda: len(ids(admin)) == 4, "the low watermark")
        assert stored(worker, 9)


def held(worker: TestWorker, admin: AdminClient, how: str, pack: PackRef) -> Callable[[], None]:
    """Holds the pack; returns what lets go of it."""
    if how == "pin":
        admin.pin([pack.pack_id])
        return lambda: admin.unpin([pack.pack_id])
    session = worker.client.open_session(LAYOUT, 4096)
    if how == "upload":
        (upload,) = worker.client.reserve_pack(session, [reservation(100, 1, pack.pack_id)])
        assert upload.upload_id is not None
        upload_id = upload.upload_id
        return lambda: worker.client.abort_pack([upload_id])
    worker.client.attach_packs(session, [pack])
    if how == "bind":
        worker.client.bind_slot(session, 0, [pack], worker.windows(0))
    return lambda: worker.client.close_session(session)


@pytest.mark.parametrize("how", ["pin", "attach", "bind", "upload"])
def test_nothing_goes_that_anybody_holds(tmp_path: Path, how: str) -> None:
    with store(tmp_path, 5.9, "--evict-high=1", "--evict-low=1") as (_, worker, admin):
        pack = write(worker, 1)
        let_go = held(worker, admin, how, pack)
        for number in range(2, 10):
            write(worker, number)
        assert pack.pack_id in ids(admin)
        let_go()
        for number in range(10, 18):
            write(worker, number)
        assert pack.pack_id not in ids(admin)
        assert [check for check in admin.audit() if not check.ok] == []


def test_a_pin_ends_with_its_time(tmp_path: Path) -> None:
    with store(tmp_path, 4.5, "--evict-high=1", "--evict-low=1") as (_, worker, admin):
        pack = write(worker, 1)
        admin.pin([pack.pack_id], ttl_s=1.0)
        for number in range(2, 8):
            write(worker, number)
        assert pack.pack_id in ids(admin)
        until(lambda: not any(item.pinned for item in admin.list_packs()), "the pin ends")
        for number in range(8, 12):
            write(worker, number)
        assert pack.pack_id not in ids(admin)


def test_what_was_found_stays_until_it_is_attached(tmp_path: Path) -> None:
    with store(tmp_path, 4.5, "--evict-high=1", "--evict-low=1", "--lease-s=60") as (_, worker, admin):
        packs = [write(worker, number) for number in (1, 2, 3, 4)]
        assert all(stored(worker, number) for number in (1, 2, 3, 4))
        session = worker.client.open_session(LAYOUT, 4096)
        with pytest.raises(StoreError, match=r"RESOURCE_EXHAUSTED.*pinned or in use"):
            worker.client.reserve_pack(session, [reservation(5)])
        assert ids(admin) == {pack.pack_id for pack in packs}
        worker.client.attach_packs(session, packs[:1])
        worker.client.close_session(session)
        write(worker, 5)  # its finder has had it
        assert ids(admin).isdisjoint({packs[0].pack_id})


def test_a_store_that_is_all_in_use_refuses_with_the_figures(tmp_path: Path) -> None:
    with store(tmp_path, 4.5) as (_, worker, admin):
        for number in (1, 2, 3, 4):
            admin.pin([write(worker, number).pack_id])
        session = worker.client.open_session(LAYOUT, 4096)
        with pytest.raises(StoreError) as raised:
            worker.client.reserve_pack(session, [reservation(5)])
        assert raised.value.code == "RESOURCE_EXHAUSTED"
        assert f"{4 * PACK_BYTES} B stored and 0 B reserved of" in raised.value.message
        assert f"{PACK_BYTES} B more do not fit; what is stored is pinned or in use" in raised.value.message
        assert [item.subject for item in raised.value.violations] == ["nvme_bytes"]
        assert raised.value.retry_after_s


def test_a_store_told_to_refuse_evicts_nothing(tmp_path: Path) -> None:
    with store(tmp_path, 4.5, "--on-full=refuse") as (_, worker, admin):
        for number in (1, 2, 3, 4):
            write(worker, number)
        with pytest.raises(StoreError, match="RESOURCE_EXHAUSTED"):
            write(worker, 5)
        assert len(ids(admin)) == 4


def test_a_running_generation_seals_where_no_prompt_fits_any_more(tmp_path: Path) -> None:
    with store(tmp_path, 18.2, "--pack-tokens=256") as (_, worker, admin):
        session = worker.client.open_session(LAYOUT, 4096)
        packs = chain(worker, session, [1])
        worker.client.bind_slot(session, 0, packs, worker.windows(0))
        numbers = iter(range(2, 100))
        with pytest.raises(StoreError, match=r"kept for running generations"):  # noqa: PT012
            for number in numbers:
                admin.pin([write(worker, number).pack_id])
        assert len(ids(admin)) == 17
        (sealed,) = worker.client.reserve_pack(session, [reservation(200, 1, packs[0].pack_id)])
        assert sealed.upload_id is not None
        worker.store(sealed.upload_id, 200)
        worker.client.seal_tail(session, sealed.upload_id)
        assert len(ids(admin)) == 18


def test_lookups_beside_eviction_name_nothing_that_cannot_be_attached(tmp_path: Path) -> None:
    """Two writers evict each other's packs while a third looks up, attaches and reads."""
    with store(tmp_path, 6.5, "--lease-s=10") as (daemon, reader, admin):
        ends_s = time.monotonic() + 4.0
        failures: list[BaseException] = []

        def fill(first: int) -> None:
            try:
                with StoreClient.connect(daemon.socket, daemon.broker) as client:
                    worker = TestWorker(client)
                    for turn in range(10**6):
                        if time.monotonic() > ends_s:
                            break
                        write(worker, first + turn)
                    worker.close()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=fill, args=(first,)) for first in (1000, 2_000_000)]
        for thread in threads:
            thread.start()
        attached = turn = 0
        while time.monotonic() < ends_s:
            number = 1000 + turn % 40 if turn % 2 else 2_000_000 + turn % 40
            turn += 1
            found = reader.client.lookup_prefix(LAYOUT.fingerprint, [candidate(number)])
            if found:
                session = reader.client.open_session(LAYOUT, 4096)
                reader.client.attach_packs(session, found)
                epoch = reader.client.bind_slot(session, 0, found, reader.windows(0))
                assert (reader.gather(0, epoch, RECORDS) == expected([number], RECORDS)).all()
                reader.client.close_session(session)
                attached += 1
        for thread in threads:
            thread.join(30)
        assert not failures, failures
        assert attached
        assert admin.get_status().counters["packs_evicted_room"] > 10
        assert [check for check in admin.audit() if not check.ok] == []


def test_a_lookup_never_names_a_pack_whose_removal_has_begun() -> None:
    """The pack is condemned when the lookup comes, and gone some milliseconds later."""
    row = PackRow(PackRef(bytes(32), bytes(16), 0, TOKENS), NO_PARENT, LAYOUT, "uid-0", PACK_BYTES)
    gone_s = time.monotonic() + 0.02

    def held(*_: object) -> PackRow | None:
        return row if time.monotonic() < gone_s else None

    state = MagicMock(served=held)
    state.catalog.served = held
    state.tenant_key.return_value = bytes(32)
    state.registry.is_condemned = lambda name: held() is not None
    assert Prefixes(state).lookup(MagicMock(tenant="uid-0"), LAYOUT.fingerprint, [candidate(1)]) == []


def test_an_attach_waits_for_a_step_that_spares_its_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is leased is condemned with the others of its step, and spared at its end."""
    row = PackRow(PackRef(bytes(32), bytes(16), 0, TOKENS), NO_PARENT, LAYOUT, "uid-0", PACK_BYTES)
    sessions = Registry(Limits(8, 8, 8, 8, 1 << 30, 1 << 30))
    session = sessions.open(sessions.add_worker(1000, 1, "finder"), LAYOUT, TOKENS)
    with sessions.condemned([row.ref.pack_id]) as spared:
        assert not spared
        attaching = threading.Thread(target=sessions.append, args=(session, [row]))
        attaching.start()
        attaching.join(0.05)
        assert attaching.is_alive()
    attaching.join(10)
    assert session.packs == [row]
    monkeypatch.setattr(registry, "STEP_S", 0.05)
    other = replace(row, ref=replace(row.ref, pack_id=bytes([1]) * 32))
    with sessions.condemned([other.ref.pack_id]), pytest.raises(StoreError, match=r"NOT_FOUND.*being evicted"):
        sessions.append(session, [other])
    with sessions.condemned([row.ref.pack_id]) as spared:
        assert spared[row.ref.pack_id].code == "FAILED_PRECONDITION"


def test_a_sidecar_does_not_evict_the_pack_that_it_is_of(tmp_path: Path) -> None:
    with store(tmp_path, 4.2, "--evict-high=1", "--evict-low=1") as (_, worker, admin):
        pack, *others = [write(worker, number) for number in range(1, 5)]
        admin.pin([other.pack_id for other in others])
        key = SidecarKey(pack.pack_id, pack.build, "hash")
        with pytest.raises(StoreError, match=r"RESOURCE_EXHAUSTED.*pinned or in use"):
            worker.client.put_sidecar(key, bytes(200_000))
        assert stored(worker, 1)
        admin.unpin([others[0].pack_id])
        worker.client.put_sidecar(key, bytes(200_000))
        assert pack.pack_id in ids(admin)
        assert others[0].pack_id not in ids(admin)
        assert [check for check in admin.audit() if not check.ok] == []


def test_a_refusal_says_whether_room_is_being_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More has to go than one reservation evicts, as after `nvme_bytes` was lowered: the next one finds room."""
    monkeypatch.setattr(room, "TRIES", 2)
    eviction = MagicMock()
    eviction.free.return_value = PACK_BYTES
    with closing(Catalog(tmp_path)) as catalog:
        catalog.commit_packs([row := pack_row(catalog, 1)])
        config = load([f"--data-dir={tmp_path}", "--nvme-bytes=1MiB"])
        held = Room(catalog, eviction, replace(config, nvme_bytes=row.file_bytes + 10), dict)
        with pytest.raises(StoreError, match="room is being made"):
            held.promise("uid-0", 11)
        eviction.free.return_value = 0
        with pytest.raises(StoreError, match="pinned or in use"):
            held.promise("uid-0", 11)


def test_a_full_disk_is_evicted_for_in_turns_and_not_in_vain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 0
    monkeypatch.setattr(room, "free_bytes", lambda directory: free)
    eviction = MagicMock()
    eviction.free.return_value = 40
    with closing(Catalog(tmp_path)) as catalog:
        catalog.ballast.take_on()
        catalog.commit_packs([pack_row(catalog, 1)])  # of 100 B
        held = Room(catalog, eviction, load([f"--data-dir={tmp_path}", "--nvme-bytes=1MiB"]), dict)
        held.clear_disk(100)
        assert [call.args[0] for call in eviction.free.call_args_list] == [100, 60, 20]
        eviction.reset_mock()
        with pytest.raises(StoreError, match="101 B more do not fit"):
            held.clear_disk(101)
        eviction.free.assert_not_called()
