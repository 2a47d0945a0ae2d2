"""The worker's end of the data plane: window, staging and rings that it shares with its node's daemon."""

from __future__ import annotations

import contextlib
import mmap
import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from decode_worker import _native
from decode_worker.policy.plan import NO_PAIRS, Ticket
from decode_worker.window.base import WINDOWS, Window
from kvstore_service.client import RingGeometry, StoreClient, StoreError, WorkerMemory

DATA_LOSS = _native.FAULT_DATA_LOSS
LATE_RETRY_S = 1.0  # after runs whose disk reads or writes were too slow
BEAT_MARGIN_NS = 500_000_000  # a beat comes every 50 ms, but a loaded machine may delay it


class Transport:
    """Registers with the daemon and maps what it shares. One thread uses it at a time.

    `window` is where records arrive, `staging` a uint8 array over what STORE tickets read; `decode` is the ring of the
    decode steps, `bulk` the one of restores and stores. After a RingTimeout everything is
    poisoned: close, and make a new Transport.
    """

    def __init__(
        self,
        client: StoreClient,
        *,
        slots: int,
        window_bytes: int,
        staging_bytes: int,
        decode_ring: RingGeometry,
        bulk_ring: RingGeometry,
        wait_ms: int,
    ) -> None:
        self.client = client
        self.wait_us = wait_ms * 1000
        memory = client.register_worker(
            slots=slots,
            window_bytes=window_bytes,
            staging_bytes=staging_bytes,
            rings=[decode_ring, bulk_ring],
            wait_ms=wait_ms,
        )
        self.pack_tokens = memory.pack_tokens
        with contextlib.closing(memory):
            self.window = _window(memory)
            self.window.self_test()
            self._staging_map = mmap.mmap(memory.staging_fd, staging_bytes)
            self.staging = np.frombuffer(self._staging_map, dtype=np.uint8)
            self.decode, self.bulk = (_native.RingProducer(*fds) for fds in memory.rings)
        self._posted: deque[int] = deque()  # bulk tickets that nobody has collected
        self._ended: deque[NDArray[np.uint32]] = deque()  # answers to bulk tickets before these
        self._next_seq = 0
        client.serve_rings()
        client.guard(self.require_daemon)

    def require_alive(self) -> None:
        """Raises RingPoisoned after a RingTimeout, whichever ring it was."""
        if self.decode.poisoned or self.bulk.poisoned:
            raise _native.RingPoisoned("the store missed a deadline: this worker is finished, make a new one")

    def require_daemon(self) -> None:
        """StoreError (DEADLINE_EXCEEDED) once a ring is poisoned, or the daemon's heartbeat is older than any wait."""
        silence_ns = time.monotonic_ns() - self.bulk.heartbeat_ns()
        if self.decode.poisoned or self.bulk.poisoned or silence_ns > self.wait_us * 1000 + BEAT_MARGIN_NS:
            raise StoreError("DEADLINE_EXCEEDED", "the store does not answer: this worker is finished, make a new one")

    def run(self, tickets: Iterable[Ticket]) -> None:
        """Posts bulk tickets as credit allows and returns when all are done.
        Raises StoreError on the first failed run."""
        self.settle()
        for ticket in tickets:
            self.post(ticket)
        while self._posted or self._ended:
            self.collect()

    def post(self, ticket: Ticket) -> None:
        """Posts one bulk ticket, whose end somebody collects."""
        self._posted.append(self._post(ticket))

    def collect(self) -> None:
        """Returns when the oldest posted ticket is done. StoreError if a run of it failed."""
        raise_for_status(self._ended.popleft() if self._ended else self._await_oldest())

    def fetch(self, ticket: Ticket) -> None:
        """Posts one bulk ticket and returns when it is done, whatever else is under way. StoreError if a run failed."""
        raise_for_status(self.bulk.wait(self._post(ticket), self.wait_us))

    def settle(self) -> None:
        """Waits for bulk tickets that a failed call left behind, whatever became of them."""
        self._ended.clear()
        while self._posted:
            self._await_oldest()

    def _post(self, ticket: Ticket) -> int:
        """A ring takes a ticket once the one that many before it has been collected."""
        while self._posted and self._next_seq - self._posted[0] >= self.bulk.tickets:
            self._ended.append(self._await_oldest())
        seq = self.bulk.post(ticket.op, 0, ticket.layer, ticket.runs, ticket.pairs, self.wait_us)
        self._next_seq = seq + 1
        return seq

    def _await_oldest(self) -> NDArray[np.uint32]:
        return self.bulk.wait(self._posted.popleft(), self.wait_us)

    def close(self) -> None:
        self.decode.close()
        self.bulk.close()
        self.window.close()
        self.staging = np.empty(0, dtype=np.uint8)
        with contextlib.suppress(BufferError):  # a caller still holds a view; the mapping goes with it
            self._staging_map.close()


def _window(memory: WorkerMemory) -> Window:
    """FAILED_PRECONDITION for a kind that only the daemon knows."""
    if memory.window_kind not in WINDOWS.names:
        raise StoreError(
            "FAILED_PRECONDITION",
            f"the daemon's windows are {memory.window_kind!r}, this worker knows {', '.join(WINDOWS.names)}: "
            "start the daemon with one of these as its window",
        )
    return WINDOWS[memory.window_kind](memory.window_fd, memory.window_bytes)


def raise_for_status(statuses: NDArray[np.uint32]) -> None:
    """statuses: uint32[runs, 2] (status, aux). Raises StoreError for the gravest run that did not end OK."""
    failed = statuses[statuses[:, 0] != _native.STATUS_OK]
    if not len(failed):
        return
    status, fault = max((int(s), int(f)) for s, f in failed)
    worst = DATA_LOSS if DATA_LOSS in failed[:, 1] else fault
    name = _native.FAULT_NAMES.get(worst, "ABORTED" if status == _native.STATUS_STALE else "INTERNAL")
    retry_after_s = LATE_RETRY_S if name == "UNAVAILABLE" else None
    raise StoreError(name, f"{len(failed)} of {len(statuses)} transfers failed in the store ({name})", retry_after_s)


class StagingRing:
    """The staging memory as a ring of equal parts, one for each STORE ticket in flight."""

    def __init__(self, transport: Transport, part_bytes: int) -> None:
        transport.settle()
        self._transport = transport
        self._part_bytes = -(-part_bytes // 64) * 64
        parts = min(len(transport.staging) // self._part_bytes, transport.bulk.tickets)
        if parts < 1:
            raise ValueError(
                f"staging memory of {len(transport.staging)} bytes cannot hold one segment set of {part_bytes} bytes: "
                "raise staging_bytes or lower pack_tokens"
            )
        self._free = deque(range(parts))
        self._in_use: deque[int] = deque()  # parts in the order of their tickets

    def store(self, layer: int, fill: Callable[[NDArray[np.uint8], int], NDArray[np.void]]) -> None:
        """Posts one STORE ticket: `fill(part, offset)` writes the part (at `offset` of the staging memory) and
        returns its runs."""
        if not self._free:
            self._collect()
        part = self._free.popleft()
        offset = part * self._part_bytes
        runs = fill(self._transport.staging[offset : offset + self._part_bytes], offset)
        self._transport.post(Ticket(_native.OP_STORE, layer, runs, NO_PAIRS))
        self._in_use.append(part)

    def flush(self) -> None:
        """Returns when every posted STORE is acknowledged."""
        while self._in_use:
            self._collect()

    def _collect(self) -> None:
        self._transport.collect()
        self._free.append(self._in_use.popleft())
