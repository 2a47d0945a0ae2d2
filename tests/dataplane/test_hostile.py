"""A worker may write anything into its request memory at any time: no crash, and no byte outside its lanes changes."""

import contextlib
import ctypes
import mmap
import platform
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from decode_worker._native import (
    OP_CANCEL,
    OP_GATHER,
    OP_PROBE,
    OP_PROMOTE,
    OP_RANGE,
    OP_STORE,
    REQUESTS_HEADER_BYTES,
    RUN_DTYPE,
    RingPoisoned,
    probe_lines,
)
from kvstore_service._native import NativeError, RingGeometry
from tests.support.rig import CANARY, ERROR, INVALID_ARGUMENT, OK, Rig, mapped, memfd, run, spec

HEADER, TICKET, RUN, PAIR = REQUESTS_HEADER_BYTES, 64, 32, 8
BAD = [ERROR, INVALID_ARGUMENT]


def outside_is_untouched(rig: Rig) -> bool:
    """But for whole lines of PROBEs, which belong where they are."""
    inside = np.zeros(rig.window_bytes, bool)
    for offset, places in rig.windows.reshape(-1, 2).astype(int):
        inside[offset : offset + places * 512] = True
    outside = ~inside.reshape(-1, 64)[:, 0]
    lines = rig.window.view(np.uint32).reshape(-1, 16)
    seeds = lines ^ probe_lines(0, 0, len(lines))
    probed = (seeds == seeds[:, :1]).all(1)
    return bool((probed | (rig.window.reshape(-1, 64) == CANARY).all(1))[outside].all())


def test_every_number_is_checked(directory, rng):
    with Rig(directory) as rig:
        pack = rig.make_pack(rng)
        epoch = rig.bind(0, [pack], 100, gap=512)
        top = 2**32 - 1
        ranges = [
            dict(pair_count=101), dict(pair_count=100, arg=1), dict(pair_count=1, arg=100),
            dict(pair_count=1, arg=2**64 - 1),
            dict(pair_count=50, arg=2**32), dict(first_pair=512, pair_count=1), dict(first_pair=top, pair_count=top),
            dict(first_pair=500, pair_count=13), dict(pair_count=1, lane=2), dict(pair_count=1, lane=65535),
            dict(pair_count=1, kind=1), dict(pair_count=1, kind=65535), dict(pair_count=top),
        ]  # fmt: skip
        runs = np.concatenate([run(0, epoch, **fields) for fields in ranges] + [run(0, epoch, pair_count=100)])
        assert rig.ask(OP_RANGE, 0, runs).tolist() == [BAD] * len(ranges) + [[OK, 0]]
        assert rig.ask(OP_RANGE, 2, run(0, epoch, pair_count=1)).tolist() == [BAD]
        assert rig.ask(OP_RANGE, 65535, run(0, epoch, pair_count=1)).tolist() == [BAD]
        assert rig.ask(OP_RANGE, 0, run(4, epoch, pair_count=1)).tolist() == [BAD]
        assert rig.ask(OP_RANGE, 0, run(top, epoch, pair_count=1)).tolist() == [BAD]
        for op in (0, 7, 255, 65535):
            assert rig.ask(op, 0, run(0, epoch, pair_count=1)).tolist() == [BAD]
        for record, place in [(512, 0), (0, 100), (top, 0), (0, top)]:
            pairs = np.array([[0, 0], [record, place], [1, 1]], np.uint32)
            runs = np.concatenate(
                [
                    run(0, epoch, pair_count=3),
                    run(0, epoch, pair_count=1),
                    run(0, epoch, pair_count=0),
                ]
            )
            assert rig.ask(OP_GATHER, 0, runs, pairs).tolist() == [BAD, [OK, 0], [OK, 0]]
        assert outside_is_untouched(rig)
        assert rig.plane.stats()["runs_error"] > 0


