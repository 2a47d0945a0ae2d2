"""A worker that shares a daemon with others, and what one can do to them.

As a program it is an attacker: `python -m bench.neighbour ATTACK SOCKET BROKER DOCUMENT TOKENS` prints `ready` once its
attack is under way and goes on until its parent ends. It sleeps while it waits, so that what it takes from
others it takes in the daemon.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import mmap
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from decode_worker import _native
from kvstore_service.client import (
    NO_PARENT,
    KindSpec,
    Layout,
    PackRef,
    PackReservation,
    RingGeometry,
    StoreClient,
)
from kvstore_service.client.private import PrivateDaemon

LANES = 2
RECORD_BYTES = 512
PACK_TOKENS = 16384
PLACES = 16384
DAEMON_OPTIONS = ("--copy-threads=1", f"--pack-tokens={PACK_TOKENS}")
LAYOUT = Layout(hashlib.sha256(b"bench.neighbour").digest(), 1, (KindSpec(LANES, RECORD_BYTES // 4, 2, RECORD_BYTES),))

WAIT_US = 60_000_000
SPIN_US = 30
IN_FLIGHT = 2
ATTACK_S_MAX = 120
_PR_SET_PDEATHSIG = 1

NO_PAIRS: NDArray[np.uint32] = np.empty((0, 2), np.uint32)


class NeighbourError(RuntimeError):
    """Something that every neighbour may count on did not happen."""


@dataclass(frozen=True)
class Document:
    """`tokens` records per lane, the same random bytes in each pack; whoever names it finds the same packs."""

    name: str
    tokens: int

    def reservations(self) -> list[PackReservation]:
        return [
            PackReservation(
                first, min(PACK_TOKENS, self.tokens - first), hashlib.sha256(f"{self.name} {first}".encode()).digest(),
                b"" if first else NO_PARENT,
            )
            for first in range(0, self.tokens, PACK_TOKENS)
        ]  # fmt: skip


class Neighbour:
    """A registered worker with slot 0 bound to a document: PLACES places per lane. Context manager, one thread.

    `rings` are RingProducers of one geometry; the first is the decode ring."""

    def __init__(
        self, daemon: PrivateDaemon | Address, document: Document, geometry: RingGeometry, rings: int = 1
    ) -> None:
        self._daemon, self._document, self._count = daemon, document, rings
        self.geometry, self.tokens = geometry, document.tokens

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.client = StoreClient.connect(self._daemon.socket, self._daemon.broker, "neighbour")
            stack.callback(self.client.close)
            window_bytes = LANES * PLACES * RECORD_BYTES
            staging_bytes = LANES * PACK_TOKENS * (RECORD_BYTES + 2)
            memory = self.client.register_worker(1, window_bytes, staging_bytes, [self.geometry] * self._count)
            stack.callback(memory.close)
            self._window_map = mmap.mmap(memory.window_fd, window_bytes)
            self.window = np.frombuffer(self._window_map, np.uint8).reshape(LANES, PLACES, RECORD_BYTES)
            self._staging = np.frombuffer(mmap.mmap(memory.staging_fd, staging_bytes), np.uint8)
            self._requests = mmap.mmap(memory.rings[0][0], 0)
            self.rings = [_native.RingProducer(*fds) for fds in memory.rings]
            for ring in self.rings:
                stack.callback(ring.close)
            self.client.serve_rings()
            self.session = self.client.open_session(LAYOUT, self._document.tokens)
            self.packs = self._packs()
            self.client.attach_packs(self.session, self.packs)
            self.bind()
            self._resources = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    @property
    def ring(self) -> _native.RingProducer:
        return self.rings[0]

    def bind(self) -> None:
        lane_bytes = PLACES * RECORD_BYTES
        windows = np.array([[[lane * lane_bytes, PLACES] for lane in range(LANES)]], np.uint64)
        self.epoch = self.client.bind_slot(self.session, 0, self.packs, windows)

    def unbind(self) -> None:
        self.client.unbind_slot(0)

    def runs(self, count: int, **fields: int | NDArray[np.uint64]) -> NDArray[np.void]:
        """`count` runs of slot 0 over its lanes in turn; `fields` overwrite what they name."""
        runs = np.zeros(count, _native.RUN_DTYPE)
        runs["slot_epoch"], runs["lane"] = self.epoch, np.arange(count) % LANES
        for name, value in fields.items():
            runs[name] = value
        return runs

    def gather(self, records: NDArray[np.uint32] | Sequence[int], runs: int = 1) -> Post:
        """A ticket whose `runs` runs all bring these records (sorted) to the places 0, 1, 2, ..."""
        pairs = np.stack([records, np.arange(len(records))], axis=1).astype(np.uint32)
        return Post(_native.OP_GATHER, self.runs(runs, pair_count=len(pairs)), pairs)

    def range(self, first: int, records: int, runs: int) -> Post:
        """A RANGE ticket of `records` records per lane from `first` on, split into `runs` runs over the same places."""
        each = records * LANES // runs
        starts = first + np.arange(runs) // LANES * each
        return Post(_native.OP_RANGE, self.runs(runs, first_pair=starts, pair_count=each), NO_PAIRS)

    def post(self, ticket: Post, ring: int = 0) -> int:
        """Posts as soon as the store has given credit. NoCredit if that takes too long."""
        deadline_s = time.monotonic() + WAIT_US / 1e6
        while True:
            try:
                return self.rings[ring].post(ticket.op, 0, 0, ticket.runs, ticket.pairs)
            except _native.NoCredit:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0)

    def ask(self, ticket: Post, wait_us: int = WAIT_US, spin_us: int = SPIN_US) -> NDArray[np.uint32]:
        """Posts on the first ring and waits: uint32[runs, 2] (status, aux)."""
        return self.ring.wait(self.post(ticket), wait_us, spin_us)

    def fetch(self, ticket: Post, wait_us: int = WAIT_US, spin_us: int = SPIN_US) -> None:
        """The same for a ticket that has to succeed. NeighbourError otherwise."""
        require_ok(self.ask(ticket, wait_us, spin_us))

    def stream(self, ticket: Post, seconds: float, in_flight: int) -> float:
        """Keeps `in_flight` such tickets posted on the first ring; returns how many a second were answered."""
        pending: deque[int] = deque()
        done, started_s = 0, time.perf_counter()
        while (elapsed_s := time.perf_counter() - started_s) < seconds:
            while len(pending) < in_flight:
                pending.append(self.post(ticket))
            require_ok(self.ring.wait(pending.popleft(), WAIT_US, 0))
            done += 1
        for seq in pending:
            require_ok(self.ring.wait(seq, WAIT_US, 0))
        return done / elapsed_s

    def write_ticket(self, seq: int, first_pair: int, pair: tuple[int, int]) -> None:
        """Posts ticket `seq` of one run of one pair by hand; nothing else of the ring's memory is touched."""
        g = self.geometry
        run_bytes, header_bytes = _native.RUN_DTYPE.itemsize, _native.REQUESTS_HEADER_BYTES
        ticket_off = header_bytes + seq % g.tickets * _TICKET_BYTES
        runs_off = header_bytes + g.tickets * _TICKET_BYTES + seq % g.tickets * g.runs_max * run_bytes
        pairs_off = header_bytes + g.tickets * (_TICKET_BYTES + g.runs_max * run_bytes)
        pairs_off += (seq % g.tickets * g.pairs_max + first_pair) * 8
        run = self.runs(1, first_pair=first_pair, pair_count=1)
        ticket = np.zeros(1, _TICKET)
        ticket["op"], ticket["run_count"], ticket["seq"] = _native.OP_GATHER, 1, seq
        for content, offset in ((np.array(pair, np.uint32), pairs_off), (run, runs_off), (ticket, ticket_off)):
            self._requests[offset : offset + content.nbytes] = content.tobytes()

    def _packs(self) -> list[PackRef]:
        reserved = self.client.reserve_pack(self.session, self._document.reservations())
        uploads = [item.upload_id for item in reserved if item.upload_id is not None]
        for item in reserved:
            if item.upload_id is not None:
                self._store(item.upload_id, item.pack.tokens)
        for committed in self.client.commit_pack(self.session, uploads) if uploads else ():
            if committed.error is not None:
                raise committed.error
        return [item.pack for item in reserved]

    def _store(self, upload: int, tokens: int) -> None:
        segment = tokens * (RECORD_BYTES + 2)
        for lane in range(LANES):
            part = self._staging[lane * segment : (lane + 1) * segment]
            part[: tokens * RECORD_BYTES] = _content(lane, tokens).reshape(-1)
            part[tokens * RECORD_BYTES :] = np.arange(tokens, dtype=np.uint16).view(np.uint8)
        runs = np.zeros(LANES, _native.RUN_DTYPE)
        runs["slot"], runs["lane"], runs["arg"] = upload, np.arange(LANES), np.arange(LANES) * segment
        for first in range(0, LANES, self.geometry.runs_max):
            self.fetch(Post(_native.OP_STORE, runs[first : first + self.geometry.runs_max], NO_PAIRS))


