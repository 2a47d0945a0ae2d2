"""Which requests a cold run makes of the blocks that it wants, and what it costs whom when one of them goes wrong."""

import errno
import itertools
import os

import numpy as np
import pytest

from decode_worker._native import OP_GATHER
from kvstore_service._native import DISK_COST, measure_disk, through_blocks
from tests.support.rig import DATA_LOSS, ERROR, OK, UNAVAILABLE, FaultyRig, Rig, run, until

BLOCK, RECORD = 4096, 512
PER_BLOCK = BLOCK // RECORD
TOKENS = 1024
BLOCKS = TOKENS // PER_BLOCK  # of a segment
REQUEST_BLOCKS = 32
ALWAYS = 1 << 40
THROUGH_3 = (14.0, 1.0, 2.0)  # (14 - 2) us are worth 3 blocks of 4 us
OFF = (0.0, 0.0, 0.0)
FIGURES = ("nvme_read_ops", "nvme_read_bytes", "nvme_through_bytes")


def ask(rig, epoch, records, layer=0):
    """The answer of a GATHER of these records to their own places, and what it read: requests, blocks, and of these
    those that were dropped."""
    before = rig.plane.stats()
    pairs = np.stack([records, records], 1).astype(np.uint32)
    (answer,) = rig.ask(OP_GATHER, layer, run(0, epoch, pair_count=len(records)), pairs).tolist()
    after = rig.plane.stats()
    ops, read, through = (after[name] - before[name] for name in FIGURES)
    return answer, (ops, read // BLOCK, through // BLOCK)


def records_in(blocks):
    return np.array(blocks) * PER_BLOCK + 3


def claimed(wanted, through, extents, extent_blocks):
    """Those that have a place in the run's frames, of what is wanted and of the gaps that are read through."""
    gaps = [range(a + 1, b) for a, b in itertools.pairwise(wanted) if b - a - 1 <= through]
    return sorted({*wanted, *(block for gap in gaps for block in gap if block // extent_blocks in extents)})


def requests_of(blocks, through):
    """A plain model: sorted blocks of a segment as [first, end) of each request."""
    made = []
    for block in blocks:
        if made and block - made[-1][1] <= through and block - made[-1][0] < REQUEST_BLOCKS:
            made[-1][1] = block + 1
        else:
            made.append([block, block + 1])
    return made


def test_a_cost_says_how_much_is_read_through():
    assert through_blocks(OFF) == 0
    assert through_blocks((1.0, 0.4, 2.5)) == 0
    assert through_blocks(THROUGH_3) == 3
    assert through_blocks((15.0, 0.4, 2.5)) == 7
    assert through_blocks((1e6, 0.4, 2.5)) == through_blocks((15.0, 0.0, 0.0)) == 16
    assert through_blocks(DISK_COST) == 7


def test_a_disk_is_measured_and_nothing_is_left(directory):
    data_dir = directory / "data"
    data_dir.mkdir()
    request, kib, piece = measure_disk(str(data_dir))
    assert request > 0 or kib > 0
    assert piece >= 0
    assert list(data_dir.iterdir()) == []
    assert through_blocks((request, kib, piece)) <= 16


@pytest.mark.parametrize("cost", [OFF, THROUGH_3, DISK_COST])
@pytest.mark.parametrize("extent_blocks", [1, 2, 4, 16])
def test_random_portions_make_the_requests_of_a_plain_model(directory, rng, extent_blocks, cost):
    through = through_blocks(cost)
    with Rig(directory, extent_blocks=extent_blocks, disk_cost=cost) as rig:
        pack = rig.make_pack(rng, tokens=TOKENS)
        epoch = rig.bind(0, [pack], TOKENS)
        for layer in range(2):
            for first in range(0, BLOCKS, 48):  # few enough for one turn
                span = np.arange(first, min(first + 44, BLOCKS))
                wanted = np.sort(rng.choice(span, int(rng.integers(1, 8)), replace=False))
                answer, read = ask(rig, epoch, records_in(wanted), layer)
                extents = {block // extent_blocks for block in wanted}
                made = requests_of(claimed(wanted, through, extents, extent_blocks), through)
                blocks = [block for begin, end in made for block in range(begin, end)]
                dropped = [block for block in blocks if block // extent_blocks not in extents]
                assert answer == [OK, 0]
                assert read == (len(made), len(blocks), len(dropped)), (wanted, made)
                kept = sorted(set(blocks) - set(dropped))
                assert ask(rig, epoch, records_in(kept), layer) == ([OK, 0], (0, 0, 0))
                for block in kept:
                    record = records_in([block])[0]
                    assert (rig.lane(layer, 0, RECORD)[record] == pack.records[layer, 0, record]).all()


@pytest.mark.parametrize("dram_bytes", [32 << 10, 1 << 20, 64 << 20])
@pytest.mark.parametrize("extent_blocks", [1, 4])
def test_every_byte_is_right_and_whole_runs_take_long_requests(directory, rng, extent_blocks, dram_bytes):
    with Rig(directory, extent_blocks=extent_blocks, dram_bytes=dram_bytes) as rig:
        packs = [rig.make_pack(rng, tokens=TOKENS) for _ in range(2)]
        epoch = rig.bind(0, packs, 2 * TOKENS)
        for share in (0.02, 0.1, 0.5, 1.0):
            records = np.flatnonzero(rng.random(2 * TOKENS) < share)
            answer, (ops, blocks, _) = ask(rig, epoch, records, 1)
            assert answer == [OK, 0]
            expected = np.concatenate([pack.records[1, 0] for pack in packs])[records]
            assert (rig.lane(1, 0, RECORD)[records] == expected).all()
            assert ops <= blocks <= 2 * BLOCKS
        answer, (ops, blocks, _) = ask(rig, epoch, np.arange(2 * TOKENS), 0)
        assert (answer, blocks) == ([OK, 0], 2 * BLOCKS)
        assert ops <= 2 * BLOCKS // 8 or dram_bytes < 1 << 20


def test_what_a_neighbour_reads_is_not_read_twice(directory, rng):
    """Two workers want overlapping blocks at the same time: all get their bytes, and no frame stays held."""
    with (
        Rig(directory, extent_blocks=1, disk_cost=THROUGH_3) as rig,
        Rig(directory, beside=rig, owner=1001) as other,
    ):
        pack = rig.make_pack(rng, tokens=TOKENS)
        epochs = [each.bind(0, [pack], TOKENS) for each in (rig, other)]
        for layer in (0, 1):
            posted = []
            for each, epoch in zip((rig, other), epochs, strict=True):
                records = np.sort(rng.choice(TOKENS, 100, replace=False))
                pairs = np.stack([records, records], 1).astype(np.uint32)
                posted.append((each, records, each.post(OP_GATHER, layer, run(0, epoch, pair_count=100), pairs)))
            for each, records, seq in posted:
                assert each.ring.wait(seq, 20_000_000).tolist() == [[OK, 0]]
                assert (each.lane(layer, 0, RECORD)[records] == pack.records[layer, 0, records]).all()
        census = rig.plane.census()
        assert census["blocks_landed"] == census["blocks_valid"] + census["blocks_evicted"]
        assert rig.plane.stats()["frames_pinned"] == 0


# --- faults: what is read along costs nobody anything ---

WANTED = records_in([0, 2, 5, 9])  # one request of ten blocks, with THROUGH_3


@pytest.fixture
def faulty(directory, rng):
    with FaultyRig(directory, extent_blocks=1, disk_cost=THROUGH_3) as rig:
        pack = rig.make_pack(rng, tokens=TOKENS)
        epoch = rig.bind(0, [pack], TOKENS)
        yield rig, pack, epoch
        assert rig.plane.stats()["frames_pinned"] == 0


def bytes_are_right(rig, pack, records):
    return (rig.lane(0, 0, RECORD)[records] == pack.records[0, 0, records]).all()


def test_a_request_that_fails_is_made_anew_block_by_block(faulty):
    rig, pack, epoch = faulty
    rig.native.io_shim_set([("gather", "fail", 1, 1, errno.EIO)])
    assert ask(rig, epoch, WANTED) == ([OK, 0], (4, 4, 6))
    assert bytes_are_right(rig, pack, WANTED)


def test_a_block_that_cannot_be_read_fails_the_run_that_wants_it(faulty):
    rig, pack, epoch = faulty
    rig.native.io_shim_set([("gather", "fail", 1, ALWAYS, errno.EIO)])
    answer, _ = ask(rig, epoch, WANTED)
    assert answer == [ERROR, UNAVAILABLE]
    rig.native.io_shim_set([])
    assert ask(rig, epoch, WANTED)[0] == [OK, 0]
    assert bytes_are_right(rig, pack, WANTED)


@pytest.mark.parametrize("kept", [4096, 3 * 4096, 5000, 9 * 4096 + 1, 100])
def test_a_request_cut_short_goes_on_where_it_ended(faulty, kept):
    rig, pack, epoch = faulty
    rig.native.io_shim_set([("gather", "shorten", 1, 1, kept)])
    assert ask(rig, epoch, WANTED) == ([OK, 0], (1, 10, 6))
    assert bytes_are_right(rig, pack, WANTED)


def test_a_request_that_the_kernel_wants_again_is_repeated(faulty):
    rig, pack, epoch = faulty
    rig.native.io_shim_set([("gather", "fail", 1, 20, errno.EAGAIN)])
    assert ask(rig, epoch, WANTED) == ([OK, 0], (1, 10, 6))
    assert bytes_are_right(rig, pack, WANTED)


def test_garbage_behind_some_block_loses_what_is_wanted_there(faulty):
    rig, pack, epoch = faulty
    rig.native.io_shim_set([("gather", "tear", 1, 1, 6 * BLOCK)])
    answer, _ = ask(rig, epoch, WANTED)
    assert answer == [ERROR, DATA_LOSS]
    rig.native.io_shim_set([])
    assert ask(rig, epoch, WANTED) == ([OK, 0], (1, 1, 0))  # the others have landed
    assert bytes_are_right(rig, pack, WANTED)


@pytest.mark.parametrize("extent_blocks", [1, 16])
def test_a_damaged_block_between_wanted_ones_fails_nobody_else(directory, rng, extent_blocks):
    with Rig(directory, extent_blocks=extent_blocks, disk_cost=THROUGH_3) as rig:
        pack = rig.make_pack(rng, tokens=TOKENS)
        epoch = rig.bind(0, [pack], TOKENS)
        with open(pack.path, "r+b") as file:
            os.pwrite(file.fileno(), b"damage", 4 * BLOCK + 100)  # block 3 of the first segment, behind the header
        assert ask(rig, epoch, WANTED)[0] == [OK, 0]
        assert bytes_are_right(rig, pack, WANTED)
        assert ask(rig, epoch, records_in([3]))[0] == [ERROR, DATA_LOSS]
        assert ask(rig, epoch, records_in([4, 6]))[0] == [OK, 0]


# --- portions: what follows is queued while the last reads are in flight ---


def test_the_next_portion_is_read_while_the_last_one_waits(directory, rng):
    with FaultyRig(directory, extent_blocks=1, disk_cost=OFF, dram_bytes=1 << 20, io_depth=256) as rig:
        pack = rig.make_pack(rng, lanes=1, tokens=4096)
        epoch = rig.bind(0, [pack], 4096)
        portion = rig.plane.stats()["frames"] // 4
        records = records_in(range(0, 512, 2))  # 256 blocks, each a request: four portions
        rig.native.io_shim_set([("gather", "delay", 1, 1, 2_000_000)])
        pairs = np.stack([records, records], 1).astype(np.uint32)
        seq = rig.post(OP_GATHER, 0, run(0, epoch, pair_count=len(records)), pairs)
        until(lambda: rig.native.io_shim_counts()["gather"][0] > portion)
        assert rig.plane.stats()["frames_pinned"] <= 2 * portion
        assert rig.ring.wait(seq, 20_000_000).tolist() == [[OK, 0]]
        assert (rig.lane(0, 0, RECORD)[records] == pack.records[0, 0, records]).all()
        assert rig.plane.stats()["frames_pinned"] == 0


@pytest.mark.parametrize("nth", [1, 40, 70, 130])
def test_a_portion_that_fails_while_the_last_one_waits_ends_the_run_and_holds_nothing(directory, rng, nth):
    with FaultyRig(directory, extent_blocks=1, disk_cost=OFF, dram_bytes=1 << 20, io_depth=256) as rig:
        pack = rig.make_pack(rng, lanes=1, tokens=4096)
        epoch = rig.bind(0, [pack], 4096)
        records = records_in(range(0, 512, 2))
        rig.native.io_shim_set([("gather", "fail", nth, 1, errno.EIO), ("gather", "delay", nth + 1, 3, 50_000)])
        assert ask(rig, epoch, records)[0] == [ERROR, UNAVAILABLE]
        rig.native.io_shim_set([])
        assert ask(rig, epoch, records)[0] == [OK, 0]
        assert (rig.lane(0, 0, RECORD)[records] == pack.records[0, 0, records]).all()
        until(lambda: rig.plane.stats()["frames_pinned"] == 0)
        census = rig.plane.census()
        assert census["blocks_landed"] == census["blocks_valid"] + census["blocks_evicted"]


def test_a_run_that_is_given_up_leaves_its_portions_to_their_reads(directory, rng):
    with FaultyRig(directory, extent_blocks=1, disk_cost=OFF, dram_bytes=1 << 20, io_depth=256, wait_ms=400) as rig:
        pack = rig.make_pack(rng, lanes=1, tokens=4096)
        epoch = rig.bind(0, [pack], 4096)
        records = records_in(range(0, 512, 2))
        rig.native.io_shim_set([("gather", "delay", 60, 8, 1_000_000)])
        assert ask(rig, epoch, records)[0] == [ERROR, UNAVAILABLE]
        until(lambda: rig.plane.stats()["frames_pinned"] == 0)
        rig.native.io_shim_set([])
        assert ask(rig, epoch, records)[0] == [OK, 0]
        assert (rig.lane(0, 0, RECORD)[records] == pack.records[0, 0, records]).all()
