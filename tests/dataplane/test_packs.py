"""Packs: written through the ring, read back through the ring, and never wrong in silence."""

import os

import numpy as np
import pytest

from decode_worker._native import OP_GATHER, OP_RANGE, OP_STORE
from kvstore_service._native import DataPlane, KindSpec, NativeError, PackSpec
from tests.support.rig import ABORTED, DATA_LOSS, ERROR, INVALID_ARGUMENT, OK, FaultyRig, Rig, all_records, run, spec

BLOCK = 4096


def flip(path, offset, value=None):
    with open(path, "r+b") as file:
        file.seek(offset)
        old = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([old ^ 0x10 if value is None else value]))
        file.flush()
        os.fsync(file.fileno())


def whole(rig, pack, epoch, layer, lane):
    tokens = pack.records.shape[2]
    return tuple(rig.ask(OP_RANGE, layer, run(0, epoch, lane=lane, first_pair=0, pair_count=tokens))[0])


@pytest.mark.parametrize("record_bytes", [64, 256, 384, 512, 1024, 4096])
@pytest.mark.parametrize("extent_blocks", [1, 3, 4, 16])
def test_round_trip(directory, rng, record_bytes, extent_blocks):
    with Rig(directory, extent_blocks=extent_blocks, window_bytes=16 << 20) as rig:
        packs = [rig.make_pack(rng, record_bytes=record_bytes, tokens=t) for t in (256, 768, 512)]
        for pack in packs:
            assert (rig.map_of(pack) == pack.map).all()
            assert rig.plane.verify_pack(pack.handle) == []
        total, places = 1536, 700
        epoch = rig.bind(0, packs, places)
        for layer in range(2):
            for lane in range(2):
                want = all_records(packs, layer, lane)
                records = np.sort(rng.choice(total, 400, replace=False)).astype(np.uint32)
                where = rng.permutation(places)[:400].astype(np.uint32)
                pairs = np.stack([records, where], 1)
                assert rig.ask(OP_GATHER, layer, run(0, epoch, lane=lane, pair_count=400), pairs).tolist() == [[OK, 0]]
                assert (rig.lane(layer, lane, record_bytes)[where] == want[records]).all()
                first = int(rng.integers(0, total - 600))
                ranged = run(0, epoch, lane=lane, first_pair=first, pair_count=600, arg=100)
                assert rig.ask(OP_RANGE, layer, ranged).tolist() == [[OK, 0]]
                assert (rig.lane(layer, lane, record_bytes)[100:700] == want[first : first + 600]).all()


def test_header_says_what_was_asked(directory, rng):
    with Rig(directory) as rig:
        pack = rig.make_pack(rng)
        read = rig.plane.pack_spec(pack.handle)
        for name in (
            "pack_id",
            "build",
            "parent",
            "fingerprint",
            "layers",
            "tokens",
            "extent_blocks",
            "file_bytes",
        ):
            assert getattr(read, name) == getattr(pack.spec, name)
        assert pack.path.stat().st_size == read.file_bytes
        assert read.segment_bytes(0) == 512 * 512


def test_second_kind_has_no_map(directory, rng):
    with Rig(directory) as rig:
        kinds = [KindSpec(2, 128, 2, 512), KindSpec(1, 512, 2, 1024)]
        what = PackSpec(rng.bytes(32), rng.bytes(16), bytes(32), bytes(32), 1, kinds, 256, 4)
        upload = rig.plane.create_upload(str(directory / "two"), what)
        rig.plane.own_upload(rig.worker, upload)
        order = np.arange(256, dtype=np.uint16)
        none = np.zeros(0, np.uint16)
        for lane in range(2):
            assert rig.store(upload, 0, lane, rng.integers(1, 256, (256, 512), np.uint8), order) == (OK, 0)
        assert rig.store(upload, 0, 0, rng.integers(1, 256, (256, 1024), np.uint8), none, kind=1) == (OK, 0)
        assert rig.store(upload, 0, 1, rng.integers(1, 256, (256, 1024), np.uint8), none, kind=1)[0] == ERROR
        rig.plane.finish_upload(upload)
        pack = rig.plane.open_pack(str(directory / "two"))
        assert len(rig.plane.pack_spec(pack).kinds) == 2
        assert rig.plane.verify_pack(pack) == []


