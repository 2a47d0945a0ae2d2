"""Packs are rewritten in an order that is learnt from their use: by an operator, by the daemon itself, and never where
somebody has them; nothing is lost by it."""

import os
import struct
import threading
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from kvstore_service._proto.admin_service_pb2 import RetierResponse
from numpy.typing import NDArray

from kvstore_service.client import AdminClient, PackRef, SidecarKey, StoreClient, StoreError
from kvstore_service.shared import index_file
from tests.service.test_administration import run
from tests.support.daemon_process import Daemon
from tests.support.life import until
from tests.support.world import LANES, LAYERS, LAYOUT, TOKENS, TestWorker, candidate, records_of, reservation

PACK_BYTES = 286_720
RUNS = 64
HOT = np.arange(0, TOKENS, 16, dtype=np.uint32)  # a record of each block
OPTIONS = ("--copy-threads=1", "--lease-s=0", "--learn-bytes=16MiB", "--disk-cost=15,0.4,2.5")


@dataclass
class Scene:
    daemon: Daemon
    client: StoreClient
    worker: TestWorker
    admin: AdminClient

    def write(self, number: int, index: int = 0, before: tuple[PackRef, ...] = ()) -> PackRef:
        session = self.client.open_session(LAYOUT, 4096)
        if before:
            self.client.attach_packs(session, before)
        parent = before[-1].pack_id if before else b""
        (reserved,) = self.client.reserve_pack(session, [reservation(number, index, parent)])
        assert reserved.upload_id is not None
        self.worker.store(reserved.upload_id, number)
        (committed,) = self.client.commit_pack(session, [reserved.upload_id])
        self.client.close_session(session)
        assert committed.pack is not None
        return committed.pack

    @contextmanager
    def bound(self, *refs: PackRef) -> Iterator[int]:
        session = self.client.open_session(LAYOUT, 4096)
        self.client.attach_packs(session, refs)
        yield self.client.bind_slot(session, 0, refs, self.worker.windows(0))
        self.client.close_session(session)

    def use(self, *refs: PackRef, runs: int = RUNS) -> None:
        """A few records of all blocks, again and again, and others now and then."""
        with self.bound(*refs) as epoch:
            for number in range(runs):
                others = [TOKENS * len(refs) - 1 - number % 7]
                wanted = np.union1d(np.concatenate([HOT + TOKENS * i for i in range(len(refs))]), others)
                self.worker.gather(0, epoch, wanted.astype(np.uint32))

    def retier(self, *refs: PackRef, dry_run: bool = False) -> list[RetierResponse]:
        return list(self.admin.retier([ref.pack_id for ref in refs], dry_run))

    def found(self, number: int) -> PackRef:
        (ref,) = self.client.lookup_prefix(LAYOUT.fingerprint, [candidate(number)])
        return ref

    def check(self, number: int, ref: PackRef, everything: bool = True) -> None:
        """All records, by the map, through the ring."""
        order = self.client.get_map(ref)
        with self.bound(ref) as epoch:
            records = self.worker.gather(0, epoch, np.arange(TOKENS, dtype=np.uint32))
        for layer, lane in np.ndindex(LAYERS, LANES):
            assert (records[layer, lane] == records_of(number, layer, lane)[order[layer, lane]]).all()
        if everything:
            assert all(not answer.bad_blocks and not answer.error for answer in self.admin.verify())
            assert [check for check in self.admin.audit() if not check.ok] == []

    def files(self, directory: str = "packs") -> set[str]:
        return set(os.listdir(self.daemon.data_dir / directory))


@contextmanager
def scene(directory: Path, *options: str) -> Iterator[Scene]:
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(directory, options=(*OPTIONS, *options)))
        client = stack.enter_context(StoreClient.connect(daemon.socket, daemon.broker))
        worker = TestWorker(client)
        stack.callback(worker.close)
        yield Scene(daemon, client, worker, stack.enter_context(AdminClient.connect(daemon.socket, daemon.broker)))


def reason(answer: RetierResponse) -> str:
    return str(answer.message)


