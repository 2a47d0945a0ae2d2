"""Whatever a worker posts, the copy thread looks at everybody else again soon, and keeps nothing of what was named."""

from __future__ import annotations

import struct
import threading
import time

import numpy as np
import pytest

from decode_worker._native import OP_CANCEL, OP_GATHER, OP_PROMOTE, OP_RANGE, REQUESTS_HEADER_BYTES
from kvstore_service._native import RingGeometry
from tests.support.rig import ABORTED, ERROR, INVALID_ARGUMENT, NO_PAIRS, OK, STALE, WAIT_US, Rig, mapped, run, until

PAIRS = 1 << 14
RUNS = 65_534
FLOOD = RingGeometry(tickets=2, runs_max=RUNS, pairs_max=PAIRS)
MIB = 1 << 20


def anonymous_mib() -> float:
    """Memory that the process took for itself; what workers declare is shared."""
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("RssAnon:")).split()[1]) / 1024


def flood(epoch: int, count: int = RUNS, records: int = 256) -> np.ndarray:
    """As many runs as a ticket may have, over the same records: 8 GiB of copies."""
    runs = np.repeat(run(0, epoch, pair_count=records), count)
    runs["lane"] = np.arange(count) % 2
    return runs


def test_a_neighbour_and_the_control_plane_are_served_within_a_flood(directory, rng):
    with Rig(directory) as victim, Rig(directory, beside=victim, owner=2000, geometry=FLOOD) as hostile:
        pack = victim.make_pack(rng)
        mine, theirs = victim.bind(0, [pack], 512), hostile.bind(0, [pack], 512)
        assert victim.ask(OP_RANGE, 0, run(0, mine, pair_count=512)).tolist() == [[OK, 0]]
        ticket = hostile.post(OP_RANGE, 0, flood(theirs))
        for _ in range(5):
            assert victim.ask(OP_RANGE, 0, run(0, mine, pair_count=512)).tolist() == [[OK, 0]]
            victim.plane.census()  # a command
        assert hostile.ring.poll(ticket)[-1, 0] == 0, "the flood was served first"
        hostile.plane.unbind(hostile.worker, 0)
        before = victim.plane.stats()["bytes_copied"]
        assert hostile.ring.wait(ticket, WAIT_US)[-1].tolist() == [STALE, ABORTED]
        assert victim.plane.stats()["bytes_copied"] == before, "a run of the old epoch was copied after its unbind"


def test_cancel_ends_a_flood_of_its_own_ring(directory, rng):
    with Rig(directory, geometry=FLOOD) as rig:
        pack = rig.make_pack(rng)
        epoch = rig.bind(0, [pack], 512)
        ticket = rig.post(OP_RANGE, 0, flood(epoch))
        assert rig.ask(OP_CANCEL, 0, run(0, 0, arg=ticket)).tolist() == [[OK, 0]]
        before = rig.plane.stats()["bytes_copied"]
        assert rig.ring.wait(ticket, WAIT_US)[-1].tolist() == [ERROR, ABORTED]
        assert rig.plane.stats()["bytes_copied"] == before, "a run was copied after CANCEL had been answered"


@pytest.mark.parametrize("op", [OP_RANGE, OP_GATHER, OP_PROMOTE])
def test_close_ends_whatever_is_posted(directory, rng, op):
    rig = Rig(directory, geometry=FLOOD)
    pack = rig.make_pack(rng)
    epoch = rig.bind(0, [pack], 512)
    pairs = np.zeros((PAIRS, 2), np.uint32) if op != OP_RANGE else NO_PAIRS
    rig.post(op, 0, flood(epoch), pairs)
    closer = threading.Thread(target=rig.plane.close)
    closer.start()
    closer.join(5)
    assert not closer.is_alive()


def test_what_the_runs_of_a_ticket_name_together_is_limited(directory, rng):
    geometry = RingGeometry(tickets=8, runs_max=1100, pairs_max=64)
    with Rig(directory, geometry=geometry, window_bytes=8 * MIB) as rig:
        pack = rig.make_pack(rng, layers=1, lanes=1, record_bytes=64, tokens=16384)
        epoch = rig.bind(0, [pack], 16384)
        pairs = np.stack([np.arange(64), np.arange(64)], 1).astype(np.uint32)
        runs = np.concatenate([run(0, epoch, pair_count=n) for n in (40, 40, 24, 1)])
        bad = [ERROR, INVALID_ARGUMENT]
        assert rig.ask(OP_GATHER, 0, runs, pairs).tolist() == [[OK, 0], bad, [OK, 0], bad]
        runs = np.repeat(run(0, epoch, pair_count=16384), 1026)
        assert rig.ask(OP_RANGE, 0, runs)[:, 0].tolist() == [OK] * 1024 + [ERROR] * 2  # 2^24 records


def test_a_bad_pair_far_behind_ends_the_run_and_stays_in_its_lane(directory, rng):
    geometry = RingGeometry(tickets=2, runs_max=1, pairs_max=PAIRS)
    with Rig(directory, geometry=geometry) as rig:
        pack = rig.make_pack(rng)
        epoch = rig.bind(0, [pack], 512)
        before = rig.window.copy()
        pairs = np.tile(np.stack([np.arange(512), np.arange(512)], 1), (32, 1)).astype(np.uint32)
        for wrong in ((512, 0), (0, 512)):
            pairs[-1] = wrong
            runs = run(0, epoch, lane=1, pair_count=PAIRS)
            assert rig.ask(OP_GATHER, 0, runs, pairs).tolist() == [[ERROR, INVALID_ARGUMENT]]
            lane = rig.lane(0, 1, 512)
            assert ((lane == pack.records[0, 1]).all(1) | (lane == before[0]).all(1)).all()
            lane[:] = before[0]
            assert (rig.window == before).all()