def test_flipped_byte_fails_only_the_run_that_wants_it(directory, rng):
    with Rig(directory) as rig:
        pack = rig.make_pack(rng)
        flip(pack.path, BLOCK + 5 * BLOCK + 100)  # layer 0, lane 0, records 40..47
        epoch = rig.bind(0, [pack], 512)
        before = rig.lane(0, 0, 512).copy()
        pairs = np.stack([np.arange(512), np.arange(512)], 1).astype(np.uint32)
        runs = np.concatenate(
            [
                run(0, epoch, lane=0, first_pair=32, pair_count=16),  # holds the bad block
                run(0, epoch, lane=0, first_pair=200, pair_count=64),
                run(0, epoch, lane=1, pair_count=512),
            ]
        )
        assert rig.ask(OP_GATHER, 0, runs, pairs).tolist() == [[ERROR, DATA_LOSS], [OK, 0], [OK, 0]]
        lane = rig.lane(0, 0, 512)
        assert (lane[40:48] == before[40:48]).all(), "a bad record was stored"
        assert (lane[200:264] == pack.records[0, 0, 200:264]).all()
        assert (rig.lane(0, 1, 512) == pack.records[0, 1]).all()
        assert rig.plane.stats()["crc_errors"] > 0
        assert rig.plane.verify_pack(pack.handle) == [6]
        flip(pack.path, BLOCK + 5 * BLOCK + 100)  # healed: a bad block was not kept
        assert whole(rig, pack, epoch, 0, 0) == (OK, 0)
        assert (rig.lane(0, 0, 512) == pack.records[0, 0]).all()


def test_swapped_blocks_and_zeroed_block(directory, rng):
    with Rig(directory) as rig:
        pack = rig.make_pack(rng)
        with open(pack.path, "r+b") as file:
            data = bytearray(file.read())
            data[BLOCK * 2 : BLOCK * 3], data[BLOCK * 3 : BLOCK * 4] = (
                data[BLOCK * 3 : BLOCK * 4],
                data[BLOCK * 2 : BLOCK * 3],
            )
            data[BLOCK * 70 : BLOCK * 71] = bytes(BLOCK)
            file.seek(0)
            file.write(data)
            os.fsync(file.fileno())
        assert rig.plane.verify_pack(pack.handle) == [2, 3, 70]
        epoch = rig.bind(0, [pack], 512)
        assert whole(rig, pack, epoch, 0, 0) == (ERROR, DATA_LOSS)
        assert whole(rig, pack, epoch, 0, 1) == (ERROR, DATA_LOSS)
        assert whole(rig, pack, epoch, 1, 0) == (OK, 0)


def test_damaged_header_table_map_and_length(directory, rng):
    with Rig(directory) as rig:
        pack = rig.make_pack(rng)
        rig.plane.close_pack(pack.handle)
        size = pack.path.stat().st_size
        for offset in [0, 9, 60, 200, 300, 2000, size - BLOCK + 4]:
            flip(pack.path, offset)
            with pytest.raises(NativeError) as error:
                rig.plane.open_pack(str(pack.path))
            assert error.value.code == "DATA_LOSS", offset
            flip(pack.path, offset)
        handle = rig.plane.open_pack(str(pack.path))
        flip(pack.path, BLOCK * (1 + 4 * 64) + 3)  # the first block of the map
        with open(os.devnull, "wb") as nowhere, pytest.raises(NativeError) as error:
            rig.plane.copy_map(handle, nowhere.fileno())
        assert error.value.code == "DATA_LOSS"
        rig.plane.close_pack(handle)
        os.truncate(pack.path, size - BLOCK)
        with pytest.raises(NativeError) as error:
            rig.plane.open_pack(str(pack.path))
        assert error.value.code == "DATA_LOSS"
        with pytest.raises(NativeError) as error:
            rig.plane.open_pack(str(directory / "absent"))
        assert error.value.code == "NOT_FOUND"


