"""Frames that copies hold without a lock, while others evict, unbind, close packs, lower bounds and fail reads."""

import threading
import time
from contextlib import ExitStack
from errno import EIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from decode_worker._native import OP_GATHER, OP_RANGE
from tests.dataplane.test_quotas import FRAME_BYTES, held
from tests.support.rig import (
    DATA_LOSS,
    ERROR,
    NO_PAIRS,
    OK,
    STALE,
    UNAVAILABLE,
    WAIT_US,
    FaultyRig,
    Pack,
    Rig,
    run,
    until,
)

FRAMES = 48  # of the tier; the packs take 16 each, and all of them 96
TOKENS = 512
PLACES = 640
RECORDS_MAX = 600
SECONDS = 2.5
DEADLINE_S = 60  # until each kind of answer was seen, where everything takes its time
OWNERS = (1000, 1000, 2000)  # of the workers


class Reader:
    """One worker, and a plain model of its lane: what each place holds, or may hold."""

    def __init__(self, rig: Rig, shared: list[Pack], own: Pack, rng: np.random.Generator) -> None:
        self.rig, self.shared, self.own, self.rng = rig, shared, own, rng
        self.served = self.stale = self.failed = 0

    def run(self, ended: threading.Event) -> None:
        while not ended.is_set():
            packs = [self.own, *self.shared]
            epoch = self.rig.bind(0, packs, PLACES)
            content = np.concatenate([pack.records[0, 0] for pack in packs])
            for _ in range(int(self.rng.integers(1, 8))):
                self._read(epoch, content)
            self._read(epoch, content, leaving=True)
            if self.rng.random() < 0.5:
                self.rig.plane.close_pack(self.own.handle)
                self.own.handle = self.rig.plane.open_pack(str(self.own.path), self.rig.owner)

    def _read(self, epoch: int, content: NDArray[np.uint8], leaving: bool = False) -> None:
        """leaving: the slot is unbound meanwhile."""
        rig, rng = self.rig, self.rng
        count = int(rng.integers(1, RECORDS_MAX))
        places = rng.permutation(PLACES)[:count]
        if rng.random() < 0.5:
            first = int(rng.integers(0, len(content) - count))
            records, place = np.arange(first, first + count), int(rng.integers(0, PLACES - count))
            places = np.arange(place, place + count)
            asked = (OP_RANGE, run(0, epoch, first_pair=first, pair_count=count, arg=place), NO_PAIRS)
        else:  # mostly where others are as well
            records = np.sort(rng.integers(0 if rng.random() < 0.3 else TOKENS, len(content), count))
            asked = (OP_GATHER, run(0, epoch, pair_count=count), np.stack([records, places], 1).astype(np.uint32))
        before = rig.lane(0, 0, 512).copy()
        ticket = rig.post(asked[0], 0, *asked[1:])
        if leaving:
            rig.plane.unbind(rig.worker, 0)
        status, fault = rig.ring.wait(ticket, WAIT_US)[0]
        after = rig.lane(0, 0, 512)
        came = (after[places] == content[records]).all(1)
        if status == OK:
            assert came.all(), "a place holds another record"
            self.served += 1
        elif status == STALE:
            assert leaving
            self.stale += 1
        else:
            assert status == ERROR
            assert fault in (UNAVAILABLE, DATA_LOSS)
            self.failed += 1
        assert (came | (after[places] == before[places]).all(1)).all(), "a place holds what is no record of its own"
        others = np.delete(np.arange(PLACES), places)
        assert (after[others] == before[others]).all(), "a place that nobody asked for was written"


def test_what_is_held_stays_whatever_others_do(directory: Path, rng: np.random.Generator) -> None:
    with ExitStack() as stack:
        rig = stack.enter_context(
            FaultyRig(directory, dram_bytes=FRAMES * FRAME_BYTES, copy_threads=2, owner=OWNERS[0])
        )
        rigs: list[Rig] = [rig, *(stack.enter_context(Rig(directory, owner=o, beside=rig)) for o in OWNERS[1:])]
        made = [[each.make_pack(rng, layers=1, lanes=1, tokens=TOKENS) for _ in range(2)] for each in rigs]
        shared, readers = [mine for mine, _ in made], []
        for each, (_, own) in zip(rigs, made, strict=True):
            readers.append(Reader(each, shared, own, np.random.default_rng(rng.integers(1 << 32))))
        failures: list[BaseException] = []
        ended = threading.Event()
        rig.set_faults(dawdle_us=2000, seed=int(rng.integers(1 << 32)))

        def guarded(reader: Reader) -> None:
            try:
                reader.run(ended)
            except BaseException as error:
                failures.append(error)
                ended.set()

        def seen() -> dict[str, int]:
            return {what: sum(getattr(r, what) for r in readers) for what in ("served", "stale", "failed")}

        threads = [threading.Thread(target=guarded, args=(reader,)) for reader in readers]
        for thread in threads:
            thread.start()
        start = time.monotonic()
        while any(thread.is_alive() for thread in threads):
            passed_s = time.monotonic() - start
            if passed_s > (SECONDS if all(seen().values()) else DEADLINE_S):
                ended.set()
            held(rig)  # the census adds up at any moment
            bound = int(rng.integers(rig.plane.dram_quota_min, FRAMES * FRAME_BYTES))
            rig.plane.set_dram_quota(OWNERS[0], bound)
            most = bound // FRAME_BYTES  # what is held now goes with its hold
            until(lambda most=most: rig.plane.owners().get(OWNERS[0], 0) <= most)
            fails = [("gather", "fail", int(rng.integers(1, 40)), 1, EIO)] if rng.random() < 0.2 else []
            rig.native.io_shim_set([*fails, ("gather", "delay", int(rng.integers(1, 20)), 3, 500)])
            time.sleep(0.005)
        if failures:
            raise failures[0]
        assert all(seen().values()), seen()
        assert rig.plane.stats()["evictions"] > 0
        assert rig.plane.stats()["frames_pinned"] == 0
        for pack in (pack for pair in made for pack in pair):
            rig.plane.close_pack(pack.handle)
        held(rig)
        assert rig.plane.stats()["frames_used"] == 0, "a frame that was held when it should have gone is still there"
