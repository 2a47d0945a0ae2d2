"""Grades: what of a pack DRAM has when it is written, right out of the staging memory, and at whose cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from decode_worker._native import OP_RANGE, OP_STORE
from kvstore_service._native import KindSpec, PackSpec
from tests.support.rig import ERROR, INVALID_ARGUMENT, OK, UNAVAILABLE, FaultyRig, Pack, Rig, run, spec, until

BLOCK = 4096
EIO = 5


def graded(rng: np.random.Generator, layers: int, lanes: int, blocks: int, most: int = 7) -> NDArray[np.uint8]:
    return rng.integers(0, most + 1, (layers, lanes, blocks), np.uint8)


def seeded_blocks(grades: NDArray[np.uint8], extent_blocks: int) -> NDArray[np.bool_]:
    """Which blocks [layers, lanes, blocks] DRAM is to have: those of a segment that lie in one extent with one that has
    a grade."""
    layers, lanes, blocks = grades.shape
    flat, wanted = grades.reshape(-1), np.zeros(grades.size, bool)
    for segment in range(layers * lanes):
        at = np.arange(segment * blocks, (segment + 1) * blocks)
        for extent in np.unique(at // extent_blocks):
            inside = at[at // extent_blocks == extent]
            wanted[inside] = flat[inside].any()
    return wanted.reshape(grades.shape)


def read_cold(rig: Rig, pack: Pack, epoch: int, layer: int, lane: int, first: int, count: int) -> int:
    """Reads records and checks them; bytes that came from the disk."""
    before = rig.plane.stats()["nvme_read_bytes"]
    one = run(0, epoch, lane=lane, first_pair=first, pair_count=count, arg=first)
    assert rig.ask(OP_RANGE, layer, one).tolist() == [[OK, 0]]
    record_bytes = pack.records.shape[3]
    found = rig.lane(layer, lane, record_bytes)[first : first + count]
    assert (found == pack.records[layer, lane, first : first + count]).all()
    return rig.plane.stats()["nvme_read_bytes"] - before


def check(rig: Rig) -> None:
    census = rig.plane.census()
    assert census["owners_miscounted"] == 0
    assert census["frames_of_owners"] == census["frames_used"] == census["frames_held"]
    assert census["blocks_landed"] == census["blocks_valid"] + census["blocks_evicted"]


@contextmanager
def uploading(rig: Rig, rng: np.random.Generator, tokens: int = 1024, record_bytes: int = 512) -> Iterator[int]:
    what = spec(rng, 1, 1, record_bytes, tokens, rig.extent_blocks, native=rig.native)
    upload = rig.plane.create_upload(str(rig.directory / "upload"), what)
    rig.plane.own_upload(rig.worker, upload)
    yield upload


@pytest.mark.parametrize("record_bytes", [64, 192, 384, 512, 4096])
@pytest.mark.parametrize("extent_blocks", [1, 3, 4, 16])
@pytest.mark.parametrize("copy_threads", [1, 2])
def test_dram_has_what_was_graded_and_it_is_the_file(
    directory: Path, rng: np.random.Generator, record_bytes: int, extent_blocks: int, copy_threads: int
) -> None:
    layers, lanes, tokens = 2, 3, 768
    per_block = BLOCK // record_bytes
    blocks = -(-tokens // per_block)
    grades = graded(rng, layers, lanes, blocks) * (rng.random((layers, lanes, blocks)) < 0.2)
    with Rig(directory, extent_blocks=extent_blocks, copy_threads=copy_threads, window_bytes=32 << 20) as rig:
        pack = rig.make_pack(rng, layers, lanes, record_bytes, tokens, grades=grades)
        check(rig)
        wanted = seeded_blocks(grades, extent_blocks)
        assert rig.plane.stats()["seed_bytes"] == wanted.sum() * BLOCK
        assert rig.plane.verify_pack(pack.handle) == []
        epoch = rig.bind(0, [pack], tokens)
        for layer, lane, block in np.argwhere(wanted):
            count = min(per_block, tokens - block * per_block)
            assert read_cold(rig, pack, epoch, layer, lane, int(block) * per_block, count) == 0
        for layer, lane in np.ndindex(layers, lanes):
            read_cold(rig, pack, epoch, layer, lane, 0, tokens)
        check(rig)


def test_without_grades_nothing_is_put_into_dram(directory: Path, rng: np.random.Generator) -> None:
    with Rig(directory) as rig:
        rig.make_pack(rng)
        rig.make_pack(rng, grades=np.zeros((2, 2, 64), np.uint8))
        assert rig.plane.stats()["seed_bytes"] == rig.plane.stats()["frames_used"] == 0


def test_another_kind_is_graded_too(directory: Path, rng: np.random.Generator) -> None:
    with Rig(directory) as rig:
        kinds = [KindSpec(1, 128, 2, 512), KindSpec(1, 512, 2, 1024)]
        what = PackSpec(rng.bytes(32), rng.bytes(16), bytes(32), bytes(32), 1, kinds, 256, 4)
        upload = rig.plane.create_upload(str(directory / "two"), what)
        rig.plane.own_upload(rig.worker, upload)
        order, most = np.arange(256, dtype=np.uint16), np.full(64, 3, np.uint8)
        first, second = (rng.integers(1, 256, (256, size), np.uint8) for size in (512, 1024))
        assert rig.store(upload, 0, 0, first, order) == (OK, 0)
        assert rig.store(upload, 0, 0, second, order[:0], kind=1, grades=most) == (OK, 0)
        assert rig.plane.stats()["seed_bytes"] == second.size
        rig.plane.close_pack(rig.plane.finish_upload(upload))
        assert rig.plane.stats()["frames_used"] == 0
        check(rig)


def test_a_hint_reads_nothing_of_what_was_graded_once(directory: Path, rng: np.random.Generator) -> None:
    with Rig(directory) as rig:
        grades = np.zeros((2, 2, 64), np.uint8)
        grades[..., 8:12] = 1
        pack = rig.make_pack(rng, grades=grades)
        hot = np.full((2, 2), 64, np.uint32)
        rig.plane.warm(pack.handle, hot)
        rig.plane.warm(pack.handle, hot)
        until(lambda: rig.plane.stats()["warm_bytes"] == 4 * 64 * 512)
        rig.plane.warm(pack.handle, np.full((2, 2), 96, np.uint32))  # blocks 8 to 12 are there
        rig.plane.close_pack(pack.handle)
        assert rig.plane.stats()["warm_bytes"] == 4 * 64 * 512


@pytest.mark.parametrize("bound", ["own", "none"])
def test_higher_grades_take_the_places_of_lower_ones(directory: Path, rng: np.random.Generator, bound: str) -> None:
    frames = 32
    with Rig(directory, dram_bytes=frames * 4 * BLOCK) as rig:
        if bound == "own":
            rig.plane.set_dram_quota(rig.owner, frames * 4 * BLOCK // 2)
            frames //= 2
        low = rig.make_pack(rng, 1, 1, 512, 1024, grades=np.full((1, 1, 128), 1, np.uint8))
        high = rig.make_pack(rng, 1, 1, 512, 512, grades=np.full((1, 1, 64), 3, np.uint8))
        assert rig.plane.stats()["frames_used"] == frames
        epoch = rig.bind(0, [high], 512)
        assert read_cold(rig, high, epoch, 0, 0, 0, 512) == 0
        again = rig.make_pack(rng, 1, 1, 512, 512, grades=np.full((1, 1, 64), 3, np.uint8))
        rig.plane.unbind(rig.worker, 0)
        epoch = rig.bind(0, [high], 512)
        assert read_cold(rig, high, epoch, 0, 0, 0, 512) == 0, "what was used went for a seed"
        check(rig)
        for pack in (low, again):
            rig.plane.close_pack(pack.handle)


def test_grades_harm_nobody_else(directory: Path, rng: np.random.Generator) -> None:
    """Neither what others have used on demand nor their seeds go, and an owner stays below its bound.

    Seeds that nobody uses fade as the tier turns over, by one for each turn: the least that workers give lasts here."""
    frames = 64
    with Rig(directory, dram_bytes=frames * 4 * BLOCK, owner=1) as victim:
        elsewhere = directory / "other"
        elsewhere.mkdir()
        with Rig(elsewhere, owner=2, beside=victim) as greedy:
            used = victim.make_pack(rng, 1, 1, 512, 512)  # 16 frames
            seeded = victim.make_pack(rng, 1, 1, 512, 512, grades=np.full((1, 1, 64), 3, np.uint8))
            epoch = victim.bind(0, [used, seeded], 1024)
            assert victim.ask(OP_RANGE, 0, run(0, epoch, pair_count=512)).tolist() == [[OK, 0]]
            victim.plane.set_dram_quota(2, 16 * 4 * BLOCK)
            for _ in range(3):
                greedy.make_pack(rng, 1, 1, 512, 2048, grades=np.full((1, 1, 256), 255, np.uint8))
                assert victim.plane.owners() == {1: 32, 2: 16}
            victim.plane.set_dram_quota(2, 0)
            greedy.make_pack(rng, 1, 1, 512, 4096, grades=np.full((1, 1, 512), 255, np.uint8))
            assert victim.plane.owners() == {1: 32, 2: 32}
            before = victim.plane.stats()["nvme_read_bytes"]
            assert victim.ask(OP_RANGE, 0, run(0, epoch, pair_count=1024)).tolist() == [[OK, 0]]
            assert victim.plane.stats()["nvme_read_bytes"] == before
            check(victim)


def test_hostile_grades(directory: Path, rng: np.random.Generator) -> None:
    """As many as there are blocks, within the staging memory, or none; any value is a grade."""
    with Rig(directory, staging_bytes=1024 * 514 + 128) as rig, uploading(rig, rng) as upload:
        records, order = rng.integers(1, 256, (1024, 512), np.uint8), np.arange(1024, dtype=np.uint16)
        for count in (1, 127):
            bad = rig.store(upload, 0, 0, records, order, grades=np.full(count, 3, np.uint8))
            assert bad == (ERROR, INVALID_ARGUMENT)
        for count, at in ((129, 0), ((1 << 32) - 1, 0), (128, 64)):
            assert rig.ask(OP_STORE, 0, run(upload, 0, pair_count=count, arg=at)).tolist() == [
                [ERROR, INVALID_ARGUMENT]
            ]
        assert rig.plane.stats()["seed_bytes"] == 0
        assert rig.store(upload, 0, 0, records, order, grades=np.full(128, 255, np.uint8)) == (OK, 0)
        assert rig.plane.stats()["seed_bytes"] == records.size
        rig.plane.abort_upload(upload)
        check(rig)


@pytest.mark.parametrize("end", ["abort", "kill", "close"])
def test_frames_of_an_upload_go_with_it(directory: Path, rng: np.random.Generator, end: str) -> None:
    with Rig(directory) as rig:
        elsewhere = directory / "other"
        elsewhere.mkdir()
        with Rig(elsewhere, beside=rig) as other, uploading(other, rng) as upload:
            records, order = rng.integers(1, 256, (1024, 512), np.uint8), np.arange(1024, dtype=np.uint16)
            assert other.store(upload, 0, 0, records, order, grades=np.full(128, 3, np.uint8)) == (OK, 0)
            assert rig.plane.stats()["frames_used"] == 32
            if end == "abort":
                rig.plane.abort_upload(upload)
            if end == "close":
                return
        assert rig.plane.stats()["frames_used"] == 0
        check(rig)


def test_what_is_stored_again_after_a_failed_write_is_what_is_read(directory: Path, rng: np.random.Generator) -> None:
    """The first bytes of the segment were in DRAM already when its second write failed."""
    with FaultyRig(directory) as rig, uploading(rig, rng) as upload:
        order, most = np.arange(1024, dtype=np.uint16), np.full(128, 3, np.uint8)
        rig.native.io_shim_set([("upload.segment", "fail", 3, 1, EIO)])
        lost = rng.integers(1, 256, (1024, 512), np.uint8)
        assert rig.store(upload, 0, 0, lost, order, grades=most) == (ERROR, UNAVAILABLE)
        assert 0 < rig.plane.stats()["seed_bytes"] < lost.size
        records = rng.integers(1, 256, (1024, 512), np.uint8)
        assert rig.store(upload, 0, 0, records, order, grades=most) == (OK, 0)
        assert rig.plane.finish_upload(upload) == 0
        assert rig.plane.stats()["frames_used"] == 0
        path = directory / "upload"
        pack = Pack(rig.plane.open_pack(str(path), rig.owner), path, None, records[None, None], order[None, None])
        epoch = rig.bind(0, [pack], 1024)
        assert read_cold(rig, pack, epoch, 0, 0, 0, 1024) > 0
        check(rig)


@pytest.mark.parametrize("site", ["pack.open", "pack.header", "pack.crcs"])
def test_a_pack_that_cannot_be_opened_leaves_no_frames(directory: Path, rng: np.random.Generator, site: str) -> None:
    with FaultyRig(directory) as rig, uploading(rig, rng) as upload:
        records, order = rng.integers(1, 256, (1024, 512), np.uint8), np.arange(1024, dtype=np.uint16)
        assert rig.store(upload, 0, 0, records, order, grades=np.full(128, 3, np.uint8)) == (OK, 0)
        rig.native.io_shim_set([(site, "fail", 1, 1, EIO)])
        with pytest.raises(rig.native.NativeError):
            rig.plane.finish_upload(upload)
        assert rig.plane.stats()["frames_used"] == rig.plane.stats()["uploads_open"] == 0
        check(rig)


def test_seeds_take_no_frame_that_was_just_used(directory: Path, rng: np.random.Generator) -> None:
    """A neighbour's grades, never committed, against frames that were all used 32 times a moment ago. If looks
    counted their marks as time, frames that were looked at first would be cold when all had been looked at."""
    elsewhere = directory / "other"
    elsewhere.mkdir()
    with Rig(directory, dram_bytes=512 * 4 * BLOCK, owner=1, window_bytes=16 << 20, staging_bytes=16 << 20) as victim:
        epoch = victim.bind(0, [victim.make_pack(rng, 1, 1, 512, 16384)], 16384)
        for _ in range(32):
            assert victim.ask(OP_RANGE, 0, run(0, epoch, pair_count=16384)).tolist() == [[OK, 0]]
        assert victim.plane.owners() == {1: 512}
        with (
            Rig(elsewhere, beside=victim, owner=2, staging_bytes=16 << 20) as other,
            uploading(other, rng, 16384) as upload,
        ):
            records, order = rng.integers(1, 256, (16384, 512), np.uint8), np.arange(16384, dtype=np.uint16)
            assert other.store(upload, 0, 0, records, order, grades=np.full(2048, 7, np.uint8)) == (OK, 0)
            assert victim.plane.owners() == {1: 512}
