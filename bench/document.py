"""A random document in a private daemon, without a model, and what benchmarks ask a daemon."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from decode_worker import _native, packing
from decode_worker.device import Host
from decode_worker.engine.prefix import reservations
from decode_worker.policy.plan import RUN_DTYPE, gather_runs
from decode_worker.records import RecordFormat
from decode_worker.transport import Posted, Transport, raise_for_status
from decode_worker.work import Pieces, finish
from kvstore_service.client import AdminClient, CommittedPack, KindSpec, Layout, PackRef, RingGeometry, StoreClient
from kvstore_service.client.private import PrivateDaemon

STAGING_BYTES = 16 << 20
WAIT_MS = 60_000
IN_FLIGHT = 2

Prepared = tuple[int, NDArray[np.void], NDArray[np.uint32]]  # layer, runs, pairs


class StoredDocument:
    """`tokens` random records per layer and lane, stored, unless the daemon has them, and bound to slot 0 with
    `places` places per lane.

    All packs hold the same random K and V: what is copied does not matter here. `stored_s`: from the reservation until
    all of it was durable. Context manager, not thread-safe.
    """

    def __init__(
        self,
        daemon: PrivateDaemon,
        tokens: int,
        *,
        layers: int = 1,
        lanes: int = 2,
        head_dim: int = 128,
        places: int = 1024,
        tickets: int = 8,
    ) -> None:
        self.tokens, self.layers, self.lanes, self.places = tokens, layers, lanes, places
        self.records = RecordFormat(lanes, head_dim, "bfloat16")
        self._daemon = daemon
        self._ring = RingGeometry(tickets, lanes, places)
        self._posted: list[Posted] = []

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.client = StoreClient.connect(self._daemon.socket, self._daemon.broker, name="bench")
            stack.callback(self.client.close)
            lane_bytes = self.places * self.records.record_bytes
            self.transport = Transport(
                self.client,
                Host(),
                slots=1,
                window_bytes=self.layers * self.lanes * lane_bytes,
                staging_bytes=STAGING_BYTES,
                decode_ring=self._ring,
                bulk_ring=RingGeometry(8, max(8, self.lanes), 1),
                wait_ms=WAIT_MS,
                windows=("shm",),
            )
            stack.callback(self.transport.close)
            self.transport.window.tensor.zero_()  # every page is there before the first figure
            self._bind(lane_bytes)
            self._resources = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def gather_run(self, lane: int, records: NDArray[np.uint32]) -> tuple[NDArray[np.void], NDArray[np.uint32]]:
        """Runs and pairs of a ticket that brings `records` (sorted) of one lane to the places 0, 1, 2, ..."""
        pairs = np.stack([records, np.arange(len(records))], axis=1).astype(np.uint32)
        return gather_runs([0], [self._epoch], [0], [lane], [pairs])

    def gather(self, tickets: Iterable[tuple[int, int, NDArray[np.uint32]]]) -> None:
        """Posts (layer, lane, sorted records) tickets, two in flight at a time, and returns when all are done."""
        self.post((layer, *self.gather_run(lane, records)) for layer, lane, records in tickets)

    def post(self, tickets: Iterable[Prepared]) -> None:
        """The same with tickets (layer, runs, pairs)."""
        ring, pending = self.transport.decode, deque[int]()
        for step, ticket in enumerate(tickets):
            if len(pending) == IN_FLIGHT:
                raise_for_status(ring.wait(pending.popleft(), self.transport.wait_us))
            pending.append(ring.post(_native.OP_GATHER, step, *ticket))
        while pending:
            raise_for_status(ring.wait(pending.popleft(), self.transport.wait_us))

    def _bind(self, lane_bytes: int) -> None:
        kind = KindSpec(self.lanes, self.records.head_dim, self.records.code, self.records.record_bytes)
        layout = Layout(hashlib.sha256(b"bench").digest(), self.layers, (kind,))
        session = self.client.open_session(layout, self.tokens)
        started = time.perf_counter()
        reserved = self.client.reserve_pack(session, reservations(range(self.tokens), self.transport.pack_tokens))
        uploads = [item.upload_id for item in reserved if item.upload_id is not None]
        for item in reserved:
            if item.upload_id is not None:
                finish(self._store(item.upload_id, item.pack.tokens))
        for each in self._posted:
            each.check()
        new = iter(self.client.commit_pack(session, uploads) if uploads else ())
        committed = [item.pack if item.upload_id is None else _pack(next(new)) for item in reserved]
        self.stored_s = time.perf_counter() - started
        self.client.attach_packs(session, committed)
        offsets = np.arange(self.layers * self.lanes) * lane_bytes
        windows = np.stack([offsets, np.full_like(offsets, self.places)], axis=1).astype(np.uint64)
        self._epoch = self.client.bind_slot(session, 0, committed, windows)

    def _store(self, upload: int, tokens: int) -> Pieces[None]:
        keys, values = _random_pair(tokens, self.lanes, self.records.head_dim)
        order = packing.token_order(self.lanes, tokens)

        def fill(part: NDArray[np.uint8], offset: int) -> NDArray[np.void]:
            runs = np.zeros(self.lanes, RUN_DTYPE)
            runs["slot"], runs["lane"] = upload, range(self.lanes)
            runs["arg"] = offset + self.records.stage(part, keys, values, order)
            return runs

        staging, part_bytes = self.transport.staging, self.records.staged_bytes(tokens)
        for layer in range(self.layers):
            yield from staging.room(part_bytes)
            self._posted.append(staging.store(layer, part_bytes, fill))


@cache
def _random_pair(tokens: int, lanes: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.randn(tokens, lanes, head_dim, generator=torch.Generator().manual_seed(0))
    return keys, -keys


def scratch(parent: str | Path = "/var/tmp") -> tempfile.TemporaryDirectory[str]:
    """A temporary directory on a disk: packs are read with O_DIRECT, and /tmp may be memory."""
    return tempfile.TemporaryDirectory(prefix="headgate-bench-", dir=parent)


def counters(daemon: PrivateDaemon) -> dict[str, int]:
    """What the daemon has counted since it started."""
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        return dict(admin.get_status().counters)


def _pack(committed: CommittedPack) -> PackRef:
    if committed.pack is None:
        raise committed.error or RuntimeError("the store committed a pack without naming it")
    return committed.pack
