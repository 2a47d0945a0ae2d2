"""One worker, several copy threads: each ring has its thread, and what holds for the worker holds on all of them."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from decode_worker._native import OP_GATHER, OP_RANGE, OP_STORE, RingPoisoned, RingProducer
from tests.faults.conftest import shim
from tests.support.rig import CANARY, ERROR, NO_PAIRS, OK, STALE, WAIT_US, FaultyRig, Rig, run, until
from tests.support.shimmed import shimmed

__all__ = ["shim"]

THREADS = 3
RUNS = 64


def post_many(ring: RingProducer, number: int, epoch: int) -> int:
    """Posts a ticket of many runs over all of a lane: another one for each of four rings."""
    runs = np.repeat(run(0, epoch, lane=number // 2, pair_count=512), RUNS)
    return ring.post(OP_RANGE, 0, number % 2, runs, NO_PAIRS)


def answered(ring: RingProducer, ticket: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if (ring.poll(ticket)[:, 0] != 0).all():
            return True
        time.sleep(0.002)
    return False


def stop(rig: Rig, thread: int) -> None:
    rig.set_faults(stopped=True, only_thread=thread)
    rig.plane.census()  # a command: what each thread had begun before has ended


def waits_for(rig: Rig, ring: RingProducer, epoch: int, seconds: float) -> list[int]:
    """The threads without which the ring is not served for so long."""
    found = []
    for thread in range(rig.copy_threads):
        stop(rig, thread)
        ticket = ring.post(OP_RANGE, 0, 0, run(0, epoch, pair_count=1), NO_PAIRS)
        if not answered(ring, ticket, seconds):
            found.append(thread)
        rig.set_faults()
        assert ring.wait(ticket, WAIT_US).tolist() == [[OK, 0]]
    return found


def thread_of(rig: Rig, ring: RingProducer, epoch: int) -> int:
    for seconds in (0.1, 1, 5):  # another thread may only be slow
        if len(found := waits_for(rig, ring, epoch, seconds)) == 1:
            break
    (thread,) = found
    return thread


def threads_of(rig: Rig, rings: list[RingProducer], epoch: int) -> list[int]:
    return [thread_of(rig, ring, epoch) for ring in rings]


def test_rings_of_one_worker_are_served_by_different_threads(directory, rng):
    """While a thread serves nobody, the ring of another thread is served on and on."""
    with FaultyRig(directory, copy_threads=THREADS) as rig:
        pack = rig.make_pack(rng)
        epoch = rig.bind(0, [pack], 512)
        rings = [rig.ring, rig.add_ring(), rig.add_ring()]
        threads = threads_of(rig, rings, epoch)
        assert sorted(threads) == [0, 1, 2]
        stop(rig, threads[0])
        held = rings[0].post(OP_RANGE, 0, 1, run(0, epoch, pair_count=512), NO_PAIRS)
        for ring in rings[1:] * 10:
            rig.lane(0, 1, 512)[:] = CANARY
            ticket = ring.post(OP_RANGE, 0, 0, run(0, epoch, lane=1, pair_count=512), NO_PAIRS)
            assert ring.wait(ticket, WAIT_US).tolist() == [[OK, 0]]
            assert (rig.lane(0, 1, 512) == pack.records[0, 1]).all()
        assert (rings[0].poll(held)[:, 0] == 0).all()
        rig.set_faults()
        assert rings[0].wait(held, WAIT_US).tolist() == [[OK, 0]]
        assert (rig.lane(1, 0, 512) == pack.records[1, 0]).all()


def test_the_first_rings_of_workers_are_spread(directory, rng):
    """Two rings each on two threads: least-loaded alone would put all that decode on one thread."""
    with FaultyRig(directory, copy_threads=2) as rig:
        pack = rig.make_pack(rng)
        rig.add_ring()
        with Rig(directory, beside=rig, copy_threads=2) as other:
            mine, theirs = rig.bind(0, [pack], 512), other.bind(0, [pack], 512)
            assert threads_of(rig, [rig.ring], mine) != threads_of(other, [other.ring], theirs)


def test_a_ring_takes_the_place_of_one_that_has_gone(directory, rng):
    with FaultyRig(directory, copy_threads=THREADS) as rig:
        pack = rig.make_pack(rng)
        epoch = rig.bind(0, [pack], 512)
        first = threads_of(rig, [rig.ring], epoch)
        with Rig(directory, beside=rig) as two, Rig(directory, beside=rig) as three:
            assert two.worker != three.worker
        rings = [rig.add_ring(), rig.add_ring()]
        assert sorted(first + threads_of(rig, rings, epoch)) == [0, 1, 2]


def test_a_bind_and_an_extend_are_known_to_every_thread_when_they_return(directory, rng):
    with Rig(directory, copy_threads=THREADS, slots=8) as rig:
        first, second = rig.make_pack(rng, tokens=256), rig.make_pack(rng, tokens=256)
        rings = [rig.ring, rig.add_ring(), rig.add_ring()]
        for i in range(40):
            epoch = rig.bind(i % 8, [first], 512)
            for ring in rings:
                ticket = ring.post(OP_RANGE, 0, 0, run(i % 8, epoch, pair_count=256), NO_PAIRS)
                assert ring.wait(ticket, WAIT_US).tolist() == [[OK, 0]]
            assert rig.plane.extend(rig.worker, i % 8, second.handle) == 512
            for ring in rings:
                ticket = ring.post(OP_RANGE, 0, 0, run(i % 8, epoch, first_pair=256, pair_count=256), NO_PAIRS)
                assert ring.wait(ticket, WAIT_US).tolist() == [[OK, 0]]
            assert (rig.lane(0, 0, 512)[:256] == second.records[0, 0]).all()
            rig.plane.unbind(rig.worker, i % 8)


def test_a_thread_learns_of_slots_and_uploads_with_its_first_ring(directory, rng):
    with Rig(directory, copy_threads=THREADS) as rig:
        pack = rig.make_pack(rng)
        epoch = rig.bind(0, [pack], 512)
        upload = rig.plane.create_upload(str(directory / "later"), pack.spec)
        rig.plane.own_upload(rig.worker, upload)
        ring = rig.add_ring()
        ticket = ring.post(OP_RANGE, 0, 0, run(0, epoch, pair_count=512), NO_PAIRS)
        assert ring.wait(ticket, WAIT_US).tolist() == [[OK, 0]]
        flat = pack.records[0, 0].reshape(-1)
        rig.staging[: flat.size] = flat
        rig.staging[flat.size : flat.size + 1024] = pack.map[0, 0].view(np.uint8)
        assert ring.wait(ring.post(OP_STORE, 0, 0, run(upload, 0), NO_PAIRS), WAIT_US).tolist() == [[OK, 0]]
        assert rig.plane.upload_missing(upload) == 3
        rig.plane.abort_upload(upload)
        result = ring.wait(ring.post(OP_STORE, 0, 0, run(upload, 0, lane=1), NO_PAIRS), WAIT_US)
        assert result[0, 0] == ERROR


@pytest.mark.parametrize("cold", [False, True], ids=["hot", "cold"])
def test_unbind_while_all_rings_are_served_stores_nothing_later(directory, rng, cold):
    with Rig(directory, dram_bytes=256 << 10 if cold else 64 << 20, copy_threads=THREADS) as rig:
        pack = rig.make_pack(rng)
        rings = [rig.ring, rig.add_ring(), rig.add_ring()]
        for attempt in range(25):
            epoch = rig.bind(0, [pack], 512)
            tickets = [(ring, post_many(ring, i, epoch)) for i, ring in enumerate(rings)]
            if attempt % 2:
                until(lambda tickets=tickets: all((r.poll(t)[:, 0] != 0).any() for r, t in tickets), 20)
            rig.plane.unbind(rig.worker, 0)
            rig.window[:] = CANARY
            time.sleep(0.005)
            assert (rig.window == CANARY).all(), "a copy landed after unbind had returned"
            for ring, ticket in tickets:
                assert set(ring.wait(ticket, WAIT_US)[:, 0]) <= {OK, STALE}
        assert rig.plane.stats()["bound_slots"] == 0
        until(lambda: rig.plane.stats()["frames_pinned"] == 0, 20)
        rig.plane.close_pack(pack.handle)


def test_unbind_waits_for_every_thread(directory, rng):
    """A thread that delays its runs gives them up, too."""
    with FaultyRig(directory, copy_threads=THREADS) as rig:
        pack = rig.make_pack(rng)
        rings = [rig.ring, rig.add_ring(), rig.add_ring()]
        epoch = rig.bind(0, [pack], 512)
        rig.set_faults(delay_us=10_000_000)
        before = rig.plane.stats()["tickets"]
        tickets = [post_many(ring, i, epoch) for i, ring in enumerate(rings)]
        until(lambda: rig.plane.stats()["tickets"] == before + len(rings), 20)
        rig.plane.unbind(rig.worker, 0)
        for ring, ticket in zip(rings, tickets, strict=True):
            assert set(ring.wait(ticket, WAIT_US)[:, 0]) == {STALE}


@pytest.mark.parametrize("which", range(THREADS))
def test_poison_of_one_ring_ends_the_others(directory, rng, which):
    with FaultyRig(directory, copy_threads=THREADS) as rig, Rig(directory, beside=rig, owner=7) as other:
        pack = rig.make_pack(rng)
        rings = [rig.ring, rig.add_ring(), rig.add_ring()]
        other.opened = 10
        epoch, theirs = rig.bind(0, [pack], 512), other.bind(0, [pack], 512)
        for ring in rings:
            assert ring.wait(ring.post(OP_RANGE, 0, 0, run(0, epoch, pair_count=1), NO_PAIRS), WAIT_US)[0, 0] == OK
        rig.set_faults(delay_us=10_000_000)
        tickets = [post_many(ring, i, epoch) for i, ring in enumerate(rings)]
        rings[which].poison()
        for ring, ticket in zip(rings, tickets, strict=True):
            with pytest.raises(RingPoisoned):
                ring.wait(ticket, WAIT_US)
        rig.set_faults()
        with pytest.raises(rig.native.NativeError) as error:
            rig.bind(1, [pack], 512)
        assert error.value.code == "FAILED_PRECONDITION"
        with pytest.raises(rig.native.NativeError) as error:
            rig.add_ring()
        assert error.value.code == "FAILED_PRECONDITION"
        rig.window[:] = CANARY
        time.sleep(0.02)
        assert (rig.window == CANARY).all()
        assert other.ask(OP_RANGE, 0, run(0, theirs, pair_count=512)).tolist() == [[OK, 0]]


def test_workers_come_and_go_under_load(directory, rng):
    """Two threads poison, unbind and remove workers whose rings all are busy; a third worker is served throughout."""
    with Rig(directory, copy_threads=THREADS, dram_bytes=2 << 20) as rig:
        pack = rig.make_pack(rng)
        epoch = rig.bind(0, [pack], 512)
        failures: list[BaseException] = []

        def churn(number: int) -> None:
            try:
                for i in range(12):
                    with Rig(directory, beside=rig, owner=number, window_bytes=2 << 20) as mine:
                        rings = [mine.ring, mine.add_ring(), mine.add_ring(), mine.add_ring()]
                        theirs = mine.bind(0, [pack], 512)
                        for which, ring in enumerate(rings):
                            post_many(ring, which, theirs)
                        if i % 3 == 0:
                            rings[i % 4].poison()
                        elif i % 3 == 1:
                            mine.plane.unbind(mine.worker, 0)
                            mine.plane.remove_worker(mine.worker)
                            mine.window[:] = CANARY
                            time.sleep(0.002)
                            assert (mine.window == CANARY).all()
                            mine.worker = mine.plane.add_worker(mine.window_fd, 2 << 20, mine.staging_fd, 4 << 20, 1, 9)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=churn, args=(number,)) for number in (1, 2)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert rig.ask(OP_RANGE, 0, run(0, epoch, pair_count=512)).tolist() == [[OK, 0]]
        for thread in threads:
            thread.join(60)
        assert not failures, failures
        stats = rig.plane.stats()
        assert (stats["workers"], stats["rings"], stats["bound_slots"]) == (1, 1, 1)
        rig.plane.unbind(rig.worker, 0)
        until(lambda: rig.plane.stats()["frames_pinned"] == 0, 20)
        rig.plane.close_pack(pack.handle)
        census = rig.plane.census()
        assert census["runs_in_flight"] == 0
        assert census["runs"] == census["runs_ended"]


STUCK_THREAD = """
    rig = Rig(directory, spin_us=0, copy_threads=2, dram_bytes=4 << 20)
    pack, hot = rig.make_pack(rng), rig.make_pack(rng)
    second = rig.add_ring()
    cold, mine = rig.bind(0, [pack], 512), rig.bind(1, [hot], 512)
    assert rig.ask(OP_RANGE, 0, run(1, mine, pair_count=512)).tolist() == [[OK, 0]]
    native.io_shim_set([("submit", "delay", 1, 1, 6_500_000)])
    stuck = second.post(OP_RANGE, 0, 0, run(0, cold, lane=1, pair_count=512), NO_PAIRS)
    time.sleep(0.5)
    for _ in range(20):
        assert rig.ask(OP_RANGE, 0, run(1, mine, pair_count=512)).tolist() == [[OK, 0]]
    assert second.poll(stuck)[0, 0] == 0, "the other thread was not stuck"
    start = time.monotonic()
    try:
        rig.plane.bind(rig.worker, 2, [pack.handle], rig.windows, 512)
        raise AssertionError("the thread answered")
    except native.NativeError as error:
        assert error.code == "UNAVAILABLE" and "does not answer" in str(error), error
    assert time.monotonic() - start < 6
    until(lambda: rig.ring.poisoned and second.poisoned, 20)  # only one of its threads knows the slot
    try:
        rig.plane.bind(rig.worker, 3, [pack.handle], rig.windows, 512)
        raise AssertionError("a worker whose threads disagree goes on")
    except native.NativeError as error:
        assert error.code == "FAILED_PRECONDITION", error
    rig.plane.remove_worker(rig.worker)
    rig.plane.close_pack(pack.handle)
    rig.plane.close()