def test_a_pack_is_rewritten_and_holds_what_it_held(tmp_path: Path) -> None:
    with scene(tmp_path) as at:
        old = at.write(1)
        at.use(old)
        (answer,) = at.retier(old)
        assert (answer.code, answer.message) == (0, "")
        assert answer.bytes == PACK_BYTES
        assert 8 <= answer.runs <= 64
        assert answer.after_us < 0.6 * answer.before_us
        new = at.found(1)
        assert new.pack_id == old.pack_id
        assert new.build != old.build
        (listed,) = at.admin.list_packs()
        assert (listed.record_order, listed.build) == ("learnt", new.build)
        assert at.files() == {f"{new.pack_id.hex()}-{new.build.hex()}.pack"}
        at.check(1, new)
        order = at.client.get_map(new)
        assert at.admin.get_status().counters["packs_retiered"] == 1
        at.worker.close()
        at.client.close()
        at.daemon.restart()
        with StoreClient.connect(at.daemon.socket, at.daemon.broker) as client:
            again = Scene(
                at.daemon, client, TestWorker(client), AdminClient.connect(at.daemon.socket, at.daemon.broker)
            )
            again.check(1, again.found(1))
            assert (client.get_map(again.found(1)) == order).all()
            again.worker.close()
            again.admin.close()


def test_who_has_the_build_before_is_told(tmp_path: Path) -> None:
    with scene(tmp_path) as at:
        old = at.write(1)
        at.use(old)
        assert at.retier(old)[0].code == 0
        session = at.client.open_session(LAYOUT, 4096)
        with pytest.raises(StoreError, match="has build") as raised:
            at.client.attach_packs(session, [old])
        assert raised.value.reason == "BUILD_DIFFERS"
        with pytest.raises(StoreError, match="has build"):
            at.client.get_map(old)
        at.client.attach_packs(session, [at.found(1)])


def test_a_chain_goes_on_behind_a_rewritten_pack(tmp_path: Path) -> None:
    with scene(tmp_path) as at:
        first = at.write(1)
        second = at.write(2, 1, (first,))
        at.use(first, second)
        assert [answer.code for answer in at.retier(first, second)] == [0, 0]
        found = at.client.lookup_prefix(LAYOUT.fingerprint, [candidate(1), candidate(2, 1)])
        assert [ref.pack_id for ref in found] == [first.pack_id, second.pack_id]
        with at.bound(*found):
            pass
        at.write(3, 2, tuple(found))
        assert [check for check in at.admin.audit() if not check.ok] == []


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    with scene(tmp_path) as at:
        old = at.write(1)
        at.use(old)
        before = at.files()
        (answer,) = at.retier(old, dry_run=True)
        assert (answer.code, answer.bytes) == (0, 0)
        assert answer.after_us < answer.before_us
        assert at.files() == before
        assert at.found(1) == old


def test_a_pack_that_somebody_has_stays(tmp_path: Path) -> None:
    with scene(tmp_path, "--lease-s=60") as at:
        first = at.write(1)
        second = at.write(2, 1, (first,))
        at.use(first, second)
        with at.bound(first):
            assert "attached" in reason(at.retier(first)[0])
        at.client.lookup_prefix(LAYOUT.fingerprint, [candidate(1), candidate(2, 1)])
        assert "just found" in reason(at.retier(first)[0])  # by the lease on the chain's end
        assert "just found" in reason(at.retier(second)[0])
        with at.bound(first, second):  # the lease is over with an attach
            pass
        at.admin.pin([first.pack_id])
        assert "pinned" in reason(at.retier(first)[0])
        at.admin.unpin([first.pack_id])
        assert at.retier(first)[0].code == 0


def test_what_little_is_known_of_stays(tmp_path: Path) -> None:
    with scene(tmp_path) as at:
        old = at.write(1)
        at.use(old, runs=4)
        (answer,) = at.retier(old)
        assert "4.0 sampled runs" in reason(answer)
        assert at.found(1) == old
        others = at.write(2)
        with at.bound(others) as epoch:
            for _ in range(RUNS):
                at.worker.gather(0, epoch, np.arange(TOKENS, dtype=np.uint32))
        assert "saves 0.0 %" in reason(at.retier(others)[0])
    with scene(tmp_path / "off", "--learn-bytes=0B") as at:
        old = at.write(1)
        at.use(old)
        assert "learn_bytes is 0" in reason(at.retier(old)[0])


