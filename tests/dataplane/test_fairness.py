"""Neighbours: copy thread and disk are shared by bytes among owners, then among workers, then among rings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from decode_worker._native import OP_GATHER, OP_RANGE, RingProducer
from kvstore_service._native import FairRounds, RingGeometry
from tests.support.rig import NO_PAIRS, OK, WAIT_US, FaultyRig, Pack, Rig, run, until

NONE = 2**32 - 1
RECORD_BYTES = 512
TOKENS = 8192
GEOMETRY = RingGeometry(tickets=8, runs_max=64, pairs_max=1 << 14)
VICTIM, NEIGHBOUR = 1, 2


def rounds_of(owners: list[int]) -> tuple[FairRounds, list[int]]:
    rounds = FairRounds()
    leaves = [rounds.add(owner) for owner in owners]
    for leaf in leaves:
        rounds.wake(leaf)
    return rounds, leaves


def served(rounds: FairRounds, cost: dict[int, int], turns: int) -> dict[int, int]:
    """Bytes charged to each leaf, of which each turn costs its own."""
    total = dict.fromkeys(cost, 0)
    for _ in range(turns):
        leaf = rounds.next()
        rounds.charge(leaf, cost[leaf])
        total[leaf] += cost[leaf]
    return total


def test_rounds_share_by_bytes_among_owners_first():
    rounds, (alone, *others) = rounds_of([1] + [2] * 64)
    total = served(rounds, {alone: 1000, **{leaf: 100_000 for leaf in others}}, 5000)
    theirs = [total[leaf] for leaf in others]
    assert total[alone] == pytest.approx(sum(theirs), abs=200_000)
    assert max(theirs) - min(theirs) <= 100_000


def test_rounds_save_nothing_up_and_serve_a_newcomer_at_once():
    rounds, (busy, sleeper) = rounds_of([1, 2])
    rounds.rest(sleeper)
    served(rounds, {busy: 4096}, 1000)
    rounds.wake(sleeper)
    total = served(rounds, {busy: 4096, sleeper: 4096}, 100)
    assert abs(total[busy] - total[sleeper]) <= 4096
    rounds.rest(busy)
    rounds.rest(sleeper)
    assert rounds.next() == NONE
    rounds.wake(sleeper)
    rounds.wake(sleeper)  # once is as good as twice
    assert rounds.next() == sleeper
    rounds.rest(sleeper)
    assert rounds.next() == NONE


@contextlib.contextmanager
def neighbours(victim: Rig, directory: Path, count: int, owner: int) -> Iterator[list[Rig]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                Rig(directory, beside=victim, window_bytes=victim.window_bytes, owner=owner, geometry=GEOMETRY)
            )
            for _ in range(count)
        ]


def ranges(epoch: int, records: int) -> np.ndarray:
    """A ticket of 64 runs over everything, 4 lanes."""
    count = records // 16
    runs = [
        run(0, epoch, lane=lane, first_pair=i * count, pair_count=count, arg=i * count)
        for lane in range(4)
        for i in range(16)
    ]
    return np.concatenate(runs)


def served_ns(rig: Rig) -> dict[int, list[tuple[int, int]]]:
    """(taken, done) of every ticket since the last call, by worker: by the daemon's clock."""
    times: dict[int, list[tuple[int, int]]] = {}
    for ring, _, _, taken, _, done in rig.plane.drain_trace().astype(int):
        times.setdefault(ring >> 16, []).append((taken, done))
    return times


def longest_ns(times: list[tuple[int, int]]) -> int:
    return max(done - taken for taken, done in times)


def fill(ring: RingProducer, runs: np.ndarray) -> list[int]:
    return [ring.post(OP_RANGE, 0, 0, runs, NO_PAIRS) for _ in range(ring.tickets)]


@pytest.mark.parametrize(("workers", "rings", "owner"), [(1, 16, VICTIM), (4, 4, NEIGHBOUR)], ids=["worker", "uid"])
def test_busy_rings_of_one_neighbour_take_no_more_than_half(directory, rng, workers, rings, owner):
    window = 4 * (TOKENS * RECORD_BYTES + 4096) + 4096
    with FaultyRig(directory, window_bytes=window, geometry=GEOMETRY, owner=VICTIM, staging_bytes=8 << 20) as victim:
        pack = victim.make_pack(rng, layers=1, lanes=4, tokens=TOKENS)
        assert (victim.ask(OP_RANGE, 0, ranges(victim.bind(0, [pack], TOKENS), TOKENS))[:, 0] == OK).all()
        with neighbours(victim, directory, workers, owner) as others:
            busy = []
            for other in others:
                runs = ranges(other.bind(0, [pack], TOKENS), TOKENS)
                busy += [(ring, runs) for ring in [other.ring, *(other.add_ring() for _ in range(rings - 1))]]
            victim.set_faults(stopped=True)  # so that all begin together
            victim.plane.drain_trace()
            mine = fill(victim.ring, ranges(1, TOKENS))
            theirs = [(ring, fill(ring, runs)) for ring, runs in busy]
            victim.set_faults()
            victim.ring.wait(mine[-1], WAIT_US)
            for ring, tickets in theirs:
                ring.wait(tickets[1], WAIT_US)
            times = served_ns(victim)
            end = max(done for _, done in times.pop(victim.worker))
            before = sum(done <= end for tickets in times.values() for _, done in tickets)
            assert before <= 2 * len(mine), "fair is as many bytes; one ticket per ring and turn was 16 times as many"


