"""The worker's end of the data plane: window, staging and rings that it shares with its node's daemon."""

from __future__ import annotations

import contextlib
import math
import mmap
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from decode_worker import _native
from decode_worker.closing import close_all
from decode_worker.device import Device
from decode_worker.policy.plan import NO_PAIRS, Ticket
from decode_worker.window.base import Window, WindowError
from decode_worker.window.kinds import WINDOWS
from decode_worker.window.probes import try_window
from decode_worker.work import Pieces
from kvstore_service.client import RingGeometry, StoreClient, StoreError, WorkerMemory

DATA_LOSS, ABORTED = _native.FAULT_DATA_LOSS, _native.FAULT_ABORTED
LATE_RETRY_S = 1.0  # after runs whose disk reads or writes were too slow
PART_ALIGN = 64
LOOK_S_MIN, LOOK_S_MAX = 20e-6, 1e-3  # between two looks at a ticket that is waited for
NOT_THIS_WINDOW = ("FAILED_PRECONDITION", "RESOURCE_EXHAUSTED")  # the daemon has none, or no room for one
BEAT_MARGIN_NS = 500_000_000  # a beat comes every 50 ms, but a loaded machine may delay it


class Transport:
    """Registers with the daemon and maps what it shares. One thread uses it at a time.

    `window` is where records arrive, `staging` what STORE tickets read; `decode` is the ring of the decode steps,
    `more_decode` are others that share their tickets, `bulk` is the one of restores and stores. After a RingTimeout
    everything is poisoned: close, and make a new Transport.
    """

    def __init__(
        self,
        client: StoreClient,
        device: Device,
        *,
        slots: int,
        window_bytes: int,
        staging_bytes: int,
        decode_ring: RingGeometry,
        bulk_ring: RingGeometry,
        wait_ms: int,
        windows: Sequence[str],
        decode_rings: int = 1,
    ) -> None:
        """windows: by name, the best first. The first one that the daemon has and that works is taken; StoreError or
        WindowError, with all the reasons, if there is none. `device` is closed with it."""
        self.client = client
        self._device = device
        self.wait_us = wait_ms * 1000
        self._posted: deque[Posted] = deque()  # bulk tickets, the oldest first
        self._next_seq = 0
        self._moved_s = 0.0  # when a bulk ticket was posted, or a run of one was last seen to have ended
        register = partial(
            client.register_worker,
            slots=slots,
            window_bytes=window_bytes,
            staging_bytes=staging_bytes,
            rings=[*[decode_ring] * decode_rings, bulk_ring],
            wait_ms=wait_ms,
        )
        self.windows_refused: dict[str, str] = {}  # by name, why they were not taken
        self.window_name = self._first_that_works(windows, register)
        client.guard(self.require_daemon)

    def _first_that_works(self, windows: Sequence[str], register: Callable[..., WorkerMemory]) -> str:
        for name in windows:
            try:
                self._open(name, register)
                return name
            except WindowError as error:
                refused: Exception = error
                self.windows_refused[name] = str(error)
            except StoreError as error:
                if error.code not in NOT_THIS_WINDOW:
                    raise
                refused = error
                self.windows_refused[name] = error.message
        reasons = "; ".join(f"window {name}: {reason}" for name, reason in self.windows_refused.items())
        if isinstance(refused, StoreError):
            raise StoreError(
                refused.code, reasons, refused.retry_after_s, refused.violations, refused.request_id, refused.reason
            )
        raise WindowError(reasons)

    def _open(self, name: str, register: Callable[..., WorkerMemory]) -> None:
        """Registers with a window of this name and tries it. After a WindowError nothing is registered any more."""
        made = WINDOWS[name]()
        with contextlib.closing(register(window_kinds=[made.kind])) as memory:
            try:
                self._map(made, memory)
            except (RuntimeError, OSError) as error:
                self.client.unregister_worker(f"window {name}: {error}")
                raise WindowError(str(error)) from error

    def _map(self, made: type[Window], memory: WorkerMemory) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(self._device.close)  # what a window has shared that was not made in the end
            self.window = made.over(memory, self._device)
            undo.callback(self.window.close)
            undo.callback(self._device.close)  # before what it shares is unmapped, here and below
            self._staging_map = mmap.mmap(memory.staging_fd, memory.staging_bytes)
            self.staging = Staging(self, np.frombuffer(self._staging_map, dtype=np.uint8))
            undo.callback(self._close_staging)
            self.pack_tokens = memory.pack_tokens
            rings = [_native.RingProducer(*fds) for fds in memory.rings]
            for ring in rings:
                undo.callback(ring.close)
            (self.decode, *self.more_decode), self.bulk = rings[:-1], rings[-1]
            undo.callback(self._device.close)
            self.client.serve_rings()
            try_window(self.window, self._device, self.bulk if self._device.wakes else self.decode, self.wait_us)
            undo.pop_all()

    @property
    def poisoned(self) -> bool:
        """Whether there was a RingTimeout, whichever ring it was."""
        return any(ring.poisoned for ring in (self.decode, *self.more_decode, self.bulk))

    @contextlib.contextmanager
    def steps(self) -> Iterator[None]:
        """While the device may post. Who leaves it has seen what was launched end; behind an error that is waited for
        here, since without the mark nobody would look for what is still posted. RingPoisoned."""
        if self._device.wakes:
            yield
            return
        self.decode.begin_steps()
        try:
            yield
        except BaseException:
            self._let_end()
            raise
        finally:
            with contextlib.suppress(_native.RingPoisoned):  # then nobody looks for what it posts any more
                self.decode.end_steps()

    def _let_end(self) -> None:
        """As long as one answer may take: a device that hangs must not hide what went wrong."""
        deadline = time.monotonic() + self.wait_us * 1e-6
        with contextlib.suppress(RuntimeError):  # nothing runs on a device that has failed
            while not self._device.idle() and time.monotonic() < deadline:
                time.sleep(LOOK_S_MAX)

    def require_alive(self) -> None:
        """Raises RingPoisoned after a RingTimeout."""
        if self.poisoned:
            raise _native.RingPoisoned("the store missed a deadline: this worker is finished, make a new one")

    def require_daemon(self) -> None:
        """StoreError (DEADLINE_EXCEEDED) once a ring is poisoned, or the daemon's heartbeat is older than any wait."""
        silence_ns = time.monotonic_ns() - self.bulk.heartbeat_ns()
        if self.poisoned or silence_ns > self.wait_us * 1000 + BEAT_MARGIN_NS:
            raise StoreError("DEADLINE_EXCEEDED", "the store does not answer: this worker is finished, make a new one")

    def post(self, ticket: Ticket) -> Posted:
        """Posts one bulk ticket; waits first if the ring is full of others."""
        while not self._takes():
            self._posted[0].settle()
            self._posted.popleft()
        seq = self.bulk.post(ticket.op, 0, ticket.layer, ticket.runs, ticket.pairs, self.wait_us)
        self._posted.append(Posted(self, seq))
        self._next_seq = seq + 1
        self.moved()
        return self._posted[-1]

    def moved(self) -> None:
        """Something has gone on: the wait for bulk tickets begins anew."""
        self._moved_s = time.monotonic()

    def overdue(self) -> bool:
        """Whether nothing of any bulk ticket has moved for as long as one may be waited for. RingPoisoned."""
        if time.monotonic() - self._moved_s < self.wait_us * 1e-6:
            return False
        if any([posted.look() for posted in self._posted]):  # what nobody has looked at since
            self.moved()
            return False
        return True

    def room(self) -> Pieces[None]:
        """Until the ring takes another bulk ticket at once."""
        while True:
            while self._posted and self._posted[0].done():
                self._posted.popleft().settle()
            if self._takes():
                return
            yield self._posted[0]

    def run(self, tickets: Iterable[Ticket]) -> Pieces[None]:
        """Posts bulk tickets as the ring takes them, until all are done. StoreError on the first failed run."""
        under_way = []
        for ticket in tickets:
            yield from self.room()
            under_way.append(self.post(ticket))
            yield None
        for posted in under_way:
            yield posted
            posted.check()

    def _takes(self) -> bool:
        """A ring takes a ticket once the one that many before it has been collected."""
        return not self._posted or self._next_seq - self._posted[0].seq < self.bulk.tickets

    def close(self) -> None:
        """All of it, also of a device whose every call fails by now: that error is raised then."""
        close_all(
            self._device.close, self.decode.close, *(ring.close for ring in self.more_decode), self.bulk.close,
            self.window.close, self._close_staging,
        )  # fmt: skip

    def _close_staging(self) -> None:
        self.staging.memory = np.empty(0, dtype=np.uint8)
        with contextlib.suppress(BufferError):  # a caller still holds a view; the mapping goes with it
            self._staging_map.close()