def test_bind_refuses_lanes_outside_the_window(directory, rng):
    with Rig(directory) as rig:
        pack = rig.make_pack(rng, layers=1, lanes=1)
        size = rig.window_bytes
        for offset, places in [
            (size, 1),
            (size - 511, 1),
            (0, size // 512 + 1),
            (2**64 - 512, 2),
            (0, 2**64 - 1),
            (512, 2**55),
        ]:
            windows = np.array([[[offset, places]]], np.uint64)
            with pytest.raises(NativeError) as error:
                rig.plane.bind(rig.worker, 0, [pack.handle], windows, 512)
            assert error.value.code == "INVALID_ARGUMENT"
        for shape in [(2, 1, 2), (1, 2, 2)]:
            with pytest.raises(NativeError) as error:
                rig.plane.bind(rig.worker, 0, [pack.handle], np.zeros(shape, np.uint64), 512)
            assert error.value.code == "FAILED_PRECONDITION"
        rig.plane.close_pack(pack.handle)  # nothing stayed bound


def raw_ring(rig: Rig):
    requests_fd, completions_fd = rig.ring_memory()
    g = rig.geometry
    return mmap.mmap(requests_fd, g.requests_bytes), mmap.mmap(completions_fd, g.completions_bytes, prot=mmap.PROT_READ)


def poisoned(completions) -> bool:
    return struct.unpack_from("<Q", completions, 64)[0] == 2**64 - 1


@pytest.mark.parametrize(("run_count", "first_run"), [(65, 0), (65535, 0), (1, 64), (64, 1), (1, 2**32 - 1)])
def test_impossible_ticket_poisons_the_registration(directory, rng, run_count, first_run):
    with Rig(directory) as rig:
        requests, completions = raw_ring(rig)
        requests[HEADER + TICKET : HEADER + 2 * TICKET] = struct.pack(
            "<QIHHHHI40x", 1, 0, 0, 0, 1, run_count, first_run
        )
        deadline = time.monotonic() + 5
        while not poisoned(completions):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        deadline = time.monotonic() + 5
        while not rig.ring.poisoned and time.monotonic() < deadline:
            time.sleep(0.001)
        with pytest.raises(RingPoisoned):  # its other ring too
            rig.ring.post(OP_RANGE, 0, 0, run(0, 1), np.zeros((0, 2), np.uint32))
        with pytest.raises(NativeError) as error:
            rig.ring_memory()
        assert error.value.code == "FAILED_PRECONDITION"


def test_garbage_in_runs_and_pairs(directory, rng):
    geometry = RingGeometry(tickets=4, runs_max=16, pairs_max=512)
    with Rig(directory, dram_bytes=1 << 20, spin_us=1_000_000, geometry=geometry) as rig:  # nobody rings the bell below
        pack = rig.make_pack(rng)
        epoch = rig.bind(0, [pack], 200, gap=512)
        requests, completions = raw_ring(rig)
        runs_at, pairs_at = HEADER + 4 * TICKET, HEADER + 4 * TICKET + 4 * 16 * RUN
        for seq in range(1, 1500):
            slot = seq % 4
            garbage = np.frombuffer(rng.bytes(16 * RUN), RUN_DTYPE).copy()
            tame = rng.random(16) < 0.7  # far enough to reach the checks behind the first one
            garbage["slot"][tame] = 0
            garbage["slot_epoch"][tame] = epoch
            garbage["lane"][tame] &= 1
            garbage["kind"][tame] = 0
            garbage["pair_count"][tame] &= 511
            garbage["first_pair"][tame & (rng.random(16) < 0.8)] &= 255
            garbage["arg"][tame & (rng.random(16) < 0.8)] &= 255
            pairs = np.frombuffer(rng.bytes(512 * PAIR), np.uint32).reshape(-1, 2).copy()
            if rng.random() < 0.7:
                pairs[:, 0] %= np.where(rng.random(512) < 0.002, 513, 512).astype(np.uint32)
                pairs[:, 1] %= np.where(rng.random(512) < 0.002, 201, 200).astype(np.uint32)
            requests[runs_at + slot * 16 * RUN : runs_at + (slot + 1) * 16 * RUN] = garbage.tobytes()
            requests[pairs_at + slot * 512 * PAIR : pairs_at + (slot + 1) * 512 * PAIR] = pairs.tobytes()
            op, count = int(rng.integers(0, 8)), int(rng.integers(0, 17))
            ticket = struct.pack("<IHHHHI40x", seq, int(rng.integers(0, 3)), 0, op, count, 0)
            at = HEADER + slot * TICKET
            requests[at + 8 : at + TICKET] = ticket
            requests[at : at + 8] = struct.pack("<Q", seq)
            deadline = time.monotonic() + 10
            while struct.unpack_from("<Q", completions, 256)[0] < seq:  # consumed
                assert time.monotonic() < deadline, "a run did not end"
                if seq % 64 == 0:
                    requests[pairs_at : pairs_at + 64] = rng.bytes(64)  # while it is being served
        assert not poisoned(completions)
        assert outside_is_untouched(rig)
        assert rig.plane.stats()["runs_ok"] > 100
        assert rig.ask(OP_RANGE, 0, run(0, epoch, pair_count=200)).tolist() == [[OK, 0]]
        assert (rig.lane(0, 0, 512) == pack.records[0, 0, :200]).all()


SCRIBBLER = """
import mmap, sys, time
import numpy as np
fd, size, tickets_end, seed = map(int, sys.argv[1:])
words = np.frombuffer(mmap.mmap(fd, size), np.uint32)
rng = np.random.default_rng(seed)
print("writing", flush=True)
while True:
    # Sequences and counts of tickets now and then, runs and pairs all the time; numbers of every magnitude.
    first = 64 if rng.random() < 0.002 else tickets_end // 4
    where = rng.integers(first, len(words), 512)
    words[where] = rng.integers(0, 2**32, 512, dtype=np.uint64) >> rng.integers(0, 33, 512, dtype=np.uint64)
    time.sleep(5e-5)  # leaves the processor to those who read
"""


@contextlib.contextmanager
def scribbler(rig: Rig, seed: int):
    """Another process that writes into the ring's requests while the daemon reads them."""
    fd, size = rig.request_fd, rig.geometry.requests_bytes
    numbers = [str(n) for n in (fd, size, HEADER + rig.geometry.tickets * TICKET, seed)]
    with subprocess.Popen(
        [sys.executable, "-c", SCRIBBLER, *numbers], pass_fds=[fd], stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout.readline() == b"writing\n"
            yield
        finally:
            process.kill()


def post_until_poisoned(hostile: Rig, epoch: int, upload: int, rng, tickets: int):
    """Posts tickets that are nearly right; yields after each. Ends early if the ring was poisoned."""
    requests = mmap.mmap(hostile.request_fd, hostile.geometry.requests_bytes)
    completions = mmap.mmap(hostile.completion_fd, hostile.geometry.completions_bytes, prot=mmap.PROT_READ)
    g = hostile.geometry
    runs_at = HEADER + g.tickets * TICKET
    pairs_at = runs_at + g.tickets * g.runs_max * RUN
    for seq in range(1, tickets + 1):
        slot = seq % g.tickets
        op = int(rng.choice([OP_GATHER, OP_GATHER, OP_RANGE, OP_STORE, OP_PROMOTE, OP_CANCEL, OP_PROBE]))
        runs = np.concatenate(
            [run(upload if op == OP_STORE else 0, epoch, pair_count=64, lane=i % 2) for i in range(g.runs_max)]
        )
        runs["arg"] = seq - 1 if op == OP_CANCEL else 0
        pairs = np.stack([rng.integers(0, 512, g.pairs_max), rng.integers(0, 200, g.pairs_max)], axis=1)
        at = runs_at + slot * g.runs_max * RUN
        requests[at : at + runs.nbytes] = runs.tobytes()
        at = pairs_at + slot * g.pairs_max * PAIR
        requests[at : at + g.pairs_max * PAIR] = pairs.astype(np.uint32).tobytes()
        at = HEADER + slot * TICKET
        requests[at + 8 : at + TICKET] = struct.pack("<IHHHHI40x", seq, seq % 2, 0, op, g.runs_max, 0)
        deadline = time.monotonic() + 20
        while struct.unpack_from("<Q", completions, 256)[0] < seq:  # a sequence that was overwritten is set again
            assert time.monotonic() < deadline, "a ticket did not end"
            requests[at : at + 8] = struct.pack("<Q", seq)
            if poisoned(completions):
                return
            time.sleep(2e-5)
        yield


@pytest.mark.parametrize("copy_threads", [1, 2])
def test_descriptors_that_change_while_they_are_read(directory, rng, seed, copy_threads):
    """A worker and its accomplice against a neighbour of whom every byte is known, for thousands of tickets."""
    geometry = RingGeometry(tickets=4, runs_max=8, pairs_max=512)
    small = dict(window_bytes=1 << 20, geometry=geometry)
    tickets = poisonings = 0
    with Rig(directory, dram_bytes=1 << 20, spin_us=5000, copy_threads=copy_threads, window_bytes=1 << 20) as honest:
        pack = honest.make_pack(rng)
        honest_epoch = honest.bind(0, [pack], 200, gap=512)
        wanted = honest.window.copy()
        while tickets < 2000:
            with Rig(directory, beside=honest, **small) as hostile:
                epoch = hostile.bind(0, [pack], 200, gap=512)
                upload = honest.plane.create_upload(str(directory / f"{tickets}.upload"), spec(rng, 2, 2, 512, 512))
                honest.plane.own_upload(hostile.worker, upload)
                with scribbler(hostile, seed + tickets):
                    before = tickets
                    for _ in post_until_poisoned(hostile, epoch, upload, rng, 500):
                        tickets += 1
                        if tickets % 8 == 0:
                            check_neighbour(honest, honest_epoch, pack, wanted, rng)
                    poisonings += tickets - before < 500
                assert outside_is_untouched(hostile)
                tickets += 1
        check_neighbour(honest, honest_epoch, pack, wanted, rng)
        stats = honest.plane.stats()
        assert stats["runs"] == stats["runs_ok"] + stats["runs_error"] + stats["runs_stale"]
        assert stats["runs_ok"] > 500
        assert stats["runs_error"] > 500
        assert (stats["workers"], stats["rings"], stats["bound_slots"], stats["uploads_open"]) == (1, 1, 1, 0)
        assert not list(directory.glob("*.upload"))
        print(f"{tickets} tickets, {poisonings} poisonings, {stats}")


def check_neighbour(honest: Rig, epoch: int, pack, wanted, rng) -> None:
    """Fetches records and compares the whole window, gaps included, with what must be there."""
    layer, lane = (int(n) for n in rng.integers(0, 2, 2))
    records = np.sort(rng.choice(512, 32, replace=False)).astype(np.uint32)
    places = rng.choice(200, 32, replace=False).astype(np.uint32)
    runs = run(0, epoch, pair_count=32, lane=lane)
    assert honest.ask(OP_GATHER, layer, runs, np.stack([records, places], axis=1)).tolist() == [[OK, 0]]
    offset = int(honest.windows[layer, lane, 0])
    lane_of = wanted[offset : offset + 200 * 512].reshape(200, 512)
    lane_of[places] = pack.records[layer, lane, records]
    assert (honest.window == wanted).all()


def test_wild_sequences_and_headers_are_ignored(directory, rng):
    with Rig(directory) as rig:
        pack = rig.make_pack(rng)
        epoch = rig.bind(0, [pack], 512)
        requests, completions = raw_ring(rig)
        for wild in (0, 2, 3, 9, 2**63, 2**64 - 1):
            requests[HEADER + TICKET : HEADER + TICKET + 8] = struct.pack("<Q", wild)
            time.sleep(0.005)
        requests[0:64] = rng.bytes(64)  # magic and geometry are read once, when the ring is made
        assert not poisoned(completions)
        assert rig.ask(OP_RANGE, 0, run(0, epoch, pair_count=512)).tolist() == [[OK, 0]]


def test_declared_sizes_are_checked(directory, rng):
    with Rig(directory) as rig:
        small = memfd("small", 4096)
        for window, staging in [
            ((small, 8192), (small, 4096)),
            ((small, 4096), (small, 2**40)),
            ((small, 0), (small, 4096)),
        ]:
            with pytest.raises(NativeError) as error:
                rig.plane.add_worker(*window, *staging, 1, owner=1000)
            assert error.value.code == "INVALID_ARGUMENT"
        with pytest.raises(NativeError):
            rig.plane.add_ring(rig.worker, small, small, rig.geometry)
        for geometry in [
            (3, 1, 1),
            (0, 1, 1),
            (8192, 1, 1),
            (8, 0, 1),
            (8, 65536, 1),
            (8, 1, 0),
            (8, 1, 2**24 + 1),
        ]:
            with pytest.raises(NativeError):
                RingGeometry(*geometry)


BELL, ASLEEP = 128, 192  # in both headers, csrc/core/ring.h
SYS_FUTEX = {"x86_64": 202, "aarch64": 98}[platform.machine()]
FUTEX_WAIT = 0


def test_a_worker_cannot_have_many_sleepers_woken(directory):
    """A thousand threads can sleep on one bell 128 times each; waking them all took the copy thread 10 ms."""
    libc = ctypes.CDLL(None)
    sleepers, patience = 8, struct.pack("ll", 2, 0)
    with Rig(directory) as rig, ThreadPoolExecutor(sleepers) as threads:
        completions = mapped(rig.completion_fd, rig.geometry.completions_bytes)
        bell = ctypes.c_void_p(completions[BELL:].ctypes.data)
        sleep = [threads.submit(libc.syscall, SYS_FUTEX, bell, FUTEX_WAIT, 0, patience) for _ in range(sleepers)]
        time.sleep(0.5)
        mapped(rig.request_fd, rig.geometry.requests_bytes)[ASLEEP] = 1
        rig.ring.poll(rig.post(OP_RANGE, 0, run(0, 1)))
        assert sum(one.result(20) == 0 for one in sleep) <= 1
        assert completions[BELL] == 1  # it was rung
