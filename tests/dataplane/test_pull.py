"""A device that reads the daemon's frames itself: pins, arenas, and what a worker that lies about either can do."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from decode_worker import _native
from decode_worker._native import OP_GATHER, OP_PROMOTE, OP_RANGE
from kvstore_service import _native as store_native
from kvstore_service._native import NativeError, RingGeometry
from tests.support.device import Device
from tests.support.rig import NO_PAIRS, OK, STALE, FaultyRig, Rig, memfd, run, until

FRAME = 16 << 10
DRAM, ARENA = 64 * FRAME, 32 * FRAME
MIB = 1 << 20


class PullRig(Rig):
    """A worker whose device pulls; `device` posts, `records` are where it finds them."""

    def __post_init__(self) -> None:
        self.window_kind, self.plane_windows = "pull", "auto"
        if not self.window_options:
            self.window_options = {"arena_bytes": ARENA}
        super().__post_init__()
        lines_at, lines, _ = _native.pull_layout(self.window_bytes)
        fd = self.plane.arena_descriptor(self.worker)
        self.fds.append(fd)
        self.arena_fd, self.arena_bytes = fd, os.fstat(fd).st_size
        self.arena = np.frombuffer(mmap.mmap(fd, self.arena_bytes, prot=mmap.PROT_READ), np.uint8)
        self.memory = np.frombuffer(mmap.mmap(self.window_fd, 0), np.uint8)
        self.lines = self.memory[lines_at:].view(np.uint32)[:lines]
        self.device_ring = self.add_ring(device=True)
        self.device = Device(self.device_ring)

    def release(self, seq: int) -> None:
        at = self.device_ring.layout["released"]
        self.device_ring.requests[at : at + 8].view(np.uint64)[0] = seq

    def pulls(self, epoch: int, layer: int, records, places, lanes=(0, 1)) -> int:
        pairs = np.stack([records, places], 1).astype(np.uint32)
        runs = np.concatenate([run(0, epoch, lane=lane, pair_count=len(pairs)) for lane in lanes])
        return self.device.post(OP_GATHER, layer, runs, pairs)

    def pulled(self, layer: int, lane: int, places, record_bytes: int = 512):
        """What the places' lines name: (from the arena?, records)."""
        first = int(self.windows[layer, lane, 0])
        at = first + np.asarray(places, np.int64) * record_bytes
        lines = self.lines[at // 64].astype(np.int64)
        names = [self.arena[(n - 1) * 64 :] if n else self.window[a:] for n, a in zip(lines, at, strict=True)]
        return lines > 0, np.stack([named[:record_bytes] for named in names])

    def check(self, pack, epoch: int, layer: int, records, places) -> tuple[int, int]:
        """Posts, waits, compares; (the ticket, how many of its records were left where they lie)."""
        seq = self.pulls(epoch, layer, records, places)
        assert self.device.collect(seq) == [(OK, 0), (OK, 0)]
        return seq, self.compare(pack, layer, records, places)

    def compare(self, pack, layer: int, records, places) -> int:
        count = 0
        for lane in range(2):
            where, found = self.pulled(layer, lane, places)
            assert (found == pack.records[layer, lane, records]).all()
            count += int(where.sum())
        return count

    def stat(self, name: str) -> int:
        return self.plane.stats()[name]


class FaultyPullRig(PullRig, FaultyRig):
    pass


def sizes(**more: object) -> dict:
    return {"dram_bytes": DRAM, "window_bytes": 4 * MIB, "geometry": RingGeometry(8, 8, 1 << 12)} | more


@pytest.fixture
def rig(directory):
    with PullRig(directory, **sizes()) as rig:
        yield rig


def test_records_are_left_where_they_lie_until_the_worker_has_read_them(rig, rng):
    pack = rig.make_pack(rng)
    epoch = rig.bind(0, [pack], 512)
    rig.device_ring.begin_steps()
    for step in range(40):
        records, places = np.sort(rng.choice(512, 40, replace=False)), rng.permutation(512)[:40]
        seq, named = rig.check(pack, epoch, step % 2, records, places)
        assert named > 0
        assert rig.stat("frames_pinned") > 0
        rig.release(seq)
        until(lambda: rig.stat("frames_pinned") == 0)
    assert rig.stat("records_pulled") > 0
    rig.device_ring.end_steps()


def test_pins_end_on_an_idle_ring_too(rig, rng):
    pack = rig.make_pack(rng)
    seq, _ = rig.check(pack, rig.bind(0, [pack], 512), 0, np.arange(20), np.arange(20))
    rig.release(seq)
    until(lambda: rig.stat("frames_pinned") == 0)


def test_a_pinned_frame_keeps_its_records_while_others_come_and_go(rig, rng):
    pack = rig.make_pack(rng)
    epoch = rig.bind(0, [pack], 512)
    held, places = np.arange(8), np.arange(8)
    _, named = rig.check(pack, epoch, 0, held, places)
    assert named == 16
    for _ in range(20):  # 64 extents over 32 frames
        for layer in range(2):
            for lane in range(2):
                assert rig.ask(OP_RANGE, layer, run(0, epoch, lane=lane, pair_count=400, arg=100))[0][0] == OK
    assert rig.stat("evictions") > 0
    rig.compare(pack, 0, held, places)


def test_beyond_the_bound_on_pins_records_are_copied(rig, rng):
    pack = rig.make_pack(rng)
    epoch = rig.bind(0, [pack], 512)
    bound = rig.arena_bytes // FRAME // 2
    posted, named = [], 0
    for i in range(4):  # each names 16 extents and more, and none is released
        records = np.sort(rng.choice(512, 100, replace=False))
        places = 100 * i + np.arange(100)
        _, more = rig.check(pack, epoch, i % 2, records, places)
        named += more
        posted.append((i % 2, records, places))
        until(lambda: rig.stat("frames_pinned") <= bound)
    assert 0 < named < 800
    for layer, records, places in posted:
        rig.compare(pack, layer, records, places)


def test_what_is_read_finds_its_place_behind_many_pinned_frames(directory, rng):
    """More than are looked at for one victim, in a row."""
    frames = 4096
    size = sizes(dram_bytes=2 * frames * 4096, window_bytes=48 * MIB, staging_bytes=16 * MIB, extent_blocks=1)
    with PullRig(directory, window_options={"arena_bytes": frames * 4096}, **size) as rig:
        pack = rig.make_pack(rng, tokens=16384)
        epoch = rig.bind(0, [pack], 16384)
        spread = np.arange(0, 16384, 16)
        _, named = rig.check(pack, epoch, 0, spread, np.arange(len(spread)))
        assert rig.stat("frames_pinned") == named == 2 * len(spread) > 2000
        for layer in range(2):
            for lane in range(2):
                assert rig.ask(OP_RANGE, layer, run(0, epoch, lane=lane, pair_count=14336, arg=2048))[0][0] == OK
                assert (rig.lane(layer, lane, 512)[2048:] == pack.records[layer, lane, :14336]).all()
        assert rig.stat("evictions") > 0
        rig.compare(pack, 0, spread, np.arange(len(spread)))


def test_an_arena_smaller_than_a_ticket_serves_it(directory, rng):
    with PullRig(directory, **sizes(window_options={"arena_bytes": 8 * FRAME})) as rig:
        pack = rig.make_pack(rng)
        epoch = rig.bind(0, [pack], 512)
        for layer in (0, 1, 0):
            _, named = rig.check(pack, epoch, layer, np.arange(512), rng.permutation(512))
            assert named < 1024


@pytest.mark.parametrize("frames", [8, 16])
def test_a_quota_below_half_an_arena_leaves_a_ticket_frames_to_read_into(directory, rng, frames):
    with PullRig(directory, **sizes(wait_ms=4000)) as rig:
        pack = rig.make_pack(rng)
        rig.plane.set_dram_quota(rig.owner, frames * FRAME)
        epoch = rig.bind(0, [pack], 512)
        for layer in (0, 1):  # none is released
            _, named = rig.check(pack, epoch, layer, np.arange(512), rng.permutation(512))
            assert named > 0 or layer == 1
            assert rig.stat("frames_pinned") <= frames // 2


def test_tickets_of_the_host_and_ranges_are_copied(rig, rng):
    pack = rig.make_pack(rng)
    epoch = rig.bind(0, [pack], 512)
    rig.lines[:] = 7
    assert rig.ask(OP_RANGE, 0, run(0, epoch, pair_count=100))[0][0] == OK
    seq = rig.device.post(OP_RANGE, 1, run(0, epoch, pair_count=100), NO_PAIRS)
    assert rig.device.collect(seq) == [(OK, 0)]
    pairs = np.stack([np.arange(50), np.arange(200, 250)], 1).astype(np.uint32)
    assert rig.ring.wait(rig.post(OP_GATHER, 0, run(0, epoch, pair_count=50), pairs), 10**7)[0][0] == OK
    assert rig.stat("records_pulled") == 0
    assert (rig.lane(0, 0, 512)[:100] == pack.records[0, 0, :100]).all()
    assert (rig.lane(1, 0, 512)[:100] == pack.records[1, 0, :100]).all()
    assert (rig.lane(0, 0, 512)[200:250] == pack.records[0, 0, :50]).all()
    assert not rig.pulled(0, 0, np.arange(100))[0].any()


def test_a_worker_that_never_says_that_it_has_read_is_poisoned_and_its_frames_come_back(directory, rng):
    with PullRig(directory, **sizes(wait_ms=300)) as rig:
        pack = rig.make_pack(rng)
        _, named = rig.check(pack, rig.bind(0, [pack], 512), 0, np.arange(64), np.arange(64))
        assert named > 0
        until(lambda: rig.stat("frames_pinned") == 0)
        assert rig.device_ring.poisoned
        assert rig.ring.poisoned
        assert rig.stat("pulls_late") == 1


def test_what_a_worker_says_that_it_has_read_concerns_its_own_pins_alone(directory, rng):
    with PullRig(directory, **sizes()) as rig, Rig(directory, beside=rig, owner=2000, geometry=rig.geometry) as other:
        mine, others = rig.make_pack(rng), other.make_pack(rng)
        epoch, theirs = rig.bind(0, [mine], 512), other.bind(0, [others], 512)
        rig.device_ring.begin_steps()
        for lie in (2**64 - 1, 0, 3, 2**63, 1, 2**64 - 1):
            rig.release(lie)
            rig.check(mine, epoch, 0, np.sort(rng.choice(512, 30, replace=False)), np.arange(30))
            assert other.ask(OP_RANGE, 0, run(0, theirs, pair_count=200))[0][0] == OK
            assert (other.lane(0, 0, 512)[:200] == others.records[0, 0, :200]).all()
        rig.release(2**64 - 1)
        until(lambda: rig.stat("frames_pinned") == 0)
        assert_adds_up(rig)


def test_unbinding_and_closing_wait_for_no_worker_that_reads(directory, rng):
    with PullRig(directory, **sizes(wait_ms=4000)) as rig:
        pack = rig.make_pack(rng)
        rig.check(pack, rig.bind(0, [pack], 512), 0, np.arange(64), np.arange(64))
        rig.plane.unbind(rig.worker, 0)
        rig.compare(pack, 0, np.arange(64), np.arange(64))
        rig.plane.close_pack(pack.handle)
        assert not rig.device_ring.poisoned
        assert rig.stat("frames_pinned") > 0
        assert str(pack.path) not in open_files()
        rig.compare(pack, 0, np.arange(64), np.arange(64))
        until(lambda: rig.stat("frames_pinned") == rig.stat("frames_used") == 0, 20.0)
        assert rig.device_ring.poisoned
        assert_adds_up(rig)


def open_files() -> set[str]:
    with os.scandir("/proc/self/fd") as entries:
        return {os.readlink(entry.path) for entry in entries if os.path.lexists(entry.path)}


def test_a_worker_that_goes_leaves_no_pin(rig, rng):
    pack = rig.make_pack(rng)
    rig.check(pack, rig.bind(0, [pack], 512), 0, np.arange(64), np.arange(64))
    rig.plane.remove_worker(rig.worker)
    assert rig.stat("frames_pinned") == 0
    assert_adds_up(rig)


def test_a_run_that_fails_half_way_leaves_no_pin(directory, rng):
    with FaultyPullRig(directory, **sizes()) as rig:
        pack = rig.make_pack(rng)
        epoch = rig.bind(0, [pack], 512)
        rig.set_faults(fail_every=2)
        rig.device_ring.begin_steps()
        for step in range(10):
            seq = rig.pulls(epoch, step % 2, np.sort(rng.choice(512, 60, replace=False)), np.arange(60))
            assert sorted(rig.device.collect(seq))[1] != (OK, 0)
            rig.release(seq)
        until(lambda: rig.stat("frames_pinned") == 0)
        assert_adds_up(rig)


def test_a_stale_run_names_nothing(rig, rng):
    pack = rig.make_pack(rng)
    epoch = rig.bind(0, [pack], 512)
    seq = rig.pulls(epoch + 1, 0, np.arange(8), np.arange(8))
    assert [status for status, _ in rig.device.collect(seq)] == [STALE, STALE]
    assert rig.stat("frames_pinned") == 0


# --- arenas ---


def assert_adds_up(rig) -> None:
    census = rig.plane.census()
    assert census["blocks_landed"] == census["blocks_valid"] + census["blocks_evicted"]
    assert census["frames_used"] == census["frames_held"] == census["frames_of_owners"]
    assert census["owners_miscounted"] == 0


def shared_bytes() -> int:
    """Resident shared memory of this process's mappings of arenas."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and ":" not in line.split()[0]:
            ours = "kvstore-arena" in line
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def test_an_arena_cannot_be_written_grown_or_shrunk(rig):
    fd, size = rig.arena_fd, rig.arena_bytes
    with pytest.raises(PermissionError):
        mmap.mmap(fd, size)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    for wrong in (size - 4096, size + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, wrong)
    with pytest.raises(PermissionError):  # nor may it be given back page by page
        fcntl.fcntl(fd, 1033, 0x10)
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(again, size)
    os.close(again)


def test_two_owners_never_see_each_others_bytes(directory, rng):
    options = {"arena_bytes": 16 * FRAME}
    with PullRig(directory, **sizes(window_options=options)) as rig, \
         PullRig(directory, beside=rig, owner=2000, **sizes(window_options=options)) as other:  # fmt: skip
        assert rig.stat("arenas") == 2
        packs = [each.make_pack(rng) for each in (rig, other)]
        epochs = [each.bind(0, [pack], 512) for each, pack in zip((rig, other), packs, strict=True)]
        for each, pack, epoch in zip((rig, other), packs, epochs, strict=True):
            each.device_ring.begin_steps()
            for step in range(10):
                records = np.sort(rng.choice(512, 50, replace=False))
                seq, _ = each.check(pack, epoch, step % 2, records, np.arange(50))
                each.release(seq)
        for each, pack in ((rig, packs[1]), (other, packs[0])):
            seen = {bytes(line) for line in each.arena.reshape(-1, 512) if line.any()}
            assert not seen & {bytes(record) for record in pack.records.reshape(-1, 512)}


def test_a_pack_of_another_owner_is_copied(rig, rng):
    pack = rig.make_pack(rng)
    pack.handle = rig.plane.open_pack(str(pack.path), 2000)
    _, named = rig.check(pack, rig.bind(0, [pack], 512), 0, np.arange(50), np.arange(50))
    assert named == 0


def test_the_tier_is_never_larger_than_told(directory, rng):
    """Frames of others make room for an arena, and take it back when its owner's last worker has gone."""
    with Rig(directory, **sizes(plane_windows="auto", window_options={"arena_bytes": ARENA})) as rig:
        others = rig.make_pack(rng, tokens=1024)
        epoch = rig.bind(0, [others], 1024)
        fill(rig, epoch)
        assert rig.plane.stats()["frames_used"] == 64
        first = PullRig(directory, beside=rig, owner=2000, **sizes())
        second = PullRig(directory, beside=rig, owner=2000, **sizes())
        assert rig.plane.stats()["arenas"] == 1
        assert rig.plane.stats()["frames_used"] <= 32
        fill(rig, epoch)
        assert rig.plane.owners()[rig.owner] == 32
        pack = first.make_pack(rng, tokens=1024)
        theirs = first.bind(0, [pack], 1024)
        fill(first, theirs)
        assert rig.plane.owners() == {rig.owner: 32, 2000: 32}
        assert shared_bytes() <= 3 * ARENA  # mapped here, and by both workers
        assert_adds_up(rig)
        first.plane.remove_worker(first.worker)
        assert rig.plane.stats()["arenas"] == 1
        second.plane.remove_worker(second.worker)
        assert rig.plane.stats()["arenas"] == 0
        fill(rig, epoch)
        assert rig.plane.owners()[rig.owner] == 64
        assert_adds_up(rig)
        for gone in (first, second):
            for fd in gone.fds:
                os.close(fd)


def test_an_arena_that_the_disk_still_reads_into_is_given_back_later(directory, rng):
    with FaultyPullRig(directory, **sizes()) as rig:
        pack = rig.make_pack(rng)
        epoch = rig.bind(0, [pack], 512)
        rig.native.io_shim_set([("read_ahead", "delay", 1, 1, 4_000_000)])
        pairs = np.zeros((1, 2), np.uint32)
        rig.post(OP_PROMOTE, 0, run(0, epoch, pair_count=1), pairs)
        until(lambda: rig.stat("frames_pinned") > 0)
        rig.plane.remove_worker(rig.worker)
        until(lambda: rig.stat("frames_pinned") == 0)
        rig.plane.give_back_arenas()
        assert rig.stat("arenas") == 0
        assert_adds_up(rig)


def fill(rig, epoch: int) -> None:
    for _ in range(2):
        for layer in range(2):
            for lane in range(2):
                assert rig.ask(OP_RANGE, layer, run(0, epoch, lane=lane, pair_count=1024))[0][0] == OK


def test_an_arena_that_cannot_be_had_is_refused_in_words(directory, rng):
    with PullRig(directory, **sizes()) as rig:
        with pytest.raises(NativeError, match=r"all 1 arenas .* are taken by other users") as refused:
            add_pulling_worker(rig, 2000)
        assert refused.value.code == "RESOURCE_EXHAUSTED"
        add_pulling_worker(rig, rig.owner)
        assert rig.stat("arenas") == 1
    with Rig(directory, plane_windows="auto") as none:
        assert none.plane.window_kinds == ["shm"]
        assert dict(none.plane.windows_refused)["pull"] == "arena_bytes is 0; set it to have windows of this kind"


def test_a_window_whose_size_wraps_around_is_refused(directory):
    wraps = (1 << 64) // 68 * 64 + 64
    with (
        PullRig(directory, **sizes()) as rig,
        pytest.raises(NativeError, match=r"window has 4096 bytes; 18446744073709551615 were declared"),
    ):
        add_pulling_worker(rig, rig.owner, memfd("window", 4096), wraps)


def add_pulling_worker(rig, owner: int, window: int | None = None, window_bytes: int = MIB) -> int:
    if window is None:
        window = memfd("window", store_native.pull_window_bytes(window_bytes))
    try:
        return rig.plane.add_worker(window, window_bytes, rig.staging_fd, 4096, 1, owner, 0, "pull")
    finally:
        os.close(window)


def test_what_an_owner_had_before_it_had_an_arena_is_read_again_there(directory, rng):
    with Rig(directory, **sizes(plane_windows="auto", window_options={"arena_bytes": ARENA})) as rig:
        pack = rig.make_pack(rng)
        fill_one = run(0, rig.bind(0, [pack], 512), pair_count=512)
        assert rig.ask(OP_RANGE, 0, fill_one)[0][0] == OK
        with PullRig(directory, beside=rig, owner=rig.owner, **sizes()) as pulling:
            assert rig.plane.stats()["frames_used"] == 0
            _, named = pulling.check(pack, pulling.bind(0, [pack], 512), 0, np.arange(20), np.arange(20))
            assert named > 0
        assert rig.ask(OP_RANGE, 0, fill_one)[0][0] == OK
        assert (rig.lane(0, 0, 512) == pack.records[0, 0]).all()
        assert_adds_up(rig)