def test_file_cut_while_open_is_data_loss(directory, rng):
    with Rig(directory) as rig:
        pack = rig.make_pack(rng)
        epoch = rig.bind(0, [pack], 512)
        os.truncate(pack.path, BLOCK * 10)
        assert whole(rig, pack, epoch, 1, 0) == (ERROR, DATA_LOSS)


def test_nothing_is_readable_before_finish(directory, rng):
    with Rig(directory) as rig:
        upload = rig.plane.create_upload(str(directory / "p"), spec(rng, 1, 1, 512, 256))
        with pytest.raises(NativeError) as error:
            rig.plane.open_pack(str(directory / "p"))
        assert error.value.code == "DATA_LOSS"
        with pytest.raises(NativeError) as error:
            rig.plane.finish_upload(upload)
        assert error.value.code == "FAILED_PRECONDITION"
        with pytest.raises(NativeError):
            rig.plane.create_upload(str(directory / "p"), spec(rng, 1, 1, 512, 256))
        rig.plane.abort_upload(upload)
        assert not (directory / "p").exists()


def test_refused_stores(directory, rng):
    with Rig(directory) as rig:
        upload = rig.plane.create_upload(str(directory / "p"), spec(rng, 1, 2, 512, 256))
        records, order = rng.integers(1, 256, (256, 512), np.uint8), np.arange(256, dtype=np.uint16)
        bad = (ERROR, INVALID_ARGUMENT)
        assert rig.store(upload, 0, 0, records, order) == bad  # nobody's yet
        rig.plane.own_upload(rig.worker, upload)
        assert rig.store(upload + 1, 0, 0, records, order) == bad
        assert rig.store(upload, 1, 0, records, order) == bad
        assert rig.store(upload, 0, 2, records, order) == bad
        assert rig.store(upload, 0, 0, records, order, kind=1) == bad
        for arg in (rig.staging_bytes - 100, rig.staging_bytes + 1, 2**64 - 8, 2**63):
            beyond = run(upload, 0, lane=0, arg=arg)
            assert tuple(rig.ask(OP_STORE, 0, beyond)[0]) == bad
        zeros = records.copy()
        zeros[64:72] = 0
        assert rig.store(upload, 0, 0, zeros, order) == bad
        assert rig.store(upload, 0, 0, records, order) == (OK, 0)
        assert rig.store(upload, 0, 0, records, order) == bad  # twice
        rig.plane.abort_upload(upload)
        assert rig.store(upload, 0, 0, records, order) == bad
        assert rig.plane.stats()["uploads_open"] == 0


