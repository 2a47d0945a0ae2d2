"""Every wait ends: runs before their worker's wait does, calls before the control plane's, whatever the disk does."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from decode_worker._native import OP_GATHER, OP_RANGE, OP_STORE
from kvstore_service._native import RingGeometry
from tests.faults.conftest import shim
from tests.support.rig import ERROR, NO_PAIRS, OK, UNAVAILABLE, WAIT_US, FaultyRig, Rig, run, spec
from tests.support.shimmed import shimmed

__all__ = ["shim"]

ROOT = Path(__file__).parents[2]
LATE = [ERROR, UNAVAILABLE]
PAIR = np.zeros((1, 2), np.uint32)


def test_a_run_is_given_up_before_its_worker_gives_up_the_ring(directory, rng):
    with FaultyRig(directory, wait_ms=400) as rig:
        pack = rig.make_pack(rng)
        epoch = rig.bind(0, [pack], 512)
        upload = rig.plane.create_upload(str(directory / "late"), spec(rng, 1, 1, 512, 256, native=rig.native))
        rig.plane.own_upload(rig.worker, upload)
        rig.set_faults(delay_us=30_000_000)
        start = time.monotonic()
        posted = [
            rig.ring.post(OP_GATHER, 0, 0, run(0, epoch, pair_count=1), PAIR),
            rig.ring.post(OP_RANGE, 0, 0, run(0, epoch, pair_count=1), NO_PAIRS),
            rig.ring.post(OP_STORE, 0, 0, run(upload, 0), NO_PAIRS),
        ]
        for seq in posted:
            assert rig.ring.wait(seq, WAIT_US).tolist() == [LATE]
        assert time.monotonic() - start >= 0.3
        stats = rig.plane.stats()
        assert stats["runs_late"] == 3
        assert stats["frames_pinned"] == 0
        rig.set_faults()
        assert rig.ask(OP_RANGE, 0, run(0, epoch, pair_count=512)).tolist() == [[OK, 0]]  # not poisoned
        rig.plane.abort_upload(upload)  # its segment is free again


def test_runs_that_never_began_are_given_up_too(directory, rng):
    with FaultyRig(directory, wait_ms=400, geometry=RingGeometry(2, 4096, 1)) as rig:
        pack = rig.make_pack(rng)
        epoch = rig.bind(0, [pack], 512)
        rig.set_faults(delay_us=30_000_000)
        results = rig.ask(OP_GATHER, 0, np.repeat(run(0, epoch, pair_count=1), 4096)[:1], PAIR)
        assert results.tolist() == [LATE]
        results = rig.ask(OP_RANGE, 0, np.repeat(run(0, epoch, pair_count=1), 4096))
        assert (results == LATE).all()
        assert rig.plane.stats()["runs_late"] == 4097


def test_histograms_count_every_ticket_and_read(directory, rng):
    with Rig(directory) as rig:
        pack = rig.make_pack(rng)
        epoch = rig.bind(0, [pack], 512)
        assert rig.ask(OP_GATHER, 0, run(0, epoch, pair_count=1), PAIR).tolist() == [[OK, 0]]
        assert rig.ask(OP_RANGE, 1, run(0, epoch, pair_count=512)).tolist() == [[OK, 0]]
        reads = rig.plane.stats()["nvme_read_ops"]
        times = rig.plane.histograms()
        counted = {name: sum(counts) for name, (_, counts, _) in times.items()}
        assert counted["ticket_store"] == 4
        assert (counted["ticket_gather"], counted["ticket_range"], counted["read_decode"]) == (1, 1, 1)
        assert counted["read_bulk"] == 2  # of 32 blocks
        assert reads >= 3
        for bounds, counts, sum_us in times.values():
            assert bounds == [2**i for i in range(25)]
            assert len(counts) == 26
            assert sum_us >= sum(count * bound // 2 for bound, count in zip(bounds, counts, strict=False) if bound > 1)


STALLED_DISK = """
    with Rig(directory, io_depth=8, wait_ms=800, owner=1, dram_bytes=4 << 20) as victim:
        pack = victim.make_pack(rng)
        mine = victim.bind(0, [pack], 512)
        hot, second = run(0, mine, pair_count=256), victim.add_ring()
        assert victim.ask(OP_RANGE, 0, hot).tolist() == [[OK, 0]]
        with Rig(directory, beside=victim, wait_ms=800, owner=2) as other:
            other.opened = 10
            cold = other.make_pack(rng, tokens=1024)
            theirs = other.bind(0, [cold], 1024)
            before = other.window.copy()
            native.io_shim_set([("gather", "delay", 1, 1 << 40, 3 * SECOND)])
            runs = np.concatenate([run(0, theirs, lane=i % 2, first_pair=i * 16, pair_count=16) for i in range(64)])
            pairs = np.stack([np.arange(1024), np.arange(1024)], 1).astype(np.uint32)
            tickets = [other.ring.post(OP_GATHER, 0, 0, runs, pairs), other.ring.post(OP_RANGE, 0, 1, runs, NO_PAIRS)]
            late = second.post(OP_GATHER, 0, 1, run(0, mine, pair_count=1), np.zeros((1, 2), np.uint32))
            served = 0
            while (other.ring.poll(tickets[0])[:, 0] == 0).any():
                assert victim.ask(OP_RANGE, 0, hot).tolist() == [[OK, 0]]
                served += 1
            assert served > 20, served
            for ring, ticket in ((other.ring, tickets[0]), (other.ring, tickets[1]), (second, late)):
                assert (ring.wait(ticket, WAIT_US) == [ERROR, UNAVAILABLE]).all()
            assert (other.window == before).all()
            native.io_shim_set([])
            until(lambda: victim.plane.stats()["frames_pinned"] == 0, 20)
            assert (other.window == before).all(), "a late read reached the window"
            assert (other.ask(OP_GATHER, 0, runs, pairs)[:, 0] == OK).all()
            assert (other.lane(0, 0, 512)[:16] == cold.records[0, 0, :16]).all()
        assert not victim.ring.poisoned