"""


def test_a_thread_stuck_in_a_read_holds_up_no_other_ring(shim, directory):
    shimmed(shim, STUCK_THREAD, directory)


@pytest.mark.parametrize("op", [OP_GATHER, OP_RANGE], ids=["decode", "bulk"])
def test_rings_on_two_threads_hold_one_share_of_the_tier(directory, rng, op):
    """Decode and bulk take a sixteenth of it each, in portions of half of that; where a thread has none it gets one."""
    frames, share, tokens = 256, 16, 16384
    sizes = {"dram_bytes": frames << 14, "window_bytes": 16 << 20, "staging_bytes": 16 << 20}
    with FaultyRig(directory, copy_threads=2, **sizes) as rig:
        pack = rig.make_pack(rng, 1, 1, tokens=tokens)  # 512 frames
        rings, epoch = [rig.ring, rig.add_ring()], rig.bind(0, [pack], tokens)
        pairs = np.stack([np.arange(tokens), np.arange(tokens)], axis=1).astype(np.uint32)
        rig.native.io_shim_set([("gather", "delay", 1, 1 << 40, 3_000_000)])
        for which, ring in enumerate(rings):
            first = which * tokens // 2
            many = np.concatenate([run(0, epoch, first_pair=first + i * 256, pair_count=256) for i in range(32)])
            ring.post(op, 0, 0, many, pairs if op == OP_GATHER else NO_PAIRS, WAIT_US)
            until(lambda which=which: rig.plane.stats()["tickets"] == 2 + which)
            until(lambda: rig.plane.stats()["frames_pinned"] > share / 2)
            until(lambda: settled(lambda: rig.plane.stats()["frames_pinned"]))
            assert rig.plane.stats()["frames_pinned"] <= share + 1


def test_extents_that_are_there_keep_no_other_run_from_reading(directory, rng):
    """Every run lacks one extent of 32: all of them are read at once, though all that is pinned is more than that."""
    lanes, tokens, in_extent = 8, 1024, 32
    with FaultyRig(directory, dram_bytes=512 << 14, window_bytes=16 << 20) as rig:
        pack = rig.make_pack(rng, 1, lanes, tokens=tokens)
        epoch = rig.bind(0, [pack], tokens)
        there = [run(0, epoch, lane=i, first_pair=in_extent, pair_count=tokens - in_extent) for i in range(lanes)]
        assert (rig.ask(OP_RANGE, 0, np.concatenate(there))[:, 0] == OK).all()
        rig.native.io_shim_set([("gather", "delay", 1, 1 << 40, 3_000_000)])
        wanted = np.arange(0, tokens, in_extent)
        pairs = np.stack([wanted, wanted], axis=1).astype(np.uint32)
        runs = [run(0, epoch, lane=i, pair_count=wanted.size) for i in range(lanes)]
        rig.post(OP_GATHER, 0, np.concatenate(runs), pairs)
        until(lambda: rig.plane.stats()["frames_pinned"] > 0)
        until(lambda: settled(lambda: rig.plane.stats()["frames_pinned"]))
        assert rig.plane.stats()["frames_pinned"] == lanes * wanted.size


def settled(value) -> bool:
    """Whether it stays the same for a while."""
    before = value()
    time.sleep(0.05)
    return value() == before
