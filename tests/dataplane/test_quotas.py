"""Owners of the DRAM tier: whose frames they are, what a bound keeps one to, and that the others do not feel it."""

import itertools
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from decode_worker._native import OP_GATHER, OP_RANGE
from kvstore_service._native import NativeError
from tests.support.rig import OK, WAIT_US, FaultyRig, Pack, Rig, run, until

FRAME_BYTES = 16384
FRAMES = 256  # of the tier
BOUNDED, FREE = 1000, 2000
TOKENS = 4096  # of a pack of two layers and two lanes: 512 frames
RECORD_BYTES = 512


@contextmanager
def two_owners(
    directory: Path, frames: int = FRAMES, copy_threads: int = 1, rig: type[Rig] = Rig
) -> Iterator[tuple[Rig, Rig]]:
    with ExitStack() as stack:
        options = {"window_bytes": 16 << 20, "staging_bytes": 4 << 20, "wait_ms": 20_000}
        bounded = stack.enter_context(
            rig(directory, dram_bytes=frames * FRAME_BYTES, owner=BOUNDED, copy_threads=copy_threads, **options)
        )
        elsewhere = directory / "free"
        elsewhere.mkdir()
        yield bounded, stack.enter_context(Rig(elsewhere, owner=FREE, beside=bounded, **options))


def read(rig: Rig, pack: Pack, epoch: int, tokens: int = TOKENS, layers: int = 2) -> None:
    """All of it, and what came is right."""
    for layer in range(layers):
        both = np.concatenate([run(0, epoch, lane=lane, pair_count=tokens) for lane in (0, 1)])
        assert rig.ask(OP_RANGE, layer, both).tolist() == [[OK, 0]] * 2
        for lane in (0, 1):
            assert (rig.lane(layer, lane, RECORD_BYTES)[:tokens] == pack.records[layer, lane, :tokens]).all()


def held(rig: Rig) -> dict[int, int]:
    """Frames by owner, of a census that adds up."""
    census = rig.plane.census()
    owners = rig.plane.owners()
    assert census["owners_miscounted"] == 0
    assert census["frames_of_owners"] == census["frames_used"] == census["frames_held"]
    assert census["blocks_landed"] == census["blocks_valid"] + census["blocks_evicted"]
    return owners


@contextmanager
def watching(rig: Rig, owner: int, most: int) -> Iterator[None]:
    """Fails if the owner is ever seen with more frames."""
    seen, done = set[int](), threading.Event()

    def look() -> None:
        while not done.is_set():
            seen.add(rig.plane.owners().get(owner, 0))

    looker = threading.Thread(target=look)
    looker.start()
    try:
        yield
    finally:
        done.set()
        looker.join(10)
    assert max(seen | {rig.plane.owners().get(owner, 0)}) <= most


@pytest.mark.parametrize("copy_threads", [1, 2])
def test_an_owner_at_its_bound_takes_its_own_frames_only(directory, rng, copy_threads):
    with two_owners(directory, copy_threads=copy_threads) as (bounded, free):
        flood, kept = bounded.make_pack(rng, tokens=TOKENS), free.make_pack(rng, tokens=512)
        flood_epoch, kept_epoch = bounded.bind(0, [flood], TOKENS), free.bind(0, [kept], 512)
        bounded.plane.set_dram_quota(BOUNDED, 32 * FRAME_BYTES + 1)
        read(free, kept, kept_epoch, 512)
        has = held(free)[FREE]
        with watching(bounded, BOUNDED, 32):
            for _ in range(3):
                read(bounded, flood, flood_epoch)
        assert held(bounded) == {BOUNDED: 32, FREE: has}
        before = free.plane.stats()["extent_misses"]
        read(free, kept, kept_epoch, 512)
        assert free.plane.stats()["extent_misses"] == before


def test_without_a_bound_the_flood_takes_all(directory, rng):
    """What the test above would see without a quota."""
    with two_owners(directory) as (flooding, free):
        flood, kept = flooding.make_pack(rng, tokens=TOKENS), free.make_pack(rng, tokens=512)
        flood_epoch, kept_epoch = flooding.bind(0, [flood], TOKENS), free.bind(0, [kept], 512)
        read(free, kept, kept_epoch, 512)
        for _ in range(3):
            read(flooding, flood, flood_epoch)
        assert held(free) == {BOUNDED: FRAMES}


def test_an_owner_keeps_what_it_uses_within_its_bound(directory, rng):
    """The clock of its own frames: what was just used outlives what was only read."""
    with two_owners(directory) as (bounded, _):
        pack = bounded.make_pack(rng, tokens=TOKENS)
        epoch = bounded.bind(0, [pack], TOKENS)
        bounded.plane.set_dram_quota(BOUNDED, 32 * FRAME_BYTES)
        hot = run(0, epoch, pair_count=256)  # 8 frames
        assert bounded.ask(OP_RANGE, 0, hot)[0, 0] == OK
        for first in range(256, 2048, 128):
            assert bounded.ask(OP_RANGE, 0, run(0, epoch, first_pair=first, pair_count=128))[0, 0] == OK
            assert bounded.ask(OP_RANGE, 0, hot)[0, 0] == OK
        before = bounded.plane.stats()["extent_misses"]
        assert bounded.ask(OP_RANGE, 0, hot)[0, 0] == OK
        assert bounded.plane.stats()["extent_misses"] == before