def test_indexes_follow_the_records_labels_stay_and_other_sidecars_go(tmp_path: Path, rng: np.random.Generator) -> None:
    with scene(tmp_path) as at:
        old = at.write(1)
        codes = rng.integers(0, 1 << 63, (LAYERS, LANES, TOKENS, 4), dtype=np.uint64)
        blobs = {
            "hash": index_file.save(b"p" * 32, codes),
            "labels": index_file.save(b"p" * 32, codes[:, :, 1:], by_record=False),
            "smaller": index_file.save(b"p" * 32, codes[:, :, 1:]),
            "graph": b"anything",
            "empty": b"",
        }
        for kind, blob in blobs.items():
            at.client.put_sidecar(SidecarKey(old.pack_id, old.build, kind, b"p"), blob)
        token_codes = by_token(codes, at.client.get_map(old))
        at.use(old)
        assert at.retier(old)[0].code == 0
        new = at.found(1)
        blob = at.client.get_sidecar(SidecarKey(new.pack_id, new.build, "hash", b"p"))
        assert blob is not None
        parameters, moved = index_file.load(blob)
        assert parameters == b"p" * 32
        assert (by_token(moved, at.client.get_map(new)) == token_codes).all()
        assert at.client.get_sidecar(SidecarKey(new.pack_id, new.build, "labels", b"p")) == blobs["labels"]
        for kind in ("smaller", "graph", "empty"):
            assert at.client.get_sidecar(SidecarKey(new.pack_id, new.build, kind, b"p")) is None
        assert len(at.files("sidecars")) == 2
        at.check(1, new)


def index_of(header: dict[str, object], data: bytes = b"") -> bytes:
    """An index whose array has this header, whatever it claims."""
    text = repr(header).encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    body = struct.pack("<8sI32s", index_file.MAGIC, index_file.VERSION, b"p" * 32)
    body += b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data
    return body + struct.pack("<I", zlib.crc32(body))


NO_ARRAYS = {
    "items without bytes": index_of({"descr": "|V0", "fortran_order": False, "shape": (LAYERS, LANES, TOKENS)}),
    "axes below zero": index_of({"descr": "<u8", "fortran_order": False, "shape": (-1, -1, 4)}, bytes(32)),
    "items that are arrays": index_of({"descr": ("<u8", (4,)), "fortran_order": False, "shape": (2, 2)}, bytes(128)),
    "too many axes": index_of({"descr": "<u8", "fortran_order": False, "shape": (1,) * 70}, bytes(8)),
}


@pytest.mark.parametrize("what", NO_ARRAYS)
def test_a_header_that_no_array_can_have_is_no_index(what: str) -> None:
    with pytest.raises(index_file.IndexFormatError, match="holds no array"):
        index_file.load(NO_ARRAYS[what])


def test_a_malformed_index_of_one_user_ends_no_rewrite(tmp_path: Path) -> None:
    """Whoever may write sidecars writes their headers: what numpy says of one is not the end of the operator's call."""
    with scene(tmp_path) as at:
        old, other = at.write(1), at.write(2)
        for number, blob in enumerate(NO_ARRAYS.values()):
            at.client.put_sidecar(SidecarKey(old.pack_id, old.build, f"kind{number}", b"p"), blob)
        at.use(old)
        at.use(other)
        assert [(answer.code, answer.message) for answer in at.retier(old, other)] == [(0, ""), (0, "")]
        assert at.files("sidecars") == set()
        at.check(1, at.found(1))