@dataclass(frozen=True, eq=False)
class Post:
    """One ticket: runs (RUN_DTYPE) and their pairs uint32[n, 2] (record, place)."""

    op: int
    runs: NDArray[np.void]
    pairs: NDArray[np.uint32]


@dataclass(frozen=True)
class Address:
    socket: str
    broker: str


# Ticket of csrc/core/ring.h, for tickets that no producer would post.
_TICKET_BYTES = 64
_TICKET = np.dtype(
    {
        "names": ["seq", "step", "layer", "micro_batch", "op", "run_count", "first_run"],
        "formats": ["<u8", "<u4", "<u2", "<u2", "<u2", "<u2", "<u4"],
        "itemsize": _TICKET_BYTES,
    }
)


def content(records: NDArray[np.intp], lane: int) -> NDArray[np.uint8]:
    """What any document holds at these record ids: uint8[n, RECORD_BYTES]."""
    return _content(lane, PACK_TOKENS)[records % PACK_TOKENS]


@functools.cache
def _content(lane: int, tokens: int) -> NDArray[np.uint8]:
    return np.random.default_rng(lane).integers(1, 256, (tokens, RECORD_BYTES), np.uint8)


def require_ok(statuses: NDArray[np.uint32]) -> None:
    """NeighbourError unless every run of uint32[runs, 2] (status, aux) ended OK."""
    failed = statuses[statuses[:, 0] != _native.STATUS_OK]
    if len(failed):
        raise NeighbourError(
            f"{len(failed)} of {len(statuses)} runs failed, the first with (status, aux) = {failed[0]}"
        )


