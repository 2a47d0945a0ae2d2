"""The ring between two real processes, its credit, its sleep, and its bounded waits."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from decode_worker._native import (
    OP_GATHER,
    OP_RANGE,
    NoCredit,
    RingError,
    RingPoisoned,
    RingProducer,
    RingTimeout,
)
from kvstore_service._native import RingGeometry
from tests.support.rig import NO_PAIRS, OK, FaultyRig, Rig, mapped, run

CHILD = """
import mmap, sys, time
import numpy as np
from decode_worker._native import OP_GATHER, RUN_DTYPE, RingProducer
requests, completions, window_fd, window_bytes, epoch, pause_us, seed = map(int, sys.argv[1:])
ring = RingProducer(requests, completions)
window = np.frombuffer(mmap.mmap(window_fd, window_bytes, prot=mmap.PROT_READ), np.uint8)
rng = np.random.default_rng(seed)
digest = 0
for step in range(300):
    records = np.sort(rng.choice(512, 64, replace=False))
    places = rng.permutation(512)[:64]
    runs = np.zeros(1, RUN_DTYPE)
    runs["slot_epoch"], runs["pair_count"] = epoch, 64
    seq = ring.post(OP_GATHER, step, 0, runs, np.stack([records, places], 1).astype(np.uint32))
    result = ring.wait(seq, 5_000_000)
    assert result.tolist() == [[1, 0]], result
    lane = window[4096:4096 + 512 * 512].reshape(512, 512)
    digest = (digest * 31 + int(lane[places].astype(np.uint64).sum())) % (1 << 61)
    if pause_us: time.sleep(pause_us / 1e6)
