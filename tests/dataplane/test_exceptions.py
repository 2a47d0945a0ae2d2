"""Every allocation of a copy thread fails once: that costs what asked for it, at most its worker, and nobody else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from decode_worker._native import OP_GATHER, OP_PROMOTE, OP_RANGE, OP_STORE
from tests.support.rig import ERROR, OK, RESOURCE_EXHAUSTED, WAIT_US, FaultyRig, Pack, Rig, run, spec, until

TOKENS = 512
ALWAYS = 1 << 40
LIVES_MAX = 500
MAY_FAIL = {"own_upload", "add_ring"}  # calls, for want of memory
PAIRS = np.stack([np.arange(0, TOKENS, 8), np.arange(TOKENS // 8)], axis=1).astype(np.uint32)
ANSWERS = {(OK, 0), (ERROR, RESOURCE_EXHAUSTED)}
ALL_OK = [[OK, 0]] * 2


@contextmanager
def neighbours(directory: Path, rng: np.random.Generator) -> Iterator[tuple[FaultyRig, Rig, Pack]]:
    """Two workers of two owners on a fresh copy thread, which read one pack. The first one has used its ring."""
    sizes = {"window_bytes": 2 << 20, "staging_bytes": 1 << 20, "wait_ms": 4000}
    with (
        TemporaryDirectory(dir=directory) as own,
        FaultyRig(Path(own), owner=1, dram_bytes=4 << 20, **sizes) as innocent,
    ):
        pack, hot = innocent.make_pack(rng, tokens=TOKENS), innocent.make_pack(rng, tokens=256)
        innocent.epoch, innocent.hot = innocent.bind(0, [pack], TOKENS), innocent.bind(1, [hot], 256)
        assert innocent.ask(OP_RANGE, 0, both_lanes(1, innocent.hot, 256)).tolist() == ALL_OK
        with Rig(Path(own), owner=2, beside=innocent, **sizes) as victim:
            victim.epoch = victim.bind(0, [pack], TOKENS)
            yield innocent, victim, pack


def both_lanes(slot: int, epoch: int, records: int) -> np.ndarray:
    return np.concatenate([run(slot, epoch, lane=lane, pair_count=records) for lane in (0, 1)])


def live(victim: Rig, pack: Pack, rng: np.random.Generator) -> set[str]:
    """What a worker does, commands included. Every run must be answered; returns which calls were refused."""
    refused = set()

    def attempt(name: str, call: Callable[[], object]) -> object:
        try:
            return call()
        except (MemoryError, RuntimeError):
            refused.add(name)
            return None

    plane, epoch = victim.plane, victim.epoch
    several = np.concatenate([run(0, epoch, lane=lane, pair_count=len(PAIRS)) for lane in (0, 1)])
    everything = np.full((2, 2), TOKENS, np.uint32)
    upload = plane.create_upload(str(victim.directory / "upload"), spec(rng, 1, 1, 512, 256, native=victim.native))
    victim.staging[:] = 1
    victim.staging[256 * 512 : 256 * 514] = np.arange(256, dtype=np.uint16).view(np.uint8)
    attempt("hint", lambda: victim.post(OP_PROMOTE, 0, several, PAIRS))
    attempt("warm", lambda: plane.warm(pack.handle, everything, victim.owner))
    posted = [
        attempt("gather", lambda: victim.post(OP_GATHER, 1, several, PAIRS)),
        attempt("range", lambda: victim.post(OP_RANGE, 0, both_lanes(0, epoch, TOKENS))),
    ]
    attempt("own_upload", lambda: plane.own_upload(victim.worker, upload))
    if "own_upload" not in refused:
        posted.append(attempt("store", lambda: victim.post(OP_STORE, 0, run(upload, 0))))
    attempt("bind", lambda: plane.bind(victim.worker, 1, [pack.handle], victim.windows, 512))
    attempt("add_ring", victim.ring_memory)
    for ticket in posted:
        results = None if ticket is None else attempt("wait", lambda ticket=ticket: victim.ring.wait(ticket, WAIT_US))
        assert results is None or {tuple(result) for result in results.tolist()} <= ANSWERS, results.tolist()
    attempt("unbind", lambda: plane.unbind(victim.worker, 0))
    plane.abort_upload(upload)
    return refused


def nobody_else_suffers(innocent: FaultyRig, pack: Pack) -> None:
    """Neither through what was read for the other worker, nor through what was not."""
    assert innocent.ask(OP_RANGE, 0, both_lanes(1, innocent.hot, 256)).tolist() == ALL_OK
    for layer in (0, 1):
        assert innocent.ask(OP_RANGE, layer, both_lanes(0, innocent.epoch, TOKENS)).tolist() == ALL_OK
    innocent.window[:] = 0
    innocent.bind(2, [pack], TOKENS)
    slot_2 = both_lanes(2, 1, TOKENS)
    assert innocent.ask(OP_RANGE, 1, slot_2).tolist() == ALL_OK
    assert (innocent.lane(1, 1, 512) == pack.records[1, 1]).all()
    assert not innocent.ring.poisoned


def all_is_given_back(plane) -> None:
    until(lambda: plane.stats()["frames_pinned"] == 0, 20)
    census = plane.census()
    assert census["runs"] == census["runs_ended"]
    assert census["runs_in_flight"] == 0
    assert census["blocks_landed"] == census["blocks_valid"] + census["blocks_evicted"]
    assert plane.stats()["workers"] == 1


@pytest.mark.parametrize("strange", [False, True], ids=["bad_alloc", "another_exception"])
def test_each_allocation_fails_once(directory, rng, strange):
    refused, counted, lives, most = set[str](), Counter[str](), 0, 1
    # Lives differ a little in where they allocate what.
    while lives < most or (most > 1 and not refused >= MAY_FAIL and lives < LIVES_MAX):
        nth, lives = lives % most + 1, lives + 1
        with neighbours(directory, rng) as (innocent, victim, pack):
            before = innocent.plane.stats()
            innocent.native.alloc_shim_set(nth, 1, strange)
            refused |= live(victim, pack, rng)
            most = max(most, innocent.native.alloc_shim_count())
            innocent.native.alloc_shim_set()
            stats = innocent.plane.stats()
            counted.update({name: stats[name] - before[name] for name in stats})
            assert stats["worker_faults"] <= 1
            # What nobody expects costs the worker for which it happened its registration; missing memory does not.
            assert victim.ring.poisoned == (stats["worker_faults"] == 1)
            nobody_else_suffers(innocent, pack)
            victim.plane.remove_worker(victim.worker)
            all_is_given_back(innocent.plane)
            victim.worker = victim.plane.add_worker(victim.window_fd, 4096, victim.staging_fd, 4096, 1, victim.owner)
    if most == 1:
        pytest.skip("this build's allocations cannot fail")
    assert refused >= MAY_FAIL
    if strange:
        assert counted["worker_faults"] > 0
    else:
        assert refused == MAY_FAIL
        assert counted["worker_faults"] == 0
        assert counted["hints_dropped"] > 0
        assert counted["runs_error"] > 0


def test_hot_tickets_need_no_memory(directory, rng):
    with neighbours(directory, rng) as (innocent, victim, pack):
        innocent.native.alloc_shim_set(1, ALWAYS)
        victim_run = both_lanes(0, victim.epoch, TOKENS)
        for _ in range(10):
            ticket = victim.post(OP_RANGE, 0, victim_run)
            assert innocent.ask(OP_RANGE, 0, both_lanes(1, innocent.hot, 256)).tolist() == ALL_OK
            assert {tuple(result) for result in victim.ring.wait(ticket, WAIT_US).tolist()} <= ANSWERS
        innocent.native.alloc_shim_set()
        assert not victim.ring.poisoned
        assert victim.ask(OP_RANGE, 0, victim_run).tolist() == ALL_OK
        assert innocent.plane.stats()["worker_faults"] == 0
        nobody_else_suffers(innocent, pack)