def raise_for_status(statuses: NDArray[np.uint32]) -> None:
    """statuses: uint32[runs, 2] (status, aux). Raises StoreError for the gravest run that did not end OK."""
    failed = statuses[statuses[:, 0] != _native.STATUS_OK]
    if not len(failed):
        return
    status, fault = max((int(s), int(f)) for s, f in failed)
    worst = DATA_LOSS if DATA_LOSS in failed[:, 1] else fault
    if not worst and status == _native.STATUS_STALE:
        worst = ABORTED
    raise fault_of(worst, f"{len(failed)} of {len(statuses)} transfers")


def fault_of(code: int, what: str = "a transfer") -> StoreError:
    """code: enum Fault in csrc/core/ring.h."""
    name = _native.FAULT_NAMES.get(code, "INTERNAL")
    return StoreError(name, f"{what} failed in the store ({name})", LATE_RETRY_S if name == "UNAVAILABLE" else None)


class Posted:
    """A bulk ticket under way.

    Its deadline counts from when the ring's tickets last moved, as the daemon's own does: one behind others that take
    their time is not lost."""

    def __init__(self, transport: Transport, seq: int) -> None:
        self.seq = seq
        self._transport = transport
        self._ring = transport.bulk
        self._ended = 0  # runs
        self._statuses: NDArray[np.uint32] | None = None

    def look(self) -> bool:
        """Whether more of it has ended since the last look. RingPoisoned."""
        if self._statuses is not None:
            return False
        statuses = self._ring.poll(self.seq)
        before, self._ended = self._ended, int(np.count_nonzero(statuses[:, 0]))
        if self._ended == len(statuses):
            self._statuses = statuses
        return self._ended > before

    def done(self) -> bool:
        """Whether it has ended, or never will: then `settle` says why. Never blocks."""
        try:
            if self.look():
                self._transport.moved()
            return self._statuses is not None or self._transport.overdue()
        except _native.RingError:
            return True

    def wait(self, timeout_s: float) -> None:
        """Returns when it is done, or after `timeout_s`."""
        started = time.monotonic()
        while not self.done() and (waited_s := time.monotonic() - started) < timeout_s:
            time.sleep(min(max(LOOK_S_MIN, waited_s / 8), LOOK_S_MAX))

    def settle(self) -> NDArray[np.uint32]:
        """Waits for its end, whatever it is: uint32[runs, 2] (status, aux). RingTimeout at the deadline, which poisons
        the ring; RingPoisoned."""
        self.wait(math.inf)
        if self._statuses is None:
            self.look()
        if self._statuses is None:
            self._ring.poison()
            wait_us = self._transport.wait_us
            raise _native.RingTimeout(f"ticket {self.seq} has not moved for {wait_us} us; the ring is poisoned")
        return self._statuses

    def check(self) -> None:
        """StoreError if a run of it failed."""
        raise_for_status(self.settle())


