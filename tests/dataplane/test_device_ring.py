"""A ring whose producer is a device: it cannot wake the daemon, which polls while the host says that it steps."""

import threading
import time

import numpy as np
import pytest

from decode_worker._native import OP_GATHER, OP_RANGE, RingPoisoned
from kvstore_service._native import RingGeometry
from tests.support.device import Device, OutOfCredit
from tests.support.rig import NO_PAIRS, OK, FaultyRig, Rig, run, until

STEPPING_OFFSET = 256  # in RequestsHeader, csrc/core/ring.h
IDLE_S = 0.01  # longer than a copy thread spins, shorter than it sleeps


@pytest.fixture
def rig(directory):
    with Rig(directory, wait_ms=400) as rig:
        yield rig


def polls(rig) -> int:
    return rig.plane.stats()["polls"]


def slept(rig, times: int) -> None:
    """Returns when the copy thread has gone to sleep as often again."""
    least = rig.plane.stats()["sleeps"] + times
    until(lambda: rig.plane.stats()["sleeps"] >= least)


def answer_times(rig, device, steps) -> list[float]:
    """Of tickets that come when the copy thread has nothing to do, each in a step of its own."""
    times = []
    for _ in range(15):
        if steps:
            rig.ring.begin_steps()
        time.sleep(IDLE_S)
        start = time.monotonic()
        device.collect(device.post(OP_RANGE, 0, run(0, 1), NO_PAIRS))
        times.append(time.monotonic() - start)
        if steps:
            rig.ring.end_steps()
    return times


def test_a_ticket_is_seen_while_its_device_steps(rig):
    rig.ring = rig.add_ring(device=True)
    device = Device(rig.ring)
    before = polls(rig)
    until_it_beats = np.median(answer_times(rig, device, steps=False))
    assert polls(rig) == before
    assert np.median(answer_times(rig, device, steps=True)) < until_it_beats
    assert polls(rig) > before


def test_a_device_keeps_credit_by_its_cells_alone(directory, rng):
    with Rig(directory, geometry=RingGeometry(4, 2, 1 << 10)) as rig:
        pack = rig.make_pack(rng)
        epoch = rig.bind(0, [pack], 512)
        rig.ring = rig.add_ring(device=True)
        device = Device(rig.ring)
        rig.ring.begin_steps()
        posted = []
        for step in range(60):
            layer, records = step % 2, np.sort(rng.choice(512, 64, replace=False))
            if len(posted) == 4:
                with pytest.raises(OutOfCredit):
                    device.post(OP_RANGE, 0, run(0, epoch), NO_PAIRS)
                check(rig, pack, device, *posted.pop(0))
            # tickets in flight name places of their own
            places = 64 * (step % 4) + rng.permutation(64)
            pairs = np.stack([records, places], 1).astype(np.uint32)
            runs = np.concatenate([run(0, epoch, lane=lane, pair_count=64) for lane in range(2)])
            posted.append((device.post(OP_GATHER, layer, runs, pairs), layer, records, places))
        for each in posted:
            check(rig, pack, device, *each)
        rig.ring.end_steps()


def check(rig, pack, device, seq, layer, records, places):
    assert device.collect(seq) == [(OK, 0), (OK, 0)]
    for lane in range(2):
        assert (rig.lane(layer, lane, 512)[places] == pack.records[layer, lane, records]).all()


def test_a_daemon_sleeps_while_no_device_steps(rig):
    rig.ring = rig.add_ring(device=True)
    rig.ring.begin_steps()
    start = polls(rig)
    until(lambda: polls(rig) > start + 10)
    rig.ring.end_steps()
    slept(rig, 1)
    before = polls(rig)
    slept(rig, 3)
    assert polls(rig) == before


def test_a_mark_that_nobody_renews_is_not_believed(rig):
    """Its worker is stopped, or was killed within a step and its connection lives on in a child."""
    rig.ring = rig.add_ring(device=True)
    for _ in range(2):
        rig.ring.begin_steps()
        start = polls(rig)
        until(lambda least=start + 10: polls(rig) > least)
        slept(rig, 2)
    device = Device(rig.ring)
    rig.ring.begin_steps()  # another number, so it is believed again
    time.sleep(IDLE_S)
    device.collect(device.post(OP_RANGE, 0, run(0, 1), NO_PAIRS))


def test_only_a_device_marks(rig):
    with pytest.raises(RuntimeError, match="device"):
        rig.ring.begin_steps()
    before = polls(rig)
    rig.ring.requests[STEPPING_OFFSET] = 1
    slept(rig, 3)
    assert polls(rig) == before
    rig.ring.close()
    with pytest.raises(RingPoisoned):
        rig.ring.begin_steps()


def test_who_always_marks_takes_nothing_from_a_neighbour(directory, rng):
    with FaultyRig(directory) as rig, FaultyRig(directory, beside=rig, owner=2000) as other:
        hostile = other.add_ring(device=True)
        over = threading.Event()

        def mark() -> None:
            while not over.wait(0.001):
                hostile.begin_steps()

        marker = threading.Thread(target=mark)
        marker.start()
        try:
            pack = rig.make_pack(rng)
            epoch = rig.bind(0, [pack], 512)
            start, before, times = time.monotonic(), polls(rig), []
            for _ in range(50):
                time.sleep(0.002)
                began = time.monotonic()
                assert rig.ask(OP_RANGE, 0, run(0, epoch, pair_count=64)).tolist() == [[OK, 0]]
                times.append(time.monotonic() - began)
            assert np.median(times) < 0.02
            assert 0 < polls(rig) - before < (time.monotonic() - start) / 20e-6 + 1
        finally:
            over.set()
            marker.join()