@pytest.mark.parametrize("tokens", [256, 2048, 2304, 16384])
def test_a_map_that_is_no_permutation_fails_its_run(directory, rng, tokens):
    with Rig(directory) as rig:
        upload = rig.plane.create_upload(str(directory / "p"), spec(rng, 1, 1, 64, tokens))
        rig.plane.own_upload(rig.worker, upload)
        records = rng.integers(1, 256, (tokens, 64), np.uint8)
        order = rng.permutation(tokens).astype(np.uint16)
        for at, token in ((0, order[-1]), (tokens - 1, order[0]), (tokens // 2, tokens), (tokens - 1, 0xFFFF)):
            wrong = order.copy()
            wrong[at] = token
            assert rig.store(upload, 0, 0, records, wrong) == (ERROR, INVALID_ARGUMENT)
            assert rig.plane.upload_missing(upload) == 1
        assert rig.store(upload, 0, 0, records, order) == (OK, 0)
        rig.plane.finish_upload(upload)


@pytest.mark.parametrize("tokens", [256, 1792, 2048, 2304, 16384])
def test_every_segment_has_whole_blocks_for_its_map(directory, rng, tokens):
    """They stand between the records and the checksums; what a reader gets is without their padding."""
    layers, lanes, blocks = 3, 5, -(-tokens * 2 // BLOCK)
    with Rig(directory) as rig:
        pack = rig.make_pack(rng, layers, lanes, 64, tokens)
        assert (rig.map_of(pack) == pack.map).all()
        assert rig.plane.verify_pack(pack.handle) == []
        first = 1 + layers * lanes * tokens // 64
        segments = np.fromfile(pack.path, np.uint16, offset=first * BLOCK, count=layers * lanes * blocks * BLOCK // 2)
        segments = segments.reshape(layers, lanes, -1)
        assert (segments[..., :tokens] == pack.map).all()
        assert not segments[..., tokens:].any()
        checked = layers * lanes * (tokens // 64 + blocks)
        assert pack.spec.file_bytes == (1 + checked + -(-(checked + 1) * 4 // BLOCK)) * BLOCK


def test_abort_waits_for_writes_and_answers_their_runs(directory, rng):
    with FaultyRig(directory) as rig:
        upload = rig.plane.create_upload(str(directory / "p"), spec(rng, 1, 1, 512, 1024, native=rig.native))
        rig.plane.own_upload(rig.worker, upload)
        rig.staging[:] = 1
        rig.staging[1024 * 512 : 1024 * 514] = np.arange(1024, dtype=np.uint16).view(np.uint8)
        rig.set_faults(delay_us=50_000)
        seq = rig.ring.post(OP_STORE, 0, 0, run(upload, 0), np.zeros((0, 2), np.uint32))
        rig.plane.abort_upload(upload)
        result = tuple(rig.ring.wait(seq, 5_000_000)[0])
        assert result in ((ERROR, ABORTED), (ERROR, INVALID_ARGUMENT))
        assert not (directory / "p").exists()


def test_an_upload_has_one_owner(directory, rng):
    with Rig(directory) as rig:
        other = rig.plane.add_worker(rig.window_fd, 4096, rig.staging_fd, 4096, 1, rig.owner)
        upload = rig.plane.create_upload(str(directory / "p"), spec(rng, 1, 1, 512, 256))
        rig.plane.own_upload(other, upload)
        with pytest.raises(NativeError) as error:
            rig.plane.own_upload(rig.worker, upload)
        assert error.value.code == "FAILED_PRECONDITION"
        records, order = rng.integers(1, 256, (256, 512), np.uint8), np.arange(256, dtype=np.uint16)
        assert rig.store(upload, 0, 0, records, order) == (ERROR, INVALID_ARGUMENT)
        rig.plane.remove_worker(other)
        assert not (directory / "p").exists()


def test_other_extent_size_is_refused(directory, rng):
    with Rig(directory, extent_blocks=8) as rig:
        pack = rig.make_pack(rng)
    plane = DataPlane(1 << 20, 8, 1, extent_blocks=4)
    with pytest.raises(NativeError) as error:
        plane.open_pack(str(pack.path))
    assert error.value.code == "FAILED_PRECONDITION"
    plane.close()


def test_bad_shapes(rng):
    for layers, record_bytes, tokens, extent in [
        (0, 512, 256, 4),
        (1, 500, 256, 4),
        (1, 512, 100, 4),
        (1, 512, 256, 17),
        (1, 8192, 256, 4),
    ]:
        with pytest.raises(NativeError) as error:
            spec(rng, layers, 1, record_bytes, tokens, extent)
        assert error.value.code == "INVALID_ARGUMENT"
    with pytest.raises(NativeError):
        PackSpec(b"short", bytes(16), bytes(32), bytes(32), 1, [KindSpec(1, 128, 2, 512)], 256, 4)