@pytest.mark.parametrize("heads", [1, 4])
def test_a_large_index_takes_little_more_than_three_times_its_size(rng: np.random.Generator, heads: int) -> None:
    """A user chooses its size, up to a GiB, and the daemon takes the memory while it rewrites the pack."""
    index = rng.integers(0, 256, (1, heads, 256, (64 << 20) // 256 // heads), np.uint8)
    records = rng.permuted(np.tile(np.arange(256), (1, heads, 1)), axis=2)
    blob = index_file.save(b"p" * 32, index)
    tracemalloc.start()
    try:
        _, found = index_file.load(blob)
        moved = index_file.save(b"p" * 32, index_file.reordered(found, records))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2.6 * len(blob)  # beside the blob
    assert (index_file.load(moved)[1] == np.take_along_axis(index, records[..., None], axis=2)).all()


def by_token(codes: NDArray[np.uint64], order: NDArray[np.uint16]) -> NDArray[np.uint64]:
    return index_file.reordered(codes, order.argsort(axis=2))


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
        file.flush()
        os.fsync(file.fileno())


def test_a_flip_in_the_source_is_damage_and_nothing_is_rewritten(tmp_path: Path) -> None:
    with scene(tmp_path) as at:
        old = at.write(1)
        at.use(old)
        (name,) = at.files()
        flip(at.daemon.data_dir / "packs" / name, PACK_BYTES // 2)
        (answer,) = at.retier(old)
        assert "checksum of block" in reason(answer)
        assert at.files() == {name}
        assert [pack.pack_id for pack in at.admin.list_packs(damaged=True)] == [old.pack_id]
        failed = [check.name for check in at.admin.audit() if not check.ok]
        assert failed == ["no pack is damaged"]


def test_nothing_is_evicted_for_a_second_file(tmp_path: Path) -> None:
    with scene(tmp_path, "--nvme-bytes=1MiB", "--evict-high=1", "--evict-low=1") as at:  # three packs
        old, other, third = at.write(1), at.write(2), at.write(3)
        at.use(old)
        before = at.files()
        (answer,) = at.retier(old)
        assert "do not fit" in reason(answer)
        assert at.files() == before
        assert at.found(2) == other
        quota = next(item for item in at.admin.list_quotas())
        assert quota.reserved_bytes == 0
        at.admin.evict([third.pack_id])
        assert at.retier(old)[0].code == 0
        at.check(1, at.found(1))


def test_kvctl_retiers(tmp_path: Path) -> None:
    with scene(tmp_path) as at:
        used, unused = at.write(1), at.write(2)
        at.use(used)
        assert run(at.daemon, "retier").returncode == 2
        shown = run(at.daemon, "retier", "--all", "--dry-run")
        assert shown.returncode == 0, shown.stderr
        assert "1 of 2 packs would be rewritten" in shown.stdout
        done = run(at.daemon, "retier", used.pack_id.hex()[:12], unused.pack_id.hex()[:12])
        assert done.returncode == 0, done.stderr
        assert "1 of 2 packs rewritten" in done.stdout
        at.check(1, at.found(1))
        at.check(2, at.found(2))


def test_the_daemon_rewrites_by_itself_what_nobody_has(tmp_path: Path) -> None:
    with scene(tmp_path, "--retier-bytes-per-s=100MiB") as at:
        old, unused = at.write(1), at.write(2)
        at.use(old)
        until(lambda: at.admin.get_status().counters["packs_retiered"] == 1, "a pack rewritten in the background")
        new = at.found(1)
        assert new.build != old.build
        at.check(1, new)
        assert at.found(2) == unused


def test_an_attach_meanwhile_keeps_the_build_that_it_found(tmp_path: Path) -> None:
    """At 1 MiB a second a pack takes half a second; whoever comes within it is served, and the rewrite gives up."""
    with scene(tmp_path, "--retier-bytes-per-s=1MiB", "--verify-bytes-per-s=unlimited") as at:
        old = at.write(1)
        answers: list[RetierResponse] = []
        with at.bound(old) as epoch:  # the daemon's own turn waits for the end of this
            for _ in range(RUNS):
                at.worker.gather(0, epoch, HOT)
        asking = threading.Thread(target=lambda: answers.extend(at.retier(old)))
        asking.start()
        until(lambda: len(at.files()) == 2 or not asking.is_alive(), "a second file")
        with at.bound(old):
            asking.join(30)
            at.client.get_map(old)
        assert "attached" in reason(answers[0])
        assert len(at.files()) == 1
        at.check(1, old)
