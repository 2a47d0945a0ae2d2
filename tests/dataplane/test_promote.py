"""PROMOTE: what a worker expects to want is read ahead, never in the way of what anybody wants."""

import time

import numpy as np
import pytest

from decode_worker._native import OP_GATHER, OP_PROMOTE, OP_RANGE
from tests.support.rig import OK, WAIT_US, FaultyRig, Rig, run, until

BLOCK, RECORD = 4096, 512
PER_BLOCK, PER_EXTENT = 8, 32
ALWAYS, STALL_US = 1 << 40, 500_000


def pairs_of(records: np.ndarray, places: np.ndarray) -> np.ndarray:
    return np.stack([records, places], 1).astype(np.uint32)


def promote(rig: Rig, epoch: int, records: np.ndarray, layer: int = 0) -> None:
    hint = run(0, epoch, pair_count=len(records))
    rig.post(OP_PROMOTE, layer, hint, pairs_of(records, np.zeros(len(records))))


def gather(rig: Rig, epoch: int, records: np.ndarray, layer: int = 0) -> None:
    wanted = run(0, epoch, pair_count=len(records))
    answer = rig.ask(OP_GATHER, layer, wanted, pairs_of(records, np.arange(len(records))))
    assert answer.tolist() == [[OK, 0]]


def slow_disk(rig: Rig) -> None:
    """For what is read ahead."""
    rig.native.io_shim_set([("read_ahead", "delay", 1, ALWAYS, STALL_US)])


def warm_bytes(rig: Rig) -> int:
    return rig.plane.stats()["warm_bytes"]


def test_only_the_blocks_of_its_records_are_read(directory, rng):
    with Rig(directory) as rig:
        epoch = rig.bind(0, [rig.make_pack(rng, tokens=1024)], 1024)
        wanted = np.array([0, 1, 2 * PER_BLOCK, 3 * PER_EXTENT + 5])
        promote(rig, epoch, wanted)
        until(lambda: warm_bytes(rig) == 3 * BLOCK)
        before = rig.plane.stats()["nvme_read_bytes"]
        gather(rig, epoch, wanted)
        assert rig.plane.stats()["nvme_read_bytes"] == before
        assert warm_bytes(rig) == 3 * BLOCK


def test_what_two_workers_of_a_user_hint_is_read_and_charged_once(directory, rng):
    """Sessions behind one prefix share its packs, and so their frames: hints and misses of all are one read."""
    with Rig(directory) as rig, Rig(directory, beside=rig) as other:
        pack = rig.make_pack(rng, tokens=1024)
        records = np.arange(0, 1024, PER_BLOCK)
        epochs = [each.bind(0, [pack], 1024) for each in (rig, other)]
        before = rig.plane.stats()["nvme_read_bytes"]
        for _ in range(3):
            for each, epoch in zip((rig, other), epochs, strict=True):
                promote(each, epoch, records)
        for each, epoch in zip((rig, other), epochs, strict=True):
            gather(each, epoch, records)
        stats = rig.plane.stats()
        assert stats["nvme_read_bytes"] - before == len(records) * BLOCK
        assert stats["frames_used"] == len(records) * PER_BLOCK // PER_EXTENT
        census = rig.plane.census()
        assert census["frames_of_owners"] == stats["frames_used"]
        assert census["owners_miscounted"] == 0


def test_what_is_in_use_is_warmer(directory, rng):
    """A full tier of used frames gives none to a hint, which is dropped and counted."""
    with Rig(directory, dram_bytes=1 << 20) as rig:
        pack = rig.make_pack(rng, layers=2, lanes=1, tokens=2048)
        epoch = rig.bind(0, [pack], 2048)
        for _ in range(2):
            assert rig.ask(OP_RANGE, 0, run(0, epoch, pair_count=2048)).tolist() == [[OK, 0]]
        assert rig.plane.stats()["frames_used"] == rig.plane.stats()["frames"]
        before = rig.plane.stats()
        promote(rig, epoch, np.arange(0, 1024, PER_BLOCK), layer=1)
        until(lambda: rig.plane.stats()["promotes_dropped"] > before["promotes_dropped"])
        after = rig.plane.stats()
        assert (after["warm_bytes"], after["evictions"]) == (before["warm_bytes"], before["evictions"])


def test_the_oldest_hints_make_room_for_the_newest(directory, rng):
    with FaultyRig(directory, io_depth=4) as rig:
        pack = rig.make_pack(rng, layers=1, lanes=1, tokens=4096)
        epoch = rig.bind(0, [pack], 4096)
        every = np.arange(0, 4096, PER_EXTENT)  # 128 extents
        slow_disk(rig)
        hints = 20
        for _ in range(hints):
            promote(rig, epoch, every)
        until(lambda: rig.plane.stats()["promotes_dropped"] > 0)
        rig.native.io_shim_set([])
        until(lambda: warm_bytes(rig) == len(every) * BLOCK)
        assert rig.plane.stats()["promotes_dropped"] < hints


@pytest.mark.parametrize("behind", [1, 7])
def test_a_ticket_behind_hints_is_answered_while_they_wait(directory, rng, behind):
    """The disk is slow; a hot ticket waits for none of what was hinted before it."""
    with FaultyRig(directory) as rig:
        pack = rig.make_pack(rng, layers=2, lanes=1, tokens=4096)
        epoch = rig.bind(0, [pack], 4096)
        hot = np.arange(64)
        gather(rig, epoch, hot, layer=1)
        slow_disk(rig)
        for _ in range(behind):
            promote(rig, epoch, np.arange(0, 4096, PER_EXTENT))
        gather(rig, epoch, hot, layer=1)
        assert warm_bytes(rig) == 0
        rig.native.io_shim_set([])


def test_nothing_is_promoted_while_the_disk_reads_for_a_ticket(directory, rng):
    with FaultyRig(directory) as rig:
        pack = rig.make_pack(rng, layers=1, lanes=1, tokens=4096)
        epoch = rig.bind(0, [pack], 4096)
        rig.native.io_shim_set([("gather", "delay", 1, ALWAYS, STALL_US)])
        first = np.array([0])
        cold = rig.post(OP_GATHER, 0, run(0, epoch, pair_count=1), pairs_of(first, first))
        until(lambda: rig.plane.stats()["frames_pinned"] > 0)
        promote(rig, epoch, np.arange(PER_EXTENT, 4096, PER_EXTENT))
        time.sleep(STALL_US / 4e6)
        read = warm_bytes(rig)
        assert rig.ring.poll(cold)[0, 0] == 0, "the machine is too slow to tell"
        assert read == 0
        assert rig.ring.wait(cold, WAIT_US).tolist() == [[OK, 0]]
        rig.native.io_shim_set([])
        until(lambda: warm_bytes(rig) == (4096 // PER_EXTENT - 1) * BLOCK)