def cold_pack(rig: Rig, rng: np.random.Generator, tokens: int = 16384) -> Pack:
    return rig.make_pack(rng, layers=1, lanes=4, tokens=tokens)


def one(epoch: int, record: int) -> tuple[np.ndarray, np.ndarray]:
    return run(0, epoch, lane=0, pair_count=1), np.array([[record, 0]], np.uint32)


def test_a_cold_read_overtakes_a_neighbours_cold_restore(directory, rng):
    """By owners and by class: the restore queued all of its reads long before."""
    window = 4 * (16384 * RECORD_BYTES + 4096) + 4096
    with Rig(directory, window_bytes=window, geometry=GEOMETRY, owner=VICTIM, staging_bytes=16 << 20) as victim:
        wanted, pack = victim.make_pack(rng, layers=1, lanes=1), cold_pack(victim, rng)
        epoch = victim.bind(0, [wanted], 512)
        with neighbours(victim, directory, 1, NEIGHBOUR) as (other,):
            runs = ranges(other.bind(0, [pack], 16384), 16384)
            before = victim.plane.stats()["nvme_read_bytes"]
            victim.plane.drain_trace()
            restore = other.post(OP_RANGE, 0, runs)
            until(lambda: victim.plane.stats()["nvme_read_bytes"] > before)
            assert victim.ask(OP_GATHER, 0, *one(epoch, 77)).tolist() == [[OK, 0]]
            assert (other.ring.wait(restore, WAIT_US)[:, 0] == OK).all()
            times = served_ns(victim)
            assert longest_ns(times[victim.worker]) < longest_ns(times[other.worker]) / 2
            assert (victim.lane(0, 0, RECORD_BYTES)[0] == wanted.records[0, 0, 77]).all()


def test_a_block_that_a_queued_hint_names_does_not_wait_for_the_queue(directory, rng):
    window = 4 * (16384 * RECORD_BYTES + 4096) + 4096
    with Rig(directory, window_bytes=window, geometry=GEOMETRY, owner=VICTIM, staging_bytes=16 << 20) as victim:
        hinted, pack = victim.make_pack(rng, layers=1, lanes=1, tokens=256), cold_pack(victim, rng)
        epoch = victim.bind(0, [hinted], 512)
        with neighbours(victim, directory, 1, NEIGHBOUR) as (other,):
            runs = ranges(other.bind(0, [pack], 16384), 16384)
            before = victim.plane.stats()["nvme_read_bytes"]
            victim.plane.drain_trace()
            restore = other.post(OP_RANGE, 0, runs)
            until(lambda: victim.plane.stats()["nvme_read_bytes"] > before)
            victim.plane.warm(hinted.handle, np.full((1, 1), 256, np.uint32))
            assert victim.ask(OP_GATHER, 0, *one(epoch, 77)).tolist() == [[OK, 0]]
            assert (other.ring.wait(restore, WAIT_US)[:, 0] == OK).all()
            times = served_ns(victim)
            assert longest_ns(times[victim.worker]) < longest_ns(times[other.worker]) / 2


def test_a_store_of_a_neighbour_gets_its_share_beside_a_restore(directory, rng):
    """Bulk of both kinds goes on: an upload ends while a restore of many times its size is under way."""
    window = 4 * (16384 * RECORD_BYTES + 4096) + 4096
    with Rig(directory, dram_bytes=4 << 20, window_bytes=window, geometry=GEOMETRY, staging_bytes=16 << 20) as rig:
        pack = cold_pack(rig, rng)
        with neighbours(rig, directory, 1, NEIGHBOUR) as (other,):
            runs = ranges(other.bind(0, [pack], 16384), 16384)
            rig.plane.drain_trace()
            restores = fill(other.ring, runs)
            rig.make_pack(rng, layers=1, lanes=1)
            assert (other.ring.wait(restores[-1], WAIT_US)[:, 0] == OK).all()
            times = served_ns(rig)
            assert longest_ns(times[rig.worker]) < longest_ns(times[other.worker]) / 2


def test_hints_never_fail_and_are_bounded(directory, rng):
    with FaultyRig(directory, dram_bytes=1 << 20, io_depth=1, staging_bytes=32 << 20) as rig:
        pack = rig.make_pack(rng, layers=1, lanes=1, tokens=16384, record_bytes=1024)
        rig.set_faults(stopped=True)
        for _ in range(6000):
            rig.plane.warm(pack.handle, np.full((1, 1), 16384, np.uint32), rig.owner)
        stats = rig.plane.stats()
        assert stats["hints_dropped"] > 0
        rig.plane.warm(pack.handle, np.full((1, 1), 16384, np.uint32), rig.owner + 1)
        assert rig.plane.stats()["hints_dropped"] == stats["hints_dropped"], "another owner's hint was not heard"
        rig.set_faults()
        until(lambda: rig.plane.stats()["warm_bytes"] > 0)