def test_pairs_at_the_end_of_a_sparse_ring_cost_what_they_are(directory, rng):
    geometry = RingGeometry(tickets=16, runs_max=1, pairs_max=1 << 22)  # 512 MiB of which nothing is touched
    with Rig(directory) as rig:
        pack = rig.make_pack(rng)
        epoch = rig.bind(0, [pack], 512)
        with Rig(directory, beside=rig, geometry=geometry) as sparse:
            epoch = sparse.bind(0, [pack], 512)
            ok, before = rig.plane.stats()["runs_ok"], anonymous_mib()
            requests = mapped(sparse.request_fd, geometry.requests_bytes)
            tickets = requests[REQUESTS_HEADER_BYTES:]
            runs = tickets[16 * 64 :]
            only = run(0, epoch, first_pair=geometry.pairs_max - 1, pair_count=1).view(np.uint8)
            for seq in range(1, 17):
                slot = seq % 16
                runs[slot * 32 : slot * 32 + 32] = only
                ticket = struct.pack("<QIHHHHI", seq, 0, 0, 0, OP_GATHER, 1, 0)
                tickets[slot * 64 : slot * 64 + len(ticket)] = np.frombuffer(ticket, np.uint8)
            until(lambda: rig.plane.stats()["runs_ok"] == ok + 16)
            assert anonymous_mib() - before < 32


def test_cold_runs_keep_bounded_memory_and_give_it_back(directory, rng):
    geometry = RingGeometry(tickets=2, runs_max=1024, pairs_max=1 << 24)
    window = 4 * (16384 * 512 + 4096) + 4096
    with Rig(directory, dram_bytes=16 * MIB, staging_bytes=16 * MIB, window_bytes=window) as rig:
        pack = rig.make_pack(rng, layers=1, lanes=4, tokens=16384)
        rig.bind(0, [pack], 16384)
        with Rig(directory, beside=rig, geometry=geometry, window_bytes=window) as cold:
            epoch = cold.bind(0, [pack], 16384)
            cold.window[:] = 0
            pairs = np.stack([np.arange(16384), np.arange(16384)], 1).astype(np.uint32)
            runs = np.repeat(run(0, epoch, pair_count=16384), 1024)
            runs["lane"] = np.arange(1024) % 4
            rig.ask(OP_RANGE, 0, run(0, 1, pair_count=16384))  # the tier is full
            before, peak = anonymous_mib(), 0.0
            ticket = cold.ring.post(OP_GATHER, 0, 0, runs, pairs)
            for _ in range(40):
                peak = max(peak, anonymous_mib())
                time.sleep(0.005)
            assert peak - before < 32 + 8  # the test's own arrays and the producer's results
            cold.ask(OP_CANCEL, 0, run(0, 0, arg=ticket))
        assert anonymous_mib() - before < 32


@pytest.mark.parametrize("runs", [256, 8192])
def test_runs_without_frames_are_planned_when_there_are_some(directory, rng, runs):
    geometry = RingGeometry(tickets=2, runs_max=8192, pairs_max=1)
    window = 4 * (16384 * 512 + 4096) + 4096
    with Rig(directory, dram_bytes=8 * MIB, staging_bytes=16 * MIB, window_bytes=window, geometry=geometry) as rig:
        pack = rig.make_pack(rng, layers=1, lanes=4, tokens=16384)
        epoch = rig.bind(0, [pack], 16384)
        count = 4 * 16384 // runs
        ticket = np.repeat(run(0, epoch, pair_count=count), runs)
        ticket["lane"] = np.arange(runs) % 4
        ticket["first_pair"] = ticket["arg"] = np.arange(runs) // 4 * count
        before = rig.plane.stats()
        assert (rig.ask(OP_RANGE, 0, ticket)[:, 0] == OK).all()
        after = rig.plane.stats()
        for lane in range(4):
            assert (rig.lane(0, lane, 512) == pack.records[0, lane]).all()
        assert after["portions"] - before["portions"] <= 4 * runs + 64
        assert after["frames_pinned"] == 0


def test_every_frame_pinned_by_somebody_ends(directory, rng):
    """A tier of four frames and hundreds of cold runs of two workers over two threads: none waits for ever."""
    geometry = RingGeometry(tickets=4, runs_max=256, pairs_max=1)
    options = dict(geometry=geometry, window_bytes=4 * MIB)
    with Rig(directory, dram_bytes=65536, copy_threads=2, **options) as rig:
        pack = rig.make_pack(rng, tokens=1024)
        with Rig(directory, beside=rig, owner=7, **options) as other:
            posted = []
            for who in (rig, other):
                epoch = who.bind(0, [pack], 1024)
                runs = np.repeat(run(0, epoch, pair_count=64), 256)
                runs["lane"], runs["first_pair"] = np.arange(256) % 2, np.arange(256) * 37 % 960
                posted += [(who, who.post(OP_RANGE, layer, runs)) for layer in (0, 1)]
            for who, seq in posted:
                assert (who.ring.wait(seq, WAIT_US)[:, 0] == OK).all()
