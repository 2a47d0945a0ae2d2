"""A worker of the tests: a small layout, its memory and rings, and packs whose every byte is known.

A record's bytes say which pack, layer, lane and token it is of, so any wrong, stale or torn copy shows.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from decode_worker import _native
from decode_worker._native import RingProducer
from kvstore_service.client import (
    RECORD_ORDERS,
    KindSpec,
    Layout,
    PackRef,
    PackReservation,
    PrefixCandidate,
    ReservedPack,
    RingGeometry,
    StoreClient,
    WorkerMemory,
)

LAYERS, LANES, RECORD_BYTES = 2, 2, 256
LAYOUT = Layout(b"fingerprint of a tiny model".ljust(32, b"."), LAYERS, (KindSpec(LANES, 64, 2, RECORD_BYTES),))
TOKENS = 256
RECORD_ORDER = RECORD_ORDERS.index("cluster")
PLACES = 512
SLOTS = 2
LANE_BYTES = PLACES * RECORD_BYTES
WINDOW_BYTES = SLOTS * LAYERS * LANES * LANE_BYTES
SEGMENT_BYTES = TOKENS * (RECORD_BYTES + 2)
STAGING_BYTES = LAYERS * LANES * SEGMENT_BYTES
GEOMETRY = RingGeometry(tickets=8, runs_max=8, pairs_max=1024)
WAIT_US = 10_000_000
NO_PAIRS = np.empty((0, 2), np.uint32)


def digest(number: int) -> bytes:
    return number.to_bytes(4, "little") * 8


def reservation(number: int, index: int = 0, parent: bytes = b"") -> PackReservation:
    """Pack `number`, standing at place `index` of its chain."""
    return PackReservation(index * TOKENS, TOKENS, digest(number), parent, RECORD_ORDER)


def candidate(number: int, index: int = 0) -> PrefixCandidate:
    return PrefixCandidate(index * TOKENS, TOKENS, digest(number))


def records_of(number: int, layer: int, lane: int) -> NDArray[np.uint8]:
    """Every record of a segment in *token* order, uint8[TOKENS, RECORD_BYTES]."""
    seed = np.random.default_rng([number, layer, lane])
    return seed.integers(1, 256, (TOKENS, RECORD_BYTES), dtype=np.uint8)


def order_of(number: int, layer: int, lane: int) -> NDArray[np.uint16]:
    """Record -> token."""
    return np.random.default_rng([number, layer, lane, 1]).permutation(TOKENS).astype(np.uint16)


@dataclass
class TestWorker:
    """A registered client with its memory mapped; it waits for a ticket at most `wait_us`."""

    __test__ = False

    client: StoreClient
    wait_us: int = WAIT_US
    window_kinds: Sequence[str] = ()
    memory: WorkerMemory = field(init=False)

    def __post_init__(self) -> None:
        self.memory = self.client.register_worker(
            SLOTS, WINDOW_BYTES, STAGING_BYTES, [GEOMETRY, GEOMETRY], window_kinds=self.window_kinds
        )
        self._maps = [
            mmap.mmap(self.memory.window_fd, WINDOW_BYTES),
            mmap.mmap(self.memory.staging_fd, STAGING_BYTES),
        ]
        self.window, self.staging = (np.frombuffer(shared, np.uint8) for shared in self._maps)
        self.decode, self.bulk = (RingProducer(*fds) for fds in self.memory.rings)
        self.client.serve_rings()

    def close(self) -> None:
        self.decode.close()
        self.bulk.close()
        self.memory.close()

    def fill(self, upload_id: int, number: int, layer: int) -> NDArray[np.void]:
        """Stages a layer of pack `number` and returns the runs of its STORE ticket."""
        runs = np.zeros(LANES, _native.RUN_DTYPE)
        for lane in range(LANES):
            offset = (layer * LANES + lane) * SEGMENT_BYTES
            order = order_of(number, layer, lane)
            segment = self.staging[offset : offset + SEGMENT_BYTES]
            segment[: TOKENS * RECORD_BYTES] = records_of(number, layer, lane)[order].reshape(-1)
            segment[TOKENS * RECORD_BYTES :] = order.view(np.uint8)
            runs[lane]["slot"], runs[lane]["lane"], runs[lane]["arg"] = upload_id, lane, offset
        return runs

    def store(self, upload_id: int, number: int, layers: range = range(LAYERS)) -> None:
        """Fills an upload with pack `number` and waits for the acknowledgement."""
        for layer in layers:
            seq = self.bulk.post(_native.OP_STORE, 0, layer, self.fill(upload_id, number, layer), NO_PAIRS)
            statuses = self.bulk.wait(seq, self.wait_us)
            self.settle(statuses)

    def settle(self, statuses: NDArray[np.uint32]) -> None:
        """What becomes of a ticket's answers, uint32[runs, 2] (status, aux)."""
        assert (statuses[:, 0] == _native.STATUS_OK).all(), statuses

    def write(self, session: str, number: int, index: int = 0, compete: bool = False) -> ReservedPack:
        """Reserves and stores pack `number`; not committed yet."""
        reserved = self.client.reserve_pack(session, [reservation(number, index)], compete)[0]
        if reserved.upload_id is not None:
            self.store(reserved.upload_id, number)
        return reserved

    def commit(self, session: str, number: int) -> PackRef:
        reserved = self.write(session, number)
        assert reserved.upload_id is not None
        (committed,) = self.client.commit_pack(session, [reserved.upload_id])
        assert committed.pack is not None
        return committed.pack

    def windows(self, slot: int) -> NDArray[np.uint64]:
        first = np.arange(LAYERS * LANES, dtype=np.uint64) + np.uint64(slot * LAYERS * LANES)
        windows = np.stack([first * np.uint64(LANE_BYTES), np.full_like(first, PLACES)], axis=1)
        return windows.reshape(LAYERS, LANES, 2)

    def post_gather(self, layer: int, runs: NDArray[np.void], records: NDArray[np.uint32]) -> int:
        """Posts the runs of `gather_runs` for these records, sorted; returns the ticket."""
        pairs = np.stack([records, np.arange(len(records), dtype=np.uint32)], axis=1)
        return self.decode.post(_native.OP_GATHER, 0, layer, runs, np.tile(pairs, (LANES, 1)))

    def gather(self, slot: int, epoch: int, records: NDArray[np.uint32]) -> NDArray[np.uint8]:
        """Fetches records to places 0, 1, ... in every layer and lane: uint8[LAYERS, LANES, n, RECORD_BYTES]."""
        records = np.sort(records).astype(np.uint32)
        for layer in range(LAYERS):
            seq = self.post_gather(layer, gather_runs(slot, epoch, len(records)), records)
            statuses = self.decode.wait(seq, self.wait_us)
            self.settle(statuses)
        lanes = self.window.reshape(SLOTS, LAYERS, LANES, PLACES, RECORD_BYTES)
        return lanes[slot, :, :, : len(records)].copy()


def gather_runs(slot: int, epoch: int, count: int) -> NDArray[np.void]:
    """A run of `count` pairs per lane."""
    runs = np.zeros(LANES, _native.RUN_DTYPE)
    runs["slot"], runs["slot_epoch"], runs["generation"] = slot, epoch, 1
    runs["first_pair"], runs["pair_count"], runs["lane"] = np.arange(LANES) * count, count, np.arange(LANES)
    return runs


def expected(numbers: list[int], records: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """What `gather` must fetch from a session of these packs."""
    out = np.empty((LAYERS, LANES, len(records), RECORD_BYTES), np.uint8)
    for layer in range(LAYERS):
        for lane in range(LANES):
            parts = [records_of(number, layer, lane)[order_of(number, layer, lane)] for number in numbers]
            out[layer, lane] = np.concatenate(parts)[np.sort(records)]
    return out
