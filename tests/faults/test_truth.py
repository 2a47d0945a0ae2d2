"""What the store says is so: damage is found at once and replaced by one, an attach is whole, an audit never lies."""

from __future__ import annotations

import os
import secrets
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore_service.client import AdminClient, PackRef, SidecarKey, StoreClient, StoreError
from kvstore_service.daemon import config
from kvstore_service.daemon.disk import sidecars
from kvstore_service.daemon.disk.catalog import Catalog
from kvstore_service.daemon.disk.open_packs import OpenPacks
from kvstore_service.daemon.disk.verifier import Verifier
from kvstore_service.shared import settings
from kvstore_service.shared.types import PackRow, format_size
from tests.service.test_catalog import pack_row
from tests.support.daemon_process import Daemon
from tests.support.life import until
from tests.support.world import LAYOUT, TOKENS, TestWorker, candidate, expected, reservation

CHAIN = 10
BLOCK = 4096


@contextmanager
def joined(daemon: Daemon) -> Iterator[TestWorker]:
    with StoreClient.connect(daemon.socket, daemon.broker, secrets.token_hex(4), timeout_s=20.0) as client:
        worker = TestWorker(client)
        yield worker
        worker.close()


@contextmanager
def operated(directory: Path) -> Iterator[tuple[Daemon, TestWorker, AdminClient]]:
    with (
        Daemon(directory) as daemon,
        joined(daemon) as worker,
        AdminClient.connect(daemon.socket, daemon.broker) as admin,
    ):
        yield daemon, worker, admin


def write_chain(worker: TestWorker, session: str, numbers: range) -> tuple[list[PackRef], int]:
    """The chain's packs, and how many of them had to be written."""
    client = worker.client
    reserved = client.reserve_pack(session, [reservation(number, number) for number in numbers])
    uploads = [item.upload_id for item in reserved if item.upload_id is not None]
    for item, number in zip(reserved, numbers, strict=True):
        if item.upload_id is not None:
            worker.store(item.upload_id, number)
    for committed in client.commit_pack(session, uploads):
        assert committed.error is None
    return client.lookup_prefix(LAYOUT.fingerprint, [candidate(number, number) for number in numbers]), len(uploads)


def file_of(daemon: Daemon, pack: PackRef) -> Path:
    return daemon.data_dir / "packs" / f"{pack.pack_id.hex()}-{pack.build.hex()}.pack"


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(BLOCK)


