"""What a disk can do to bytes at rest: flips, swapped, stale, lost and missing blocks. None of it reaches a window.

Every block of a pack is read on its own, so that each damaged one is accounted for and each other one must be right.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from decode_worker._native import OP_GATHER, OP_PROMOTE, OP_RANGE
from kvstore_service._native import NativeError, crc32c
from kvstore_service.client import AdminClient, StoreClient, StoreError
from kvstore_service.daemon.disk import sidecars
from kvstore_service.daemon.disk.catalog import Catalog
from kvstore_service.shared.types import Layout, PackRef, PackRow, SidecarKey
from tests.support.daemon_process import Daemon
from tests.support.rig import CANARY, DATA_LOSS, ERROR, OK, Pack, Rig, run, until
from tests.support.world import LAYOUT, TOKENS, TestWorker, candidate, expected

BLOCK = 4096
RECORD_BYTES, LAYERS, LANES, PACK_TOKENS = 384, 2, 2, 1024  # ten records and 256 B of padding in a block
RUNS = 64  # of a ticket
FLIPS = 10_000
SIDECAR_FLIPS = 2_000


class Shelf:
    """A rig with one slot over one pack, and what of the pack's file belongs where."""

    def __init__(self, rig: Rig, pack: Pack) -> None:
        self.rig = rig
        self.pack = pack
        self.clean = np.fromfile(pack.path, np.uint8).reshape(-1, BLOCK)
        rig.plane.close_pack(pack.handle)
        self.per_block = BLOCK // RECORD_BYTES
        self.segment_blocks = -(-PACK_TOKENS // self.per_block)
        self.data_blocks = LAYERS * LANES * self.segment_blocks
        map_blocks = LAYERS * LANES * -(-PACK_TOKENS * 2 // BLOCK)
        self.crc_block = 1 + self.data_blocks + map_blocks  # the header is block 0
        assert len(self.clean) == self.crc_block + 1

    def write(self, blocks: NDArray[np.uint8]) -> None:
        fd = os.open(self.pack.path, os.O_WRONLY | os.O_TRUNC)
        try:
            os.writev(fd, [np.ascontiguousarray(blocks)])
            os.fsync(fd)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """The pack open and bound; yields the slot's epoch. Nothing of it is in frames."""
        self.pack.handle = self.rig.plane.open_pack(str(self.pack.path))
        try:
            epoch = self.rig.bind(0, [self.pack], PACK_TOKENS)
            try:
                yield epoch
            finally:
                self.rig.plane.unbind(self.rig.worker, 0)
        finally:
            self.rig.plane.close_pack(self.pack.handle)

    def read_ahead(self, how: str, epoch: int) -> None:
        """Lets the pack into frames before anyone waits for it; returns when all of it has been read."""
        before = self.rig.plane.stats()["warm_bytes"]
        if how == "warm":
            self.rig.plane.warm(self.pack.handle, np.full((LAYERS, LANES), PACK_TOKENS, np.uint32))
        else:
            records = np.arange(PACK_TOKENS, dtype=np.uint32)
            runs = np.concatenate([run(0, epoch, lane=lane, pair_count=PACK_TOKENS) for lane in range(LANES)])
            for layer in range(LAYERS):
                self.rig.post(OP_PROMOTE, layer, runs, np.stack([records, records], 1))
        until(lambda: self.rig.plane.stats()["warm_bytes"] - before >= self.data_blocks * BLOCK)

    def read(self, op: int, epoch: int) -> set[int]:
        """Fetches every data block by a run of its own; returns the blocks that ended in DATA_LOSS.

        The whole window is compared: what arrived is the truth, and elsewhere nothing was touched."""
        window = self.rig.window
        window[:] = CANARY
        truth = window.copy()
        lost = set()
        for layer in range(LAYERS):
            numbers = list(itertools.product(range(LANES), range(self.segment_blocks)))
            for chunk in _batched(numbers, RUNS):
                lost |= self._read_chunk(op, epoch, layer, chunk, truth)
        np.testing.assert_array_equal(window, truth)
        return lost

    def _read_chunk(
        self, op: int, epoch: int, layer: int, chunk: tuple[tuple[int, int], ...], truth: NDArray
    ) -> set[int]:
        runs, pairs = [], []
        for lane, block in chunk:
            first = block * self.per_block
            records = np.arange(first, min(first + self.per_block, PACK_TOKENS), dtype=np.uint32)
            at = {"first_pair": first, "arg": first} if op == OP_RANGE else {"first_pair": sum(map(len, pairs))}
            runs.append(run(0, epoch, lane=lane, pair_count=len(records), **at))
            pairs.append(np.stack([records, records], 1))
        no_pairs = np.zeros((0, 2), np.uint32)
        results = self.rig.ask(op, layer, np.concatenate(runs), np.concatenate(pairs) if op == OP_GATHER else no_pairs)
        lost = set()
        for (lane, block), result, pair in zip(chunk, results.tolist(), pairs, strict=True):
            if result == [OK, 0]:
                offset = int(self.rig.windows[layer, lane, 0]) + int(pair[0, 0]) * RECORD_BYTES
                right = self.pack.records[layer, lane, pair[0, 0] : pair[-1, 0] + 1].reshape(-1)
                truth[offset : offset + len(right)] = right
            else:
                assert result == [ERROR, DATA_LOSS]
                lost.add(1 + (layer * LANES + lane) * self.segment_blocks + block)
        return lost

    def check(self, how: str, bad: set[int]) -> None:
        """Opens the file as it is, reads all of it in one of four ways, and accounts for every bad block."""
        with self.opened() as epoch:
            if how in ("warm", "promote"):
                self.read_ahead(how, epoch)
            lost = self.read(OP_RANGE if how == "range" else OP_GATHER, epoch)
            assert lost == {block for block in bad if block <= self.data_blocks}
            assert self.rig.plane.pack_damaged(self.pack.handle) == bool(lost)
            assert set(self.rig.plane.verify_pack(self.pack.handle)) == bad
            assert _refused(lambda: self.rig.map_of(self.pack)) == any(b > self.data_blocks for b in bad)

    def does_not_open(self) -> bool:
        def attempt() -> None:
            self.rig.plane.close_pack(self.rig.plane.open_pack(str(self.pack.path)))

        return _refused(attempt)


def _batched(items: list[tuple[int, int]], size: int) -> Iterator[tuple[tuple[int, int], ...]]:
    for first in range(0, len(items), size):
        yield tuple(items[first : first + size])


def _refused(attempt: Callable[[], object]) -> bool:
    """Whether it ends in DATA_LOSS; any other error is the test's."""
    try:
        attempt()
    except NativeError as error:
        if error.code == "DATA_LOSS":
            return True
        raise
    return False


def make_shelf(rig: Rig, rng: np.random.Generator, pack_id: bytes | None = None) -> Shelf:
    return Shelf(rig, rig.make_pack(rng, LAYERS, LANES, RECORD_BYTES, PACK_TOKENS, pack_id))


def test_ten_thousand_flipped_bits_are_all_found_and_none_is_delivered(
    directory: Path, rng: np.random.Generator
) -> None:
    with Rig(directory) as rig:
        shelf = make_shelf(rig, rng)
        bits = rng.choice(shelf.clean.size * 8, FLIPS, replace=False)
        of_block: dict[int, list[int]] = {}
        for bit in bits.tolist():
            of_block.setdefault(bit // (8 * BLOCK), []).append(bit)
        found: Counter[str] = Counter()
        for number in range(max(map(len, of_block.values()))):
            flips = {block: places[number] for block, places in of_block.items() if number < len(places)}
            for block in (0, shelf.crc_block):
                if (bit := flips.pop(block, None)) is not None:
                    shelf.write(_flipped(shelf.clean, [bit]))
                    assert shelf.does_not_open(), f"bit {bit}"
                    found["header" if block == 0 else "checksum table"] += 1
            shelf.write(_flipped(shelf.clean, list(flips.values())))
            how = ("gather", "range", "warm", "promote")[number % 4]
            shelf.check(how, set(flips))
            for block in flips:
                found[f"data by {how}" if block <= shelf.data_blocks else "map"] += 1
        shelf.write(shelf.clean)
        shelf.check("gather", set())
        print(dict(found))
        assert sum(found.values()) == FLIPS
        assert len(found) == 7


def _flipped(clean: NDArray[np.uint8], bits: list[int]) -> NDArray[np.uint8]:
    damaged = clean.copy()
    flat = damaged.reshape(-1)
    for bit in bits:
        flat[bit // 8] ^= 1 << bit % 8
    return damaged


def _some(rng: np.random.Generator, shelf: Shelf) -> NDArray[np.intp]:
    """A fifth of the blocks with a checksum, in random order; an even number."""
    return rng.permutation(np.arange(1, shelf.crc_block))[: shelf.crc_block // 10 * 2]


def swapped(rng: np.random.Generator, shelf: Shelf, other: Shelf) -> tuple[NDArray[np.uint8], set[int]]:
    """Pairs of blocks in each other's place."""
    some, damaged = _some(rng, shelf), shelf.clean.copy()
    half = len(some) // 2
    damaged[some[:half]], damaged[some[half:]] = shelf.clean[some[half:]], shelf.clean[some[:half]]
    return damaged, set(some.tolist())


def misplaced(rng: np.random.Generator, shelf: Shelf, other: Shelf) -> tuple[NDArray[np.uint8], set[int]]:
    """Everything one block too far back, as after a write at a wrong offset."""
    damaged = shelf.clean.copy()
    damaged[2 : shelf.crc_block] = shelf.clean[1 : shelf.crc_block - 1]
    return damaged, set(range(2, shelf.crc_block))


def from_elsewhere(rng: np.random.Generator, shelf: Shelf, other: Shelf) -> tuple[NDArray[np.uint8], set[int]]:
    """The other file's blocks of the same places: another pack's, or those of an older build."""
    some, damaged = _some(rng, shelf), shelf.clean.copy()
    damaged[some] = other.clean[some]
    return damaged, set(some.tolist())


def lost(rng: np.random.Generator, shelf: Shelf, other: Shelf) -> tuple[NDArray[np.uint8], set[int]]:
    """Blocks that were allocated and never written."""
    some, damaged = _some(rng, shelf), shelf.clean.copy()
    damaged[some] = 0
    return damaged, set(some.tolist())


def torn(rng: np.random.Generator, shelf: Shelf, other: Shelf) -> tuple[NDArray[np.uint8], set[int]]:
    """Blocks of which only some sectors are this build's."""
    some, damaged = _some(rng, shelf), shelf.clean.copy()
    sector = 512 * rng.integers(1, 8)
    damaged[some, sector:] = other.clean[some, sector:]
    return damaged, set(some.tolist())


@pytest.mark.parametrize("damage", [swapped, misplaced, from_elsewhere, lost, torn])
@pytest.mark.parametrize("same_id", [False, True], ids=["other-pack", "other-build"])
def test_blocks_that_are_not_this_files_or_not_of_this_place_are_not_delivered(
    directory: Path,
    rng: np.random.Generator,
    damage: Callable[[np.random.Generator, Shelf, Shelf], tuple[NDArray[np.uint8], set[int]]],
    same_id: bool,
) -> None:
    with Rig(directory) as rig:
        pack_id = rng.bytes(32)
        shelf = make_shelf(rig, rng, pack_id)
        other = make_shelf(rig, rng, pack_id if same_id else None)
        for how in ("gather", "range", "warm", "promote"):
            damaged, bad = damage(rng, shelf, other)
            shelf.write(damaged)
            # A block that came out the same is no damage; map blocks of few tokens may.
            bad = {block for block in bad if (damaged[block] != shelf.clean[block]).any()}
            assert len(bad) > 50
            shelf.check(how, bad)
        shelf.write(shelf.clean)
        shelf.check("gather", set())


def test_a_checksum_is_bound_to_its_file_and_its_place(directory: Path, rng: np.random.Generator) -> None:
    """Equal bytes have another checksum in another build or place, in the form that the contract gives it."""
    with Rig(directory) as rig:
        shelf = make_shelf(rig, rng)
        build = shelf.pack.spec.build
        table = shelf.clean[shelf.crc_block].tobytes()
        entries = np.frombuffer(table, np.uint32, shelf.crc_block)
        for number in range(1, shelf.crc_block):
            wanted = crc32c(build + number.to_bytes(8, "little") + shelf.clean[number].tobytes())
            assert entries[number - 1] == wanted, number
        assert entries[-1] == crc32c(build + table[: 4 * (shelf.crc_block - 1)])


def test_header_and_checksum_table_of_another_build_do_not_open_this_file(
    directory: Path, rng: np.random.Generator
) -> None:
    with Rig(directory) as rig:
        pack_id = rng.bytes(32)
        shelf, older = make_shelf(rig, rng, pack_id), make_shelf(rig, rng, pack_id)
        for blocks in ([0], [shelf.crc_block]):
            damaged = shelf.clean.copy()
            damaged[blocks] = older.clean[blocks]
            shelf.write(damaged)
            assert shelf.does_not_open()
        damaged = shelf.clean.copy()
        damaged[[0, shelf.crc_block]] = older.clean[[0, shelf.crc_block]]
        shelf.write(damaged)
        shelf.check("gather", set(range(1, shelf.crc_block)))


@pytest.mark.parametrize("cut_bytes", [1, 511, BLOCK, 3 * BLOCK + 7])
def test_a_file_cut_while_it_is_open_ends_in_data_loss_behind_the_cut(
    directory: Path, rng: np.random.Generator, cut_bytes: int
) -> None:
    with Rig(directory) as rig:
        shelf = make_shelf(rig, rng)
        with shelf.opened() as epoch:
            end = (1 + shelf.data_blocks) * BLOCK - cut_bytes
            os.truncate(shelf.pack.path, end)
            # A read that meets the end fails with all of its extent's blocks: they are asked for in one go.
            lost = shelf.read(OP_GATHER, epoch)
            cut = set(range(end // BLOCK, shelf.data_blocks + 1)) - {0}
            assert cut <= lost
            assert min(lost) > min(cut) - rig.extent_blocks
            assert rig.plane.pack_damaged(shelf.pack.handle)
        assert shelf.does_not_open()


def test_flipped_cut_and_exchanged_sidecars_are_found(tmp_path: Path, rng: np.random.Generator) -> None:
    catalog = Catalog(tmp_path)
    ref = PackRef(bytes(32), bytes(16), 0, TOKENS)
    row = PackRow(ref, bytes(32), Layout(bytes(32), 1, ()), "uid-0", 1)
    (catalog.packs_dir / row.file).write_bytes(b"x")
    catalog.commit_packs([row])
    keys = [SidecarKey(ref.pack_id, ref.build, "hash", name) for name in (b"a", b"b")]
    contents = [rng.bytes(5000), rng.bytes(5000)]
    for key, content in zip(keys, contents, strict=True):
        sidecars.write(catalog, key, content)
    rows = [catalog.sidecar(key) for key in keys]
    paths = [catalog.sidecars_dir / row.file for row in rows if row is not None]
    whole = [path.read_bytes() for path in paths]

    def is_lost() -> bool:
        assert rows[0] is not None
        with pytest.raises(StoreError) as error:
            sidecars.content_of(catalog, rows[0])
        return error.value.code == "DATA_LOSS"

    fd = os.open(paths[0], os.O_WRONLY)
    for bit in rng.choice(len(whole[0]) * 8, SIDECAR_FLIPS, replace=False).tolist():
        place, byte = bit // 8, whole[0][bit // 8]
        os.pwrite(fd, bytes([byte ^ 1 << bit % 8]), place)
        assert is_lost(), f"bit {bit}"
        os.pwrite(fd, bytes([byte]), place)
    os.close(fd)
    for damaged in (whole[0][:-1], whole[0] + b"\0", b"", whole[1], bytes(len(whole[0]))):
        paths[0].write_bytes(damaged)
        assert is_lost()
    paths[0].write_bytes(whole[0])
    assert [sidecars.read(catalog, key) for key in keys] == contents
    catalog.close()


# --- through a real daemon ---


@contextlib.contextmanager
def joined(daemon: Daemon) -> Iterator[TestWorker]:
    with StoreClient.connect(daemon.socket, daemon.broker, secrets.token_hex(4), timeout_s=10.0) as client:
        worker = TestWorker(client)
        yield worker
        worker.close()


RECORDS = np.arange(TOKENS, dtype=np.uint32)


def bound(worker: TestWorker, pack: PackRef, slot: int = 0) -> tuple[str, int]:
    session = worker.client.open_session(LAYOUT, 4096)
    worker.client.attach_packs(session, [pack])
    return session, worker.client.bind_slot(session, slot, [pack], worker.windows(slot))


def test_damage_that_a_gather_meets_takes_the_pack_out_of_service_until_it_is_written_again(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, joined(daemon) as worker, joined(daemon) as second:
        client = worker.client
        session = client.open_session(LAYOUT, 4096)
        pack = worker.commit(session, 1)
        old_session, epoch = bound(worker, pack)
        (path,) = (daemon.data_dir / "packs").iterdir()
        with path.open("r+b") as file:
            file.seek(3 * BLOCK + 17)
            byte = file.read(1)
            file.seek(3 * BLOCK + 17)
            file.write(bytes([byte[0] ^ 1]))
        with pytest.raises(AssertionError):
            worker.gather(0, epoch, RECORDS)
        assert second.client.lookup_prefix(LAYOUT.fingerprint, [candidate(1)]) == []
        with pytest.raises(StoreError, match="DATA_LOSS"):
            second.client.attach_packs(second.client.open_session(LAYOUT, 4096), [pack])
        with AdminClient.connect(daemon.socket, daemon.broker) as admin:
            assert admin.get_status().counters["packs_damaged"] == 1
        fresh = second.commit(second.client.open_session(LAYOUT, 4096), 1)
        assert fresh.build != pack.build
        client.close_session(old_session)  # the old build's end is not the new one's
        assert second.client.lookup_prefix(LAYOUT.fingerprint, [candidate(1)]) == [fresh]
        _, epoch = bound(second, fresh)
        np.testing.assert_array_equal(second.gather(0, epoch, RECORDS), expected([1], RECORDS))
        with AdminClient.connect(daemon.socket, daemon.broker) as admin:
            assert admin.get_status().counters["packs_damaged"] == 0
            assert [(item.bad_blocks, item.error) for item in admin.verify()] == [([], "")]


def test_files_in_each_others_place_are_data_loss_and_an_older_build_is_not_served(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, joined(daemon) as worker:
        packs_dir = daemon.data_dir / "packs"
        (first,) = [worker.commit(worker.client.open_session(LAYOUT, 4096), 1)]
        (older,) = packs_dir.iterdir()
        old_bytes = older.read_bytes()
        (second,) = [worker.commit(worker.client.open_session(LAYOUT, 4096), 2)]
        (other,) = set(packs_dir.iterdir()) - {older}
        other_bytes = other.read_bytes()
        older.write_bytes(other_bytes)
        other.write_bytes(old_bytes)
        for pack in (first, second):
            with pytest.raises(StoreError, match="DATA_LOSS"):
                bound(worker, pack)
        renewed = worker.commit(worker.client.open_session(LAYOUT, 4096), 1)
        (newer,) = set(packs_dir.iterdir()) - {other}
        newer.write_bytes(old_bytes)  # whole and sound, but of the build before
        with pytest.raises(StoreError, match="DATA_LOSS"):
            bound(worker, renewed)
        third = worker.commit(worker.client.open_session(LAYOUT, 4096), 1)
        _, epoch = bound(worker, third)
        np.testing.assert_array_equal(worker.gather(0, epoch, RECORDS), expected([1], RECORDS))