# --- attacks ---

SMALL = RingGeometry(tickets=16, runs_max=64, pairs_max=4096)
# All runs of a ticket name the same few pairs; a ring's pairs_max, nearly all of it untouched, allows for their sum.
FLOOD_RUNS, FLOOD_PAIRS = 400, 16384
BUSY_RUNS, BUSY_PAIRS = 24, 1024
# More than any ring allows for.
MANY_RUNS, MANY_PAIRS = 65534, 1 << 20
COLD_RUNS = 30_000
PAIRS_MAX = 1 << 24
SPARSE = RingGeometry(tickets=16, runs_max=1, pairs_max=(512 << 20) // 16 // 8)
REBIND_RUNS = 128
REBIND_NAP_S = 0.02
BULK_RECORDS = (192 << 20) // (LANES * RECORD_BYTES)


@dataclass(frozen=True)
class Attack:
    """How a neighbour behaves: its rings, and the tickets that it posts on them. `valid`: each of them is served.
    `rebinds`: its slot, whenever all are posted."""

    geometry: RingGeometry
    rings: int
    tickets: Callable[[Neighbour], Iterator[Post]]
    in_flight: int = IN_FLIGHT
    valid: bool = True
    rebinds: bool = False


def _flood(neighbour: Neighbour) -> Iterator[Post]:
    return itertools.repeat(neighbour.gather(np.arange(FLOOD_PAIRS), FLOOD_RUNS))


def _busy(neighbour: Neighbour) -> Iterator[Post]:
    return itertools.repeat(neighbour.gather(np.arange(BUSY_PAIRS), BUSY_RUNS))


def _many_runs(neighbour: Neighbour) -> Iterator[Post]:
    """The last run is out of range, so the whole ticket has to be looked at before anything of it could be refused."""
    ticket = neighbour.gather(np.arange(MANY_PAIRS) % PLACES, MANY_RUNS)
    ticket.pairs[:, 1] %= PLACES
    ticket.pairs[-1, 1] = PLACES
    ticket.runs["pair_count"][:-1] = MANY_PAIRS - 1
    return itertools.repeat(ticket)


def _cold_ticket(neighbour: Neighbour) -> Iterator[Post]:
    """Runs that all want more of the document than the DRAM tier holds."""
    records = np.linspace(0, neighbour.tokens - 1, PLACES).astype(np.uint32)
    return itertools.repeat(neighbour.gather(records, COLD_RUNS))


def _bulk(neighbour: Neighbour) -> Iterator[Post]:
    """RANGEs of 192 MiB, one behind the other through the document."""
    whole = neighbour.tokens // BULK_RECORDS
    tickets = [
        neighbour.range(part * BULK_RECORDS, BULK_RECORDS, BULK_RECORDS * LANES // 4096) for part in range(whole)
    ]
    return itertools.cycle(tickets)


def _rebind(neighbour: Neighbour) -> Iterator[Post]:
    """Runs that wait for the disk, as many on each ring as may be under way at once."""
    parts = itertools.cycle(range(0, neighbour.tokens - PLACES + 1, PLACES))
    while True:
        yield neighbour.range(next(parts), PLACES, REBIND_RUNS)


_BUSY = RingGeometry(16, BUSY_RUNS, BUSY_RUNS * BUSY_PAIRS)
ATTACKS = {
    "flood": Attack(RingGeometry(2, FLOOD_RUNS, FLOOD_RUNS * FLOOD_PAIRS), 1, _flood),
    "bulk": Attack(RingGeometry(2, 128, 1), 1, _bulk),
    "many_runs": Attack(RingGeometry(2, MANY_RUNS, PAIRS_MAX), 1, _many_runs, in_flight=1, valid=False),
    "cold_ticket": Attack(RingGeometry(2, COLD_RUNS, PAIRS_MAX), 1, _cold_ticket, in_flight=1, valid=False),
    "busy_1": Attack(_BUSY, 1, _busy),
    "busy_8": Attack(_BUSY, 8, _busy),
    "busy_64": Attack(_BUSY, 64, _busy),
    "rebind": Attack(RingGeometry(2, REBIND_RUNS, 1), 64, _rebind, in_flight=1, valid=False, rebinds=True),
}


class Attacker:
    """A process that carries out ATTACKS[attack] over `document`. Context manager; paused and resumed at will."""

    def __init__(self, daemon: PrivateDaemon, attack: str, document: Document) -> None:
        command = (
            sys.executable, "-m", "bench.neighbour", attack, daemon.socket, daemon.broker, document.name,
            str(document.tokens),
        )  # fmt: skip
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        assert self._process.stdout is not None
        output = select.poll()
        output.register(self._process.stdout, select.POLLIN)
        if not output.poll(WAIT_US / 1e3) or self._process.stdout.readline() != "ready\n":
            self._end()
            raise NeighbourError("an attacker did not get ready; its stderr says why")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended = self._process.poll() is not None
        self._end()
        if ended and value is None:
            raise NeighbourError("an attacker ended by itself; its stderr says why")

    def pause(self) -> None:
        """It posts nothing more; what it has posted is still served."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def _end(self) -> None:
        self._process.kill()
        self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()


def main() -> int:
    """Joins the daemon, posts the attack's tickets on all of its rings, and never stops by itself for long."""
    name, socket, broker, document, tokens = sys.argv[1:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.alarm(ATTACK_S_MAX)
    attack = ATTACKS[name]
    with Neighbour(Address(socket, broker), Document(document, int(tokens)), attack.geometry, attack.rings) as worker:
        tickets = attack.tickets(worker)
        pending: deque[tuple[int, int]] = deque()
        for _, ring in itertools.product(range(attack.in_flight), range(attack.rings)):
            pending.append((ring, worker.post(next(tickets), ring)))
        print("ready", flush=True)
        while attack.rebinds:
            time.sleep(REBIND_NAP_S)
            worker.unbind()
            worker.bind()
            for ring, seq in pending:
                worker.rings[ring].wait(seq, WAIT_US, 0)
            pending = deque((ring, worker.post(next(tickets), ring)) for ring in range(attack.rings))
        while True:
            ring, seq = pending.popleft()
            answer = worker.rings[ring].wait(seq, WAIT_US, 0)
            if attack.valid:
                require_ok(answer)
            pending.append((ring, worker.post(next(tickets), ring)))


if __name__ == "__main__":
    sys.exit(main())