def test_the_least_quota_makes_progress_and_less_is_refused(directory, rng):
    with two_owners(directory) as (bounded, _):
        least = bounded.plane.dram_quota_min
        assert least == 8 * FRAME_BYTES
        with pytest.raises(NativeError, match=r"DRAM quota of 131071 B is too small; set at least 131072 B, or none"):
            bounded.plane.set_dram_quota(BOUNDED, least - 1)
        bounded.plane.set_dram_quota(BOUNDED, least)
        pack = bounded.make_pack(rng, tokens=1024)
        epoch = bounded.bind(0, [pack], 1024)
        everywhere = np.stack([rng.permutation(1024), np.arange(1024)], axis=1).astype(np.uint32)
        with watching(bounded, BOUNDED, 8):
            read(bounded, pack, epoch, 1024)
            gathers = np.concatenate([run(0, epoch, lane=lane, pair_count=1024) for lane in (0, 1)] * 8)
            assert (bounded.ask(OP_GATHER, 1, gathers, everywhere)[:, 0] == OK).all()
        assert (bounded.lane(1, 1, RECORD_BYTES) == pack.records[1, 1, everywhere[:, 0]]).all()
        assert held(bounded)[BOUNDED] == 8


def test_a_lowered_quota_holds_on_return_and_a_raised_one_at_once(directory, rng):
    with two_owners(directory) as (bounded, free):
        flood, kept = bounded.make_pack(rng, tokens=TOKENS), free.make_pack(rng, tokens=512)
        flood_epoch, kept_epoch = bounded.bind(0, [flood], TOKENS), free.bind(0, [kept], 512)
        read(bounded, flood, flood_epoch, 1024)
        read(free, kept, kept_epoch, 512)
        before = held(bounded)
        assert before[BOUNDED] > 100
        bounded.plane.set_dram_quota(BOUNDED, 20 * FRAME_BYTES)
        assert held(bounded) == {BOUNDED: 20, FREE: before[FREE]}
        with watching(bounded, BOUNDED, 20):
            read(bounded, flood, flood_epoch)
        bounded.plane.set_dram_quota(BOUNDED, 40 * FRAME_BYTES)
        read(bounded, flood, flood_epoch)
        assert held(bounded)[BOUNDED] == 40
        bounded.plane.set_dram_quota(BOUNDED, 0)
        read(bounded, flood, flood_epoch)
        assert held(bounded)[BOUNDED] > 100


def test_a_quota_lowered_under_a_flood_holds_when_the_runs_are_over(directory, rng):
    """Frames that runs hold when the bound falls go with their last pin."""
    with two_owners(directory, copy_threads=2) as (bounded, free):
        flood, kept = bounded.make_pack(rng, tokens=TOKENS), free.make_pack(rng, tokens=512)
        flood_epoch, kept_epoch = bounded.bind(0, [flood], TOKENS), free.bind(0, [kept], 512)
        for frames in (100, 8, 50, 8, 0, 8):
            runs = np.concatenate([run(0, flood_epoch, lane=lane, pair_count=TOKENS) for lane in (0, 1)])
            posted = [bounded.post(OP_RANGE, layer, runs) for layer in (0, 1)]
            bounded.plane.set_dram_quota(BOUNDED, frames * FRAME_BYTES)
            read(free, kept, kept_epoch, 512)
            for seq in posted:
                assert bounded.ring.wait(seq, 20_000_000).tolist() == [[OK, 0]] * 2
            until(lambda: bounded.plane.stats()["frames_pinned"] == 0)
            assert held(bounded)[BOUNDED] <= (frames or FRAMES)


def test_frames_in_use_when_the_bound_falls_go_with_their_last_pin(directory, rng):
    with two_owners(directory, rig=FaultyRig) as (bounded, _):
        plane, pack = bounded.plane, bounded.make_pack(rng, tokens=TOKENS)
        epoch = bounded.bind(0, [pack], TOKENS)

        def stopped_in_a_read(layer: int, lane: int) -> bool:
            """The copy thread stands still while a portion is pinned."""
            ended = plane.stats()["runs_ok"]
            seq = bounded.post(OP_RANGE, layer, run(0, epoch, lane=lane, pair_count=TOKENS))
            until(lambda: plane.stats()["frames_pinned"] > 8 or plane.stats()["runs_ok"] > ended)
            bounded.set_faults(stopped=True)
            plane.census()  # a command: its step is over
            if plane.stats()["frames_pinned"] > 8:
                return True
            bounded.set_faults()
            assert bounded.ring.wait(seq, WAIT_US).tolist() == [[OK, 0]]
            return False

        # Half of the pack fits into the tier: what is asked for has to be read again.
        places = itertools.cycle(itertools.product((0, 1), (0, 1)))
        until(lambda: stopped_in_a_read(*next(places)), 20)
        plane.set_dram_quota(BOUNDED, plane.dram_quota_min)
        assert held(bounded)[BOUNDED] == plane.stats()["frames_pinned"] > 8
        bounded.set_faults()
        until(lambda: plane.stats()["frames_pinned"] == 0)
        assert held(bounded)[BOUNDED] == 8


def test_hints_stay_within_the_bound_and_closed_packs_leave_it(directory, rng):
    with two_owners(directory) as (bounded, _):
        pack = bounded.make_pack(rng, tokens=TOKENS)
        bounded.plane.set_dram_quota(BOUNDED, 16 * FRAME_BYTES)
        with watching(bounded, BOUNDED, 16):
            bounded.plane.warm(pack.handle, np.full((2, 2), TOKENS, np.uint32), BOUNDED)
            until(lambda: bounded.plane.owners().get(BOUNDED) == 16)
        bounded.plane.close_pack(pack.handle)
        assert held(bounded) == {}
