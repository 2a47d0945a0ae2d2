"""Packs, rewritten in another order of their records, and the samples of runs that such an order is learnt from."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest

from decode_worker._native import OP_GATHER, OP_RANGE
from kvstore_service._native import SAMPLED_EVERY, SAMPLED_RUNS, KindSpec, NativeError, PackSpec
from tests.dataplane.test_packs import flip
from tests.support.rig import OK, FaultyRig, Pack, Rig, run

BLOCK = 4096
SAMPLES = {"learn_bytes": 64 << 20}


def other_build(rng, pack: Pack, **changed) -> PackSpec:
    s = pack.spec
    fields = {"pack_id": s.pack_id, "build": rng.bytes(16), "parent": s.parent, "fingerprint": s.fingerprint}
    shape = {"layers": s.layers, "kinds": s.kinds, "tokens": s.tokens, "extent_blocks": s.extent_blocks}
    return PackSpec(**{**fields, **shape, "record_order": 6, **changed})


@contextmanager
def upload_of(rig, pack, what):
    path = pack.path.with_suffix(".new")
    upload = rig.plane.create_upload(str(path), what)
    yield upload, path
    with suppress(NativeError):  # it was finished
        rig.plane.abort_upload(upload)


def orders_of(rng, pack):
    layers, lanes, tokens, _ = pack.records.shape
    return rng.permuted(np.tile(np.arange(tokens, dtype=np.uint16), (layers, lanes, 1)), axis=2)


def rewritten(rig, rng, pack, orders) -> Pack:
    layers, lanes, _, _ = pack.records.shape
    what = other_build(rng, pack)
    with upload_of(rig, pack, what) as (upload, path):
        for layer in range(layers):
            for lane in range(lanes):
                rig.plane.rewrite_segment(pack.handle, upload, 0, layer, lane, orders[layer, lane])
        rig.plane.finish_upload(upload)
    records = np.take_along_axis(pack.records, orders[..., None].astype(np.intp), axis=2)
    order = np.take_along_axis(pack.map, orders.astype(np.intp), axis=2)
    return replace(
        pack, handle=rig.plane.open_pack(str(path), rig.owner), path=path, spec=what, records=records, map=order
    )


@pytest.mark.parametrize("record_bytes", [64, 128, 192, 512, 1024, 4096])
def test_a_rewritten_pack_has_every_record_where_the_order_says(directory, rng, record_bytes):
    with Rig(directory, window_bytes=48 << 20, staging_bytes=8 << 20) as rig:
        shape = {name: int(rng.integers(1, 4)) for name in ("layers", "lanes")}
        tokens = 256 * int(rng.integers(1, 5))
        pack = rig.make_pack(rng, record_bytes=record_bytes, tokens=tokens, **shape)
        new = rewritten(rig, rng, pack, orders_of(rng, pack))
        assert rig.plane.verify_pack(new.handle) == []
        assert rig.plane.pack_spec(new.handle).record_order == 6
        assert (rig.map_of(new) == new.map).all()
        epoch = rig.bind(0, [new], tokens)
        for layer, lane in np.ndindex(shape["layers"], shape["lanes"]):
            whole = run(0, epoch, lane=lane, first_pair=0, pair_count=tokens)
            assert rig.ask(OP_RANGE, layer, whole).tolist() == [[OK, 0]]
            assert (rig.lane(layer, lane, record_bytes)[:tokens] == new.records[layer, lane]).all()


def test_a_flip_in_the_source_is_data_loss_and_the_segment_stays_missing(directory, rng):
    with Rig(directory) as rig:
        pack = rig.make_pack(rng)
        orders = orders_of(rng, pack)
        segment = pack.records[0, 0].nbytes
        at = {(0, 1): BLOCK + segment + 77, (1, 0): BLOCK + 4 * segment + 2 * BLOCK + 5}  # records; a map
        for offset in at.values():
            flip(pack.path, offset)
        with upload_of(rig, pack, other_build(rng, pack)) as (upload, path):
            for layer, lane in np.ndindex(2, 2):
                if (layer, lane) not in at:
                    rig.plane.rewrite_segment(pack.handle, upload, 0, layer, lane, orders[layer, lane])
                    continue
                with pytest.raises(NativeError, match="checksum of block") as lost:
                    rig.plane.rewrite_segment(pack.handle, upload, 0, layer, lane, orders[layer, lane])
                assert lost.value.code == "DATA_LOSS"
            assert rig.plane.upload_missing(upload) == 2
            with pytest.raises(NativeError, match="2 segments are missing"):
                rig.plane.finish_upload(upload)
        assert not path.exists()


def test_a_block_that_would_be_all_zero_is_refused(directory, rng):
    """Every block of the source has something in it; gathered, the empty records fill one."""
    with Rig(directory) as rig:
        records = rng.integers(1, 256, (256, 512), np.uint8)
        records[::8] = 0
        pack = rig.make_pack(rng, layers=1, lanes=1, tokens=256)
        what = other_build(rng, pack, pack_id=rng.bytes(32))
        source = rig.plane.create_upload(str(directory / "zeros"), what)
        rig.plane.own_upload(rig.worker, source)
        assert rig.store(source, 0, 0, records, np.arange(256, dtype=np.uint16)) == (OK, 0)
        rig.plane.finish_upload(source)
        pack = replace(pack, spec=what, handle=rig.plane.open_pack(str(directory / "zeros"), rig.owner))
        with upload_of(rig, pack, other_build(rng, pack)) as (upload, _):
            order = (-(records == 0).all(axis=1).astype(int)).argsort(kind="stable").astype(np.uint16)
            with pytest.raises(NativeError, match="all zero") as refused:
                rig.plane.rewrite_segment(pack.handle, upload, 0, 0, 0, order)
            assert refused.value.code == "FAILED_PRECONDITION"
            rig.plane.rewrite_segment(pack.handle, upload, 0, 0, 0, np.arange(256, dtype=np.uint16))


def test_what_is_no_rewrite_of_the_pack_is_refused(directory, rng):
    with Rig(directory) as rig:
        pack = rig.make_pack(rng)
        good = np.arange(512, dtype=np.uint16)
        wrong = [
            {"pack_id": rng.bytes(32)},
            {"tokens": 256},
            {"parent": rng.bytes(32)},
            {"kinds": [KindSpec(2, 128, 2, 256)]},
        ]
        for changed in wrong:
            with (
                upload_of(rig, pack, other_build(rng, pack, **changed)) as (upload, _),
                pytest.raises(NativeError, match="not of this pack"),
            ):
                rig.plane.rewrite_segment(pack.handle, upload, 0, 0, 0, good)
        with upload_of(rig, pack, other_build(rng, pack)) as (upload, _):
            for order in (good[:-1], np.zeros(512, np.uint16), good[::-1] + np.uint16(1), good[:0].copy()):
                with pytest.raises(NativeError, match="permutation"):
                    rig.plane.rewrite_segment(pack.handle, upload, 0, 0, 0, np.ascontiguousarray(order))
            for kind, layer, lane in ((1, 0, 0), (0, 2, 0), (0, 0, 2)):
                with pytest.raises(NativeError, match="no such segment"):
                    rig.plane.rewrite_segment(pack.handle, upload, kind, layer, lane, good)
            rig.plane.rewrite_segment(pack.handle, upload, 0, 0, 0, good)
            with pytest.raises(NativeError, match="there already"):
                rig.plane.rewrite_segment(pack.handle, upload, 0, 0, 0, good)
            rig.plane.own_upload(rig.worker, upload)
            with pytest.raises(NativeError, match="a worker's"):
                rig.plane.rewrite_segment(pack.handle, upload, 0, 0, 1, good)


@pytest.mark.parametrize("site", ["pack.segment", "pack.map", "upload.segment", "upload.map"])
def test_a_disk_that_fails_leaves_the_segment_missing(directory, rng, site):
    with FaultyRig(directory) as rig:
        pack = rig.make_pack(rng, layers=1, lanes=1)
        order = orders_of(rng, pack)[0, 0]
        spec = pack.spec
        what = rig.native.PackSpec(
            spec.pack_id, rng.bytes(16), spec.parent, spec.fingerprint, 1, spec.kinds, spec.tokens, 4, 6
        )
        with_it = rig.plane.create_upload(str(directory / "new"), what)
        rig.native.io_shim_set([(site, "fail", 1, 1, 5)])
        with pytest.raises(rig.native.NativeError) as failed:
            rig.plane.rewrite_segment(pack.handle, with_it, 0, 0, 0, order)
        assert failed.value.code == "UNAVAILABLE"
        assert rig.plane.upload_missing(with_it) == 1
        rig.plane.rewrite_segment(pack.handle, with_it, 0, 0, 0, order)
        rig.plane.finish_upload(with_it)
        assert rig.plane.verify_pack(rig.plane.open_pack(str(directory / "new"), rig.owner)) == []


def gathers(rig, epoch, wanted, lane=0, layer=0):
    for records in wanted:
        pairs = np.stack([records, np.arange(len(records))], 1).astype(np.uint32)
        assert rig.ask(OP_GATHER, layer, run(0, epoch, lane=lane, pair_count=len(records)), pairs).tolist() == [[OK, 0]]


@pytest.mark.parametrize("dram_bytes", [4 << 20, 64 << 20])
def test_samples_say_which_runs_wanted_each_record(directory, rng, dram_bytes):
    """The first ones, then one in SAMPLED_EVERY, whether frames had them or the disk was read. Records of a run go
    over two packs."""
    with Rig(directory, dram_bytes=dram_bytes, window_options=SAMPLES) as rig:
        packs = [rig.make_pack(rng, tokens=tokens) for tokens in (512, 256)]
        assert not rig.plane.run_samples(packs[0].handle).any()
        epoch = rig.bind(0, packs, 768)
        runs = SAMPLED_EVERY * (SAMPLED_RUNS + 7)
        wanted = [np.sort(rng.choice(768, 20, replace=False)) for _ in range(runs)]
        wanted = [np.union1d(records, [3, 700]) for records in wanted]  # both packs, each time
        gathers(rig, epoch, wanted, lane=1, layer=1)
        expected = np.zeros(768, np.uint64)
        for number, records in enumerate(wanted, start=1):
            if number > SAMPLED_RUNS and number % SAMPLED_EVERY:
                continue
            column = number // SAMPLED_EVERY if number > SAMPLED_RUNS else number
            bit = np.uint64(1) << np.uint64(column % SAMPLED_RUNS)
            expected &= ~bit
            expected[records] |= bit
        found = [rig.plane.run_samples(pack.handle) for pack in packs]
        assert (np.concatenate([samples[1, 1] for samples in found]) == expected).all()
        for samples in found:
            samples[1, 1] = 0
            assert not samples.any()


def test_ranges_are_no_samples(directory, rng):
    with Rig(directory, window_options=SAMPLES) as rig:
        pack = rig.make_pack(rng)
        epoch = rig.bind(0, [pack], 512)
        for _ in range(2 * SAMPLED_EVERY):
            assert rig.ask(OP_RANGE, 0, run(0, epoch, pair_count=512)).tolist() == [[OK, 0]]
        assert not rig.plane.run_samples(pack.handle).any()


def test_samples_take_no_more_memory_than_they_may(directory, rng):
    one = 2 * 2 * 512 * 8
    with Rig(directory, window_options={"learn_bytes": 2 * one}) as rig:
        packs = [rig.make_pack(rng) for _ in range(3)]
        known = [rig.plane.run_samples(pack.handle) is not None for pack in packs]
        assert known == [True, True, False]
        assert rig.plane.stats()["learning_bytes"] == 2 * one
        rig.plane.close_pack(packs[0].handle)
        assert rig.plane.stats()["learning_bytes"] == one
        again = rig.plane.open_pack(str(packs[2].path), rig.owner)
        assert rig.plane.run_samples(again) is not None


def test_without_memory_for_them_there_are_no_samples(directory, rng):
    with Rig(directory) as rig:
        assert rig.plane.run_samples(rig.make_pack(rng).handle) is None


def test_samples_are_read_while_two_threads_take_them(directory, rng):
    with Rig(directory, copy_threads=2, window_options=SAMPLES) as rig:
        pack = rig.make_pack(rng)
        epoch = rig.bind(0, [pack], 512)
        second = rig.add_ring()
        wanted = [np.sort(rng.choice(512, 64, replace=False)) for _ in range(50)]

        def also() -> None:
            for records in wanted:
                pairs = np.stack([records, np.arange(64, 128)], 1).astype(np.uint32)
                second.wait(second.post(OP_GATHER, 0, 0, run(0, epoch, pair_count=64), pairs, 10_000_000), 10_000_000)

        rig.ring, beside = rig.add_ring(), threading.Thread(target=also)
        beside.start()
        gathers(rig, epoch, wanted)
        for _ in range(20):
            rig.plane.run_samples(pack.handle)
        beside.join(30)
        assert rig.plane.run_samples(pack.handle)[0, 0].any()