"""

STALLED_DISK_AND_A_WORKER_THAT_LEAVES = """
    with Rig(directory, io_depth=8, wait_ms=800, owner=1, dram_bytes=4 << 20) as victim:
        pack = victim.make_pack(rng)
        mine = victim.bind(0, [pack], 512)
        hot = run(0, mine, pair_count=256)
        assert victim.ask(OP_RANGE, 0, hot).tolist() == [[OK, 0]]
        with Rig(directory, beside=victim, owner=2) as other:
            other.opened = 10
            cold = other.make_pack(rng, tokens=1024)
            theirs = other.bind(0, [cold], 1024)
            native.io_shim_set([("gather", "delay", 1, 1 << 40, 3 * SECOND)])
            other.post(OP_RANGE, 0, run(0, theirs, pair_count=1024))
            until(lambda: victim.plane.stats()["frames_pinned"] > 0)
        assert victim.plane.stats()["workers"] == 1
        assert victim.ask(OP_RANGE, 0, hot).tolist() == [[OK, 0]]
        victim.plane.close_pack(cold.handle)
        native.io_shim_set([])
        until(lambda: victim.plane.stats()["frames_pinned"] == 0, 20)
"""

STUCK_THREAD = """
    rig = Rig(directory, spin_us=0)
    pack = rig.make_pack(rng)
    epoch = rig.bind(0, [pack], 512)
    native.io_shim_set([("submit", "delay", 1, 1, 6_500_000)])
    ticket = rig.ring.post(OP_RANGE, 0, 0, run(0, epoch, pair_count=512), NO_PAIRS)
    time.sleep(0.5)
    start = time.monotonic()
    try:
        rig.plane.bind(rig.worker, 1, [pack.handle], rig.windows, 512)
        raise AssertionError("the thread answered")
    except native.NativeError as error:
        assert error.code == "UNAVAILABLE" and "does not answer" in str(error), error
    assert time.monotonic() - start < 6
    assert rig.plane.stats()["calls_late"] == 1
    assert rig.ring.wait(ticket, WAIT_US)[0, 0] in (OK, ERROR)
    assert rig.plane.bind(rig.worker, 1, [pack.handle], rig.windows, 512) == 1, "the abandoned bind has run"
    rig.plane.close()
"""


@pytest.mark.parametrize("script", [STALLED_DISK, STALLED_DISK_AND_A_WORKER_THAT_LEAVES, STUCK_THREAD],
                         ids=["disk", "leaving", "thread"])  # fmt: skip
def test_a_stall(shim, directory, script):
    shimmed(shim, script, directory)