class Staging:
    """The staging memory as a ring of parts, one for each STORE ticket in flight. Parts are taken again, the oldest
    first, when their tickets have ended."""

    def __init__(self, transport: Transport, memory: NDArray[np.uint8]) -> None:
        self.memory = memory
        self._transport = transport
        self._taken: deque[tuple[int, int, Posted]] = deque()  # (first byte, end, whose) in the order of their tickets

    def room(self, part_bytes: int) -> Pieces[None]:
        """Until a part of so many bytes can be had at once. ValueError if it never can."""
        if part_bytes > len(self.memory):
            raise ValueError(
                f"staging memory of {len(self.memory)} bytes cannot hold one segment set of {part_bytes} bytes: "
                "raise staging_bytes or lower pack_tokens"
            )
        while True:
            yield from self._transport.room()
            while self._taken and self._taken[0][2].done():
                self._taken.popleft()[2].settle()
            if not self._overlaps(self._next(part_bytes), part_bytes):
                return
            yield self._taken[0][2]

    def store(self, layer: int, part_bytes: int, fill: Callable[[NDArray[np.uint8], int], NDArray[np.void]]) -> Posted:
        """Posts one STORE ticket, when there is `room`: `fill(part, offset)` writes the part (at `offset` of the
        staging memory) and returns its runs."""
        first = self._next(part_bytes)
        runs = fill(self.memory[first : first + part_bytes], first)
        posted = self._transport.post(Ticket(_native.OP_STORE, layer, runs, NO_PAIRS))
        self._taken.append((first, first + part_bytes, posted))
        return posted

    def _next(self, part_bytes: int) -> int:
        end = -(-self._taken[-1][1] // PART_ALIGN) * PART_ALIGN if self._taken else 0
        return end if end + part_bytes <= len(self.memory) else 0

    def _overlaps(self, first: int, part_bytes: int) -> bool:
        return any(start < first + part_bytes and first < end for start, end, _ in self._taken)