print(digest)
"""


@pytest.mark.parametrize("pause_us", [0, 1000])
def test_a_worker_in_another_process(directory, rng, seed, pause_us):
    with Rig(directory) as rig:
        pack = rig.make_pack(rng)
        epoch = rig.bind(0, [pack], 512)
        requests, completions = rig.ring_memory()
        fds = (requests, completions, rig.window_fd)
        arguments = [*fds, rig.window_bytes, epoch, pause_us, seed]
        done = subprocess.run(
            [sys.executable, "-c", CHILD, *map(str, arguments)],
            pass_fds=fds, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        child = np.random.default_rng(seed)
        digest = 0
        for _ in range(300):
            records = np.sort(child.choice(512, 64, replace=False))
            child.permutation(512)
            digest = (digest * 31 + int(pack.records[0, 0, records].astype(np.uint64).sum())) % (1 << 61)
        assert int(done.stdout) == digest


def test_credit(directory, rng):
    with Rig(directory) as rig:
        pack = rig.make_pack(rng)
        epoch = rig.bind(0, [pack], 512)
        tickets = [
            rig.ring.post(OP_RANGE, 0, 0, run(0, epoch, pair_count=1), NO_PAIRS) for _ in range(rig.ring.tickets)
        ]
        assert rig.ring.in_flight == 8
        time.sleep(0.05)
        with pytest.raises(NoCredit):  # all consumed, but no cell has been read
            rig.ring.post(OP_RANGE, 0, 0, run(0, epoch), NO_PAIRS)
        assert rig.ring.poll(tickets[3]).tolist() == [[OK, 0]]  # read out of order
        with pytest.raises(NoCredit):
            rig.ring.post(OP_RANGE, 0, 0, run(0, epoch), NO_PAIRS)
        assert rig.ring.wait(tickets[0], 1_000_000).tolist() == [[OK, 0]]
        rig.ring.post(OP_RANGE, 0, 0, run(0, epoch), NO_PAIRS)
        with pytest.raises(NoCredit):
            rig.ring.post(OP_RANGE, 0, 0, run(0, epoch), NO_PAIRS)
        assert rig.ring.poll(tickets[3]).tolist() == [[OK, 0]]
        with pytest.raises(ValueError, match="not in flight"):
            rig.ring.poll(tickets[0])  # its area belongs to the ninth ticket now
        with pytest.raises(ValueError, match="not in flight"):
            rig.ring.wait(77, 1000)


CONSUMED_OFFSET, CELLS_OFFSET = 256, 320  # in CompletionsHeader and behind it, csrc/core/ring.h


def answered_but_not_consumed(rig):
    """A ring of two tickets, both answered and collected, that its daemon has not counted as consumed yet."""
    rig.set_faults(stopped=True)
    completions = mapped(rig.completion_fd, rig.geometry.completions_bytes)
    for _ in range(2):
        rig.ring.post(OP_RANGE, 0, 0, run(0, 1), NO_PAIRS)
    for seq in (1, 2):
        at = CELLS_OFFSET + seq % 2 * rig.geometry.runs_max * 16
        completions[at : at + 16] = np.array([seq, OK], np.uint64).view(np.uint8)
        assert rig.ring.poll(seq).tolist() == [[OK, 0]]
    return completions[CONSUMED_OFFSET : CONSUMED_OFFSET + 8].view(np.uint64)


def test_a_ticket_that_was_read_before_it_counts_as_consumed_only_delays_the_next_one(directory):
    with FaultyRig(directory, geometry=RingGeometry(2, 1, 1)) as rig:
        consumed = answered_but_not_consumed(rig)
        late = threading.Timer(0.1, lambda: consumed.__setitem__(0, 1))
        late.start()
        assert rig.ring.post(OP_RANGE, 0, 0, run(0, 1), NO_PAIRS, 20_000_000) == 3
        late.join()


def test_credit_that_never_comes_is_refused_at_the_deadline_and_poison_ends_the_wait_for_it(directory):
    with FaultyRig(directory, geometry=RingGeometry(2, 1, 1)) as rig:
        answered_but_not_consumed(rig)
        start = time.monotonic()
        with pytest.raises(NoCredit, match="not consumed after 50000 us"):
            rig.ring.post(OP_RANGE, 0, 0, run(0, 1), NO_PAIRS, 50_000)
        assert time.monotonic() - start >= 0.045
        poisoner = threading.Timer(0.05, rig.ring.poison)
        poisoner.start()
        with pytest.raises(RingPoisoned):
            rig.ring.post(OP_RANGE, 0, 0, run(0, 1), NO_PAIRS, 20_000_000)
        poisoner.join()


def test_a_ticket_that_its_caller_has_not_collected_is_refused_at_once(directory):
    with FaultyRig(directory, geometry=RingGeometry(2, 1, 1)) as rig:
        rig.set_faults(stopped=True)
        for _ in range(2):
            rig.ring.post(OP_RANGE, 0, 0, run(0, 1), NO_PAIRS)
        start = time.monotonic()
        with pytest.raises(NoCredit, match="not collected"):
            rig.ring.post(OP_RANGE, 0, 0, run(0, 1), NO_PAIRS, 20_000_000)
        assert time.monotonic() - start < 10


def test_a_signal_ends_a_wait(directory):
    class Rung(Exception):
        pass

    def ring_off(*_):
        raise Rung

    with FaultyRig(directory, geometry=RingGeometry(2, 1, 1)) as rig:
        consumed = answered_but_not_consumed(rig)
        before = signal.signal(signal.SIGALRM, ring_off)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(Rung):
                rig.ring.post(OP_RANGE, 0, 0, run(0, 1), NO_PAIRS, 20_000_000)
            consumed[0] = 2
            seq = rig.ring.post(OP_RANGE, 0, 0, run(0, 1), NO_PAIRS)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(Rung):
                rig.ring.wait(seq, 20_000_000)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert not rig.ring.poisoned


def test_limits(directory):
    with Rig(directory) as rig:
        pairs = np.zeros((4, 2), np.uint32)
        for runs, given in [
            (np.concatenate([run(0, 1)] * 65), NO_PAIRS),
            (run(0, 1)[:0], NO_PAIRS),
            (run(0, 1, first_pair=2, pair_count=3), pairs),
            (run(0, 1, first_pair=2**32 - 1, pair_count=2**32 - 1), pairs),
            (run(0, 1), np.zeros((65537, 2), np.uint32)),
            (np.zeros(4, np.uint64), pairs),
        ]:
            with pytest.raises(ValueError, match=r"run|pairs"):
                rig.ring.post(OP_GATHER, 0, 0, runs, given)
        assert rig.ring.in_flight == 0
        with pytest.raises(RingError):
            RingProducer(rig.window_fd, rig.completion_fd)
        with pytest.raises(RingError):
            RingProducer(rig.request_fd, rig.staging_fd)


def test_a_wait_ends_at_its_deadline_and_poisons(directory):
    with FaultyRig(directory) as rig:
        rig.set_faults(stopped=True)
        seq = rig.ring.post(OP_RANGE, 0, 0, run(0, 1), NO_PAIRS)
        start = time.monotonic()
        with pytest.raises(RingTimeout):
            rig.ring.wait(seq, 50_000)
        assert 0.045 < time.monotonic() - start < 0.5
        with pytest.raises(RingPoisoned):
            rig.ring.wait(seq, 1000)


def test_poison_wakes_a_sleeping_worker(directory):
    with FaultyRig(directory) as rig:
        timer = threading.Timer(0.05, rig.ring.poison)
        rig.set_faults(stopped=True)
        seq = rig.ring.post(OP_RANGE, 0, 0, run(0, 1), NO_PAIRS)
        timer.start()
        timer.join()
        start = time.monotonic()
        with pytest.raises(RingPoisoned):
            rig.ring.wait(seq, 10_000_000)
        assert time.monotonic() - start < 1


def test_both_sides_sleep_and_wake(directory, rng):
    with FaultyRig(directory, spin_us=0) as rig:
        pack = rig.make_pack(rng)
        epoch = rig.bind(0, [pack], 512)
        before = rig.plane.stats()
        rig.set_faults(delay_us=2000)
        times = []
        for _ in range(50):
            seq = rig.ring.post(OP_RANGE, 0, 0, run(0, epoch, pair_count=1), NO_PAIRS)
            start = time.monotonic()
            assert rig.ring.wait(seq, 5_000_000, spin_us=0).tolist() == [[OK, 0]]
            times.append(time.monotonic() - start)
            time.sleep(0.001)
        after = rig.plane.stats()
        assert after["wakes"] - before["wakes"] >= 40
        assert after["sleeps"] - before["sleeps"] >= 40
        assert np.median(times) < 0.02, "wakes are lost: only the idle timeout of 50 ms ends the sleep"


def test_an_idle_daemon_uses_no_cpu_and_beats(directory, rng):
    with Rig(directory, copy_threads=2) as rig:
        rings = [rig.add_ring() for _ in range(3)]
        time.sleep(0.2)
        usage = lambda: sum(resource.getrusage(resource.RUSAGE_SELF)[:2])  # noqa: E731
        before = usage()
        oldest = 0
        for _ in range(10):
            time.sleep(0.1)
            oldest = max(oldest, *(time.monotonic_ns() - ring.heartbeat_ns() for ring in rings))
        assert usage() - before < 0.02
        assert oldest < 250e6  # 50 ms, and a busy test machine


def test_a_blocked_worker_uses_no_cpu(directory):
    with FaultyRig(directory) as rig:
        rig.set_faults(stopped=True)
        seq = rig.ring.post(OP_RANGE, 0, 0, run(0, 1), NO_PAIRS)
        before = sum(os.times()[:2])
        with pytest.raises(RingTimeout):
            rig.ring.wait(seq, 500_000)
        assert sum(os.times()[:2]) - before <= 0.05


def test_more_rings_than_one_wait_can_hold(directory, rng):
    with Rig(directory, geometry=RingGeometry(2, 1, 1)) as rig:
        rings = [rig.add_ring() for _ in range(140)]
        times = []
        for number in rng.integers(0, 140, 15):
            time.sleep(0.01)
            start = time.monotonic()
            seq = rings[number].post(OP_RANGE, 0, 0, run(0, 1), NO_PAIRS)
            assert rings[number].wait(seq, 1_000_000).shape == (1, 2)
            times.append(time.monotonic() - start)
        assert np.median(times) < 0.02