def garble_head(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\xff" * 64)


def become_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("harm", [Path.unlink, cut, garble_head, become_a_directory])
def test_all_damage_of_a_chain_is_found_by_one_lookup_and_mended_by_one_run(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    with Daemon(tmp_path) as daemon, joined(daemon) as worker:
        packs, written = write_chain(worker, worker.client.open_session(LAYOUT, CHAIN * TOKENS), range(CHAIN))
        assert (len(packs), written) == (CHAIN, CHAIN)
    with operated(tmp_path) as (daemon, worker, admin):
        client = worker.client
        session = client.open_session(LAYOUT, CHAIN * TOKENS)
        for pack in packs[1:9]:
            harm(file_of(daemon, pack))
        found = client.lookup_prefix(LAYOUT.fingerprint, [candidate(number, number) for number in range(CHAIN)])
        if harm is garble_head:  # a lookup opens nothing; the attach shows one and then all
            with pytest.raises(StoreError, match="DATA_LOSS"):
                client.attach_packs(session, found)
            found = client.lookup_prefix(LAYOUT.fingerprint, [candidate(number, number) for number in range(CHAIN)])
        assert found == packs[:1]
        assert admin.get_status().counters["packs_damaged"] == 8
        again, written = write_chain(worker, session, range(CHAIN))
        assert (written, [pack.pack_id for pack in again]) == (8, [pack.pack_id for pack in packs])
        client.attach_packs(session, again)
        client.bind_slot(session, 0, again, worker.windows(0))
        assert [check.detail for check in admin.audit() if not check.ok] == []


def test_a_damaged_sidecar_is_no_index_and_can_be_put_anew(tmp_path: Path) -> None:
    with operated(tmp_path) as (daemon, worker, admin):
        client = worker.client
        pack = worker.commit(client.open_session(LAYOUT, TOKENS), 1)
        key = SidecarKey(pack.pack_id, pack.build, "hash")
        for dropped, harm in enumerate((cut_short, Path.unlink, become_a_directory), start=1):
            client.put_sidecar(key, b"index" * 100)
            (path,) = [path for path in (daemon.data_dir / "sidecars").iterdir() if path.is_file()]
            harm(path)
            assert client.get_sidecar(key) is None
            assert client.get_sidecar(key) is None
            assert admin.get_status().counters["sidecars_dropped"] == dropped
        client.put_sidecar(key, b"index" * 100)
        assert client.get_sidecar(key) == b"index" * 100
        assert client.lookup_prefix(LAYOUT.fingerprint, [candidate(1)]) == [pack]


def cut_short(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def test_an_attach_takes_all_packs_or_none_of_session_and_slot(tmp_path: Path) -> None:
    with operated(tmp_path) as (daemon, worker, admin):
        client = worker.client
        session = client.open_session(LAYOUT, CHAIN * TOKENS)
        packs, _ = write_chain(worker, session, range(4))
        client.attach_packs(session, packs[:1])
        epoch = client.bind_slot(session, 0, packs[:1], worker.windows(0))
        file_of(daemon, packs[3]).write_bytes(b"\xff" * file_of(daemon, packs[3]).stat().st_size)
        with pytest.raises(StoreError, match="DATA_LOSS"):
            client.attach_packs(session, packs[1:])
        assert admin.describe_session(session).session.tokens == TOKENS
        records = np.arange(TOKENS, dtype=np.uint32)
        np.testing.assert_array_equal(worker.gather(0, epoch, records), expected([0], records))
        with pytest.raises(AssertionError):  # the slot has the first pack's records and no more
            worker.gather(0, epoch, records[:8] + TOKENS)
        assert client.attach_packs(session, packs[1:3]) == 3 * TOKENS
        np.testing.assert_array_equal(worker.gather(0, epoch, records + TOKENS), expected([0, 1], records + TOKENS))
        assert [check.name for check in admin.audit() if not check.ok] == ["no pack is damaged"]


def test_audits_beside_aborts_commits_evictions_and_replacements_find_no_fault(tmp_path: Path) -> None:
    stop, failed = threading.Event(), list[BaseException]()
    with Daemon(tmp_path) as daemon, AdminClient.connect(daemon.socket, daemon.broker) as admin:

        def busy(number: int) -> None:
            try:
                with joined(daemon) as worker:
                    live(worker, number)
            except BaseException as error:
                failed.append(error)
                raise

        def live(worker: TestWorker, number: int) -> None:
            client = worker.client
            session = client.open_session(LAYOUT, 1 << 20)
            while not stop.is_set():
                reserved = client.reserve_pack(session, [reservation(number * 1000 + i) for i in range(1)])
                client.abort_pack([item.upload_id for item in reserved if item.upload_id is not None])
                pack = worker.commit(session, number)
                client.put_sidecar(SidecarKey(pack.pack_id, pack.build, "hash"), bytes(3000))
                cut(file_of(daemon, pack))
                assert client.lookup_prefix(LAYOUT.fingerprint, [candidate(number)]) == []
                again = worker.commit(session, number)
                (evicted,) = admin.evict([again.pack_id])
                assert evicted.message == ""

        threads = [threading.Thread(target=busy, args=(number,)) for number in (1, 2, 3)]
        for thread in threads:
            thread.start()
        audits = 0
        deadline = time.monotonic() + 6.0
        try:
            while time.monotonic() < deadline and not failed:
                wrong = [(check.name, check.detail) for check in admin.audit() if not check.ok]
                assert [item for item in wrong if item[0] != "no pack is damaged"] == []
                audits += 1
        finally:
            stop.set()
            for thread in threads:
                thread.join(60.0)
        assert not failed
        assert audits > 3
        until(lambda: all(check.ok for check in admin.audit()), "all is well after replacements")


# --- open packs ---


class Plane:
    """Opens and closes when it may; `handles` are open."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.waiting = threading.Event()
        self.handles: dict[int, str] = {}
        self.slow = ""
        self.opened = 0

    def _pause(self, path: str) -> None:
        if self.slow and self.slow in path:
            self.waiting.set()
            assert self.may.wait(30.0)

    def open_pack(self, path: str, owner: int) -> int:
        assert owner == os.getuid()
        self._pause(path)
        self.opened += 1
        self.handles[self.opened] = path
        return self.opened

    def pack_spec(self, handle: int) -> Any:
        name = Path(self.handles[handle]).name

        class Spec:
            pack_id, build, tokens = bytes.fromhex(name[:64]), bytes.fromhex(name[65:97]), TOKENS

        return Spec

    def pack_damaged(self, handle: int) -> bool:
        assert handle in self.handles
        return False

    def close_pack(self, handle: int) -> None:
        self._pause(self.handles[handle])
        del self.handles[handle]


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with closing(Catalog(tmp_path)) as catalog:
        yield catalog


def background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_pack_that_is_slow_to_open_or_close_delays_no_other(catalog: Catalog) -> None:
    rows = [pack_row(catalog, name, build=name) for name in (1, 2, 3)]
    catalog.commit_packs(rows)
    plane = Plane()
    packs = OpenPacks(plane, catalog, idle_max=1)  # type: ignore[arg-type]
    plane.slow = rows[0].file
    opening = [background(lambda: packs.acquire(rows[0])) for _ in range(2)]
    assert plane.waiting.wait(10.0)
    handle = packs.acquire(rows[1])  # waits for nobody
    packs.check(rows[0])
    packs.check(rows[1])
    assert packs.holders() == (1, 1)
    plane.may.set()
    for thread in opening:
        thread.join(10.0)
    assert packs.holders() == (2, 3)
    assert plane.opened == 2  # once for both
    plane.may.clear()
    plane.waiting.clear()
    packs.release(rows[0])
    closing_first = background(lambda: (packs.release(rows[0]), packs.release(rows[1])))
    assert plane.waiting.wait(10.0)  # rows[1] came to be idle, so rows[0] is closed
    assert packs.acquire(rows[2]) != handle
    reopening = background(lambda: packs.acquire(rows[0]))  # waits for the end of its closing, then opens anew
    time.sleep(0.05)
    assert reopening.is_alive()
    plane.may.set()
    closing_first.join(10.0)
    reopening.join(10.0)
    assert rows[0].file in str(plane.handles.values())
    assert not reopening.is_alive()


def test_a_wait_for_a_slow_open_has_a_deadline(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_service.daemon.disk.open_packs.OPEN_WAIT_S", 0.1)
    row = pack_row(catalog, 1)
    catalog.commit_packs([row])
    plane = Plane()
    packs = OpenPacks(plane, catalog, idle_max=1)  # type: ignore[arg-type]
    plane.slow = row.file
    opening = background(lambda: packs.acquire(row))
    assert plane.waiting.wait(10.0)
    with pytest.raises(StoreError, match=r"UNAVAILABLE.*is the disk slow"):
        packs.acquire(row)
    plane.may.set()
    opening.join(10.0)
    assert packs.holders() == (1, 1)


def test_a_replaced_packs_handle_goes_with_its_last_holder(catalog: Catalog) -> None:
    row: PackRow = pack_row(catalog, 1)
    catalog.commit_packs([row])
    plane = Plane()
    packs = OpenPacks(plane, catalog, idle_max=8)  # type: ignore[arg-type]
    packs.acquire(row)
    catalog.mark_damaged(row, "planted")
    anew = pack_row(catalog, 1, build=2)
    catalog.commit_packs([anew])
    assert packs.acquire(anew) in plane.handles
    packs.release(row)
    assert packs.holders() == (1, 1)
    assert [path for path in plane.handles.values() if row.file in path] == []


# --- verify ---

TOUCHED = ("frames_used", "extent_hits", "extent_misses", "evictions", "nvme_read_bytes", "packs_open")


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))


def test_verify_touches_no_frame_and_opens_no_pack(tmp_path: Path) -> None:
    with operated(tmp_path) as (_, worker, admin):
        client = worker.client
        session = client.open_session(LAYOUT, CHAIN * TOKENS)
        packs, _ = write_chain(worker, session, range(CHAIN))
        client.attach_packs(session, packs[:2])
        epoch = client.bind_slot(session, 0, packs[:2], worker.windows(0))
        records = np.arange(2 * TOKENS, dtype=np.uint32)[::3]
        worker.gather(0, epoch, records)
        before = admin.get_status().counters
        assert [(item.bad_blocks, item.error) for item in admin.verify()] == [([], "")] * CHAIN
        after = admin.get_status().counters
        assert {name: after[name] for name in TOUCHED} == {name: before[name] for name in TOUCHED}
        worker.gather(0, epoch, records)
        assert admin.get_status().counters["extent_misses"] == after["extent_misses"]


def test_verify_names_every_bad_block_and_drops_a_damaged_sidecar(tmp_path: Path) -> None:
    with operated(tmp_path) as (daemon, worker, admin):
        client = worker.client
        packs = [worker.commit(client.open_session(LAYOUT, TOKENS), number) for number in range(5)]
        keys = [SidecarKey(pack.pack_id, pack.build, "hash") for pack in packs]
        for key in keys[:2]:
            client.put_sidecar(key, bytes(9000))
        size = file_of(daemon, packs[0]).stat().st_size
        flip(file_of(daemon, packs[0]), BLOCK * 3 + 5)
        flip(file_of(daemon, packs[0]), BLOCK * 7)
        flip(file_of(daemon, packs[1]), 100)
        flip(file_of(daemon, packs[2]), size - BLOCK)
        os.truncate(file_of(daemon, packs[3]), size - 1)
        flip(next(path for path in (daemon.data_dir / "sidecars").iterdir() if sidecar_of(path) == keys[0]), 200)
        answers = {item.pack_id: (list(item.bad_blocks), item.error) for item in admin.verify()}
        found = [answers[pack.pack_id] for pack in packs]
        assert found[0][0] == [3, 7]
        assert "sidecar 'hash' was damaged" in found[0][1]
        assert "header checksum" in found[1][1]
        assert "checksum of the checksum table" in found[2][1]
        assert "ends before" in found[3][1]
        assert found[4] == ([], "")
        counters = admin.get_status().counters
        assert counters["packs_damaged"] == 4
        assert counters["sidecars_dropped"] == 1


def sidecar_of(path: Path) -> SidecarKey:
    return sidecars.key_of(str(path))


def test_damage_that_a_read_meets_has_the_rest_of_its_chain_verified(tmp_path: Path) -> None:
    """A flipped bit shows when it is read; the other seven need no run each."""
    with operated(tmp_path) as (daemon, worker, admin):
        client = worker.client
        session = client.open_session(LAYOUT, CHAIN * TOKENS)
        packs, _ = write_chain(worker, session, range(CHAIN))
        for pack in packs[1:9]:
            flip(file_of(daemon, pack), BLOCK * 3 + 5)
        client.attach_packs(session, packs)
        epoch = client.bind_slot(session, 0, packs, worker.windows(0))
        with pytest.raises(AssertionError):
            worker.gather(0, epoch, np.arange(4 * TOKENS, 5 * TOKENS, dtype=np.uint32))
        assert client.lookup_prefix(LAYOUT.fingerprint, [candidate(4, 4)]) == []
        until(lambda: looked_up(client) == packs[:1], "the first damaged pack is known")
        until(lambda: admin.get_status().counters["packs_damaged"] == 8, "all damage is known")


def looked_up(client: StoreClient) -> list[PackRef]:
    return client.lookup_prefix(LAYOUT.fingerprint, [candidate(number, number) for number in range(CHAIN)])


def test_verify_keeps_to_its_rate_and_to_none(tmp_path: Path) -> None:
    assert config.load(["--verify-bytes-per-s=unlimited"]).verify_bytes_per_s == 0
    with closing(Catalog(tmp_path)) as catalog:
        paced = Verifier(catalog, 1 << 20)
        started = time.monotonic()
        for _ in range(4):
            paced._pace(100_000)
        assert time.monotonic() - started > 0.3  # bytes / rate, whatever else the machine does
        paced.close()
        with pytest.raises(StoreError, match="ending"):
            paced._pace(1)


# --- rebuild ---


def kvstored(directory: Path, *words: str) -> tuple[int, str]:
    """(status, stdout and stderr) of a kvstored that ends by itself."""
    command = [sys.executable, "-m", "kvstore_service.daemon.server", *words, f"--data-dir={directory}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_lost_catalogue_is_rebuilt_from_the_files(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        with joined(daemon) as worker:
            client = worker.client
            packs, _ = write_chain(worker, client.open_session(LAYOUT, CHAIN * TOKENS), range(CHAIN))
            key = SidecarKey(packs[2].pack_id, packs[2].build, "hash", b"seed")
            client.put_sidecar(key, b"index")
            half = client.reserve_pack(client.open_session(LAYOUT, TOKENS), [reservation(99)])
            daemon.kill()
        data = daemon.data_dir
        for path in data.glob("catalog.sqlite*"):
            path.unlink()
        assert stat.S_IMODE((data / "tenants").stat().st_mode) == 0o600
        garble_head(file_of(daemon, packs[8]))
        status, output = kvstored(data, "rebuild")
        assert status == 1  # not all of it could be
        size = format_size(8 * file_of(daemon, packs[0]).stat().st_size)
        assert f"restored 8 packs ({size}) and 1 sidecars" in output
        left = sorted(path.name[:64] for path in (data / "quarantine").iterdir())
        assert left == sorted(pack.pack_id.hex() for pack in (packs[8], packs[9], half[0].pack))
        assert all(name in output for name in left)
        daemon.start()
        with joined(daemon) as worker, AdminClient.connect(daemon.socket, daemon.broker) as admin:
            assert looked_up(worker.client) == packs[:8]
            assert worker.client.get_sidecar(key) == b"index"
            assert [(item.bad_blocks, item.error) for item in admin.verify()] == [([], "")] * 8
            again, written = write_chain(worker, worker.client.open_session(LAYOUT, CHAIN * TOKENS), range(CHAIN))
            assert (len(again), written) == (CHAIN, 2)
            assert [check.detail for check in admin.audit() if not check.ok] == []
            assert "in use by pid" in kvstored(data, "rebuild")[1]


def test_another_extent_size_is_refused_with_one_line(tmp_path: Path) -> None:
    with Daemon(tmp_path, options=("--extent-blocks=2",)) as daemon:
        daemon.stop()
        sockets = (f"--socket={tmp_path}/s", f"--broker={tmp_path}/b")
        status, output = kvstored(daemon.data_dir, "--extent-blocks=4", *sockets)
        assert (status, len(output.splitlines())) == (1, 1)
        assert "extent_blocks=4" in output
        assert "set it to 2" in output


@pytest.mark.parametrize("name", ["lock", "catalog.sqlite", "tenants", "tenants.new", "packs.stamp", "ballast"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_something_else_in_a_files_place_is_refused(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    make(tmp_path / name)
    with pytest.raises(StoreError, match=f"{name} is (a directory|no regular file); remove it"):
        Catalog(tmp_path)


@pytest.mark.parametrize("directory", [b"/tmp/\xff", b"~nobody-of-that-name/data", b""])
def test_odd_paths_are_one_line(directory: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = r"data_dir=.*: write a path"
    with pytest.raises(config.ConfigError, match=rf"{wanted}|--data-dir=.* is not UTF-8"):
        config.load([f"--data-dir={os.fsdecode(directory)}"])
    monkeypatch.setenv("KVSTORE_DATA_DIR", os.fsdecode(directory))
    with pytest.raises(config.ConfigError, match=wanted):
        config.load([])


def test_an_empty_home_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "")
    assert settings.home() == Path(tempfile.gettempdir()) / f"headgate-{os.getuid()}"
