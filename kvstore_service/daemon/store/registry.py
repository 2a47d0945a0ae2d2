"""Who uses what: workers, their sessions and slots, and the references that keep packs open."""

import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvstore_service.shared.types import Layout, PackRow, RingGeometry, StoreError, Violation, tenant_of

TOKEN_BYTES = 32
SESSION_ID_BYTES = 12
CLOSED_MAX = 1024
STEP_S = 2.0  # that a step of an eviction may take; most take milliseconds
RINGS_MAX = 512  # over all workers, two for each of them: whoever looks at one ring has looked at all others before
SESSION_PACKS_MAX = 1 << 21  # over all sessions, counted in each: 8 B apiece; 2**29 tokens in packs of 256
WINDOW_BYTES, BOUND_PACK_BYTES = 32, 32  # of a binding; a window with what is counted of its lane
NO_WORKERS = {"user_workers": 0, "user_worker_bytes": 0, "user_sessions": 0}


@dataclass(frozen=True)
class Limits:
    """How much all users together may hold, and each of them; bytes are of windows, staging, rings and bindings, packs
    those of sessions, counted in each."""

    sessions: int
    user_sessions: int
    slots: int
    user_slots: int
    worker_bytes: int
    user_bytes: int
    user_packs: int = SESSION_PACKS_MAX
    rings: int = RINGS_MAX
    user_rings: int = RINGS_MAX
    workers: int = 256
    user_workers: int = 64
    operators: int = 16

    @classmethod
    def shared(cls, users: int, sessions: int, slots: int, worker_bytes: int, machine_bytes: int) -> "Limits":
        """Users share equally, so that no number of them can take what one is entitled to."""
        share = max(1, users)
        return cls(
            sessions, max(1, sessions // share), slots, max(1, slots // share), worker_bytes, machine_bytes // share,
            SESSION_PACKS_MAX // share, user_rings=max(2, RINGS_MAX // share),
        )  # fmt: skip


@dataclass(eq=False)
class Session:
    """A list of packs that one worker reads. `slots` are those that it is bound to."""

    session_id: str
    worker: "Worker"
    layout: Layout
    declared_max_tokens: int
    packs: list[PackRow] = field(default_factory=list)
    slots: set[int] = field(default_factory=set)
    opened_s: float = field(default_factory=time.monotonic)

    @property
    def tokens(self) -> int:
        return self.packs[-1].ref.end if self.packs else 0


@dataclass(eq=False)
class Binding:
    """What a slot reads: the session, the packs that are held open for it, and its windows in all layers and lanes."""

    session: Session
    packs: list[PackRow]
    epoch: int
    windows: int

    @property
    def memory_bytes(self) -> int:
        """Of the daemon's own."""
        return self.windows * WINDOW_BYTES + len(self.packs) * BOUND_PACK_BYTES


@dataclass(eq=False)
class Worker:
    """A process that the broker let in. It may call as long as its broker connection lives.

    `lock` serialises its calls with each other and with its release; `gone` is final. `unsealed`: its memory that it
    may still map for writing, as descriptors; none once it is `served`. `closed`: its latest sessions that have ended;
    `unbound`: slots that were bound once."""

    token: str
    uid: int
    pid: int
    name: str
    operator: bool = False  # administers only: no memory, no sessions
    lock: threading.RLock = field(default_factory=threading.RLock)
    gone: bool = False
    native_id: int | None = None
    slots: int = 0
    memory_bytes: int = 0  # of window, staging and rings; see held_bytes
    wait_ms: int = 0
    rings: tuple[RingGeometry, ...] = ()
    unsealed: list[int] = field(default_factory=list)
    served: bool = False
    sessions: dict[str, Session] = field(default_factory=dict)
    bound: dict[int, Binding] = field(default_factory=dict)
    unbound: set[int] = field(default_factory=set)
    closed: deque[str] = field(default_factory=lambda: deque(maxlen=CLOSED_MAX))
    joined_s: float = field(default_factory=time.monotonic)

    @property
    def held_bytes(self) -> int:
        """Of window, staging, rings and bindings; any thread may ask."""
        return self.memory_bytes + sum(binding.memory_bytes for binding in list(self.bound.values()))

    @property
    def tenant(self) -> str:
        """Users do not share packs: identity is the kernel's word for who connected."""
        return tenant_of(self.uid)


class Registry:
    """Bounded tables of workers and sessions, and reference counts on packs. Thread-safe."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._workers: dict[str, Worker] = {}
        self._sessions: dict[str, Session] = {}
        self._references: Counter[bytes] = Counter()
        self._packs: Counter[int] = Counter()  # by user id, as often as a session has them
        self._rows: dict[bytes, PackRow] = {}  # of what is referenced: sessions with the same packs share their rows
        self._condemned: set[bytes] = set()
        self._decided = threading.Condition(self._lock)  # what was condemned is gone, or spared

    def add_worker(self, uid: int, pid: int, name: str, operator: bool = False) -> Worker:
        """Operators have room of their own, so that no number of workers keeps them out."""
        worker = Worker(secrets.token_hex(TOKEN_BYTES), uid, pid, name, operator)
        kind = "operators" if operator else "workers"
        most = self._limits.operators if operator else self._limits.workers
        with self._lock:
            peers = [peer for peer in self._workers.values() if peer.operator == operator]
            _require_room(kind, len(peers), 1, most)
            if not operator:
                held = sum(peer.uid == uid for peer in peers)
                _require_room(f"{kind} of user id {uid}", held, 1, self._limits.user_workers)
            self._workers[worker.token] = worker
        return worker

    def remove_worker(self, worker: Worker) -> None:
        with self._lock:
            self._workers.pop(worker.token, None)

    def worker(self, token: str) -> Worker:
        """UNAUTHENTICATED for a token that was never handed out or whose connection has ended."""
        with self._lock:
            worker = self._workers.get(token)
        if worker is None:
            raise StoreError(
                "UNAUTHENTICATED", "unknown or expired token; connect to the broker again", reason="TOKEN_UNKNOWN"
            )
        return worker

    def grant(self, worker: Worker, slots: int, memory_bytes: int, rings: Sequence[RingGeometry] = ()) -> None:
        """Counts what a worker's memory takes, in place of what was counted for it before. RESOURCE_EXHAUSTED."""
        limits = self._limits
        with self._lock:
            others = [other for other in self._workers.values() if other is not worker]
            own = [other for other in others if other.uid == worker.uid]
            user = f"of user id {worker.uid}"
            _require_room("slots_max", sum(other.slots for other in others), slots, limits.slots)
            _require_room(f"slots_max {user}", sum(other.slots for other in own), slots, limits.user_slots)
            _require_room("rings", sum(len(other.rings) for other in others), len(rings), limits.rings)
            _require_room(f"rings {user}", sum(len(other.rings) for other in own), len(rings), limits.user_rings)
            _require_room("worker_bytes_max", 0, memory_bytes, limits.worker_bytes)
            held_bytes = sum(other.held_bytes for other in own)
            _require_room(f"memory {user}", held_bytes, memory_bytes, limits.user_bytes)
            worker.slots, worker.memory_bytes, worker.rings = slots, memory_bytes, tuple(rings)

    def require_memory(self, worker: Worker, more_bytes: int) -> None:
        """RESOURCE_EXHAUSTED if the worker's bindings may not take so much more."""
        with self._lock:
            _require_room("worker_bytes_max", worker.held_bytes, more_bytes, self._limits.worker_bytes)
            held_bytes = sum(other.held_bytes for other in self._workers.values() if other.uid == worker.uid)
            _require_room(f"memory of user id {worker.uid}", held_bytes, more_bytes, self._limits.user_bytes)

    def open(self, worker: Worker, layout: Layout, declared_max_tokens: int) -> Session:
        session = Session(secrets.token_hex(SESSION_ID_BYTES), worker, layout, declared_max_tokens)
        with self._lock:
            _require_room("sessions_max", len(self._sessions), 1, self._limits.sessions)
            held = sum(other.worker.uid == worker.uid for other in self._sessions.values())
            _require_room(f"sessions_max of user id {worker.uid}", held, 1, self._limits.user_sessions)
            self._sessions[session.session_id] = session
        worker.sessions[session.session_id] = session
        return session

    def append(self, session: Session, packs: list[PackRow]) -> None:
        """From here on the packs cannot be evicted; which of them are still stored is to be looked at then.
        RESOURCE_EXHAUSTED."""
        uid = session.worker.uid
        with self._lock:
            self._await_spared({row.ref.pack_id for row in packs})
            _require_room(f"packs in sessions of user id {uid}", self._packs[uid], len(packs), self._limits.user_packs)
            session.packs.extend(self._shared(row) for row in packs)
            self._references.update(row.ref.pack_id for row in packs)
            self._packs[uid] += len(packs)

    def retract(self, session: Session, count: int) -> None:
        """Takes the last `count` packs back."""
        with self._lock:
            self._drop(session, count)

    def _shared(self, row: PackRow) -> PackRow:
        """For a caller that holds the lock."""
        held = self._rows.setdefault(row.ref.pack_id, row)
        return held if held == row else row  # it may have been written anew

    def _drop(self, session: Session, count: int) -> None:
        """The last `count` packs of the session; for a caller that holds the lock."""
        first = len(session.packs) - count
        packs = session.packs[first:]
        del session.packs[first:]
        self._packs[session.worker.uid] -= count
        self._references.subtract(row.ref.pack_id for row in packs)
        for row in packs:
            if not self._references[row.ref.pack_id]:
                del self._references[row.ref.pack_id]
                self._rows.pop(row.ref.pack_id, None)

    @contextmanager
    def keeping(self, pack_id: bytes) -> Iterator[None]:
        """While it is held, the pack stays, if it is still stored then."""
        with self._lock:
            self._await_spared({pack_id})
            self._references[pack_id] += 1
        try:
            yield
        finally:
            with self._lock:
                self._references[pack_id] -= 1
                if not self._references[pack_id]:
                    del self._references[pack_id]

    def _await_spared(self, pack_ids: Collection[bytes]) -> None:
        """For a caller that holds the lock: returns when no step of an eviction has any of these in its hands, which
        spares most of them. NOT_FOUND if that takes long."""
        if not self._decided.wait_for(lambda: self._condemned.isdisjoint(pack_ids), STEP_S):
            name = next(iter(self._condemned.intersection(pack_ids)))
            raise StoreError("NOT_FOUND", f"pack {name.hex()} is being evicted", reason="PACK_EVICTED")

    @contextmanager
    def condemned(self, pack_ids: Collection[bytes]) -> Iterator[dict[bytes, StoreError]]:
        """While it is held, no session can take these packs, but for those that it yields, each with why it stays:
        FAILED_PRECONDITION if a session has it, ABORTED if another call is removing it."""
        with self._lock:
            spared = {name: error for name in pack_ids if (error := self._why_spared(name)) is not None}
            taken = {name for name in pack_ids if name not in spared}
            self._condemned |= taken
        try:
            yield spared
        finally:
            with self._lock:
                self._condemned -= taken
                self._decided.notify_all()

    def _why_spared(self, pack_id: bytes) -> StoreError | None:
        if count := self._references[pack_id]:
            reason = f"pack {pack_id.hex()} is attached to {count} sessions; close them first"
            return StoreError("FAILED_PRECONDITION", reason, reason="PACK_ATTACHED")
        if pack_id in self._condemned:
            reason = f"pack {pack_id.hex()} is being evicted by another call"
            return StoreError("ABORTED", reason, reason="PACK_EVICTED")
        return None

    def is_condemned(self, pack_id: bytes) -> bool:
        with self._lock:
            return pack_id in self._condemned

    def close(self, session: Session) -> None:
        session.worker.closed.append(session.session_id)
        with self._lock:
            if self._sessions.pop(session.session_id, None) is None:
                return
            self._drop(session, len(session.packs))
        session.worker.sessions.pop(session.session_id, None)

    def of(self, worker: Worker, session_id: str) -> Session:
        """NOT_FOUND also for another worker's session: ids are no capability."""
        session = worker.sessions.get(session_id)
        if session is None:
            raise StoreError(
                "NOT_FOUND", f"session {session_id!r} is not open for this worker", reason="SESSION_UNKNOWN"
            )
        return session

    def find(self, session_id: str) -> Session:
        """Any worker's session, for the operator."""
        with self._lock:
            session = self._sessions.get(session_id)
        if session is None:
            raise StoreError("NOT_FOUND", f"session {session_id!r} is not open", reason="SESSION_UNKNOWN")
        return session

    def references(self, pack_id: bytes) -> int:
        with self._lock:
            return self._references[pack_id]

    def references_total(self) -> int:
        with self._lock:
            return self._references.total()

    def workers(self) -> list[Worker]:
        with self._lock:
            return list(self._workers.values())

    def users(self) -> dict[int, dict[str, int]]:
        """Per user id: its workers, their memory and their sessions."""
        found: dict[int, dict[str, int]] = {}
        for worker in self.workers():
            if not worker.operator:
                of = found.setdefault(worker.uid, dict(NO_WORKERS))
                of["user_workers"] += 1
                of["user_worker_bytes"] += worker.held_bytes
                of["user_sessions"] += len(worker.sessions)
        return found

    def all(self) -> list[Session]:
        with self._lock:
            return list(self._sessions.values())


def _require_room(subject: str, held: int, more: int, most: int) -> None:
    """RESOURCE_EXHAUSTED with the figures."""
    if held + more <= most:
        return
    raise StoreError(
        "RESOURCE_EXHAUSTED",
        f"{subject}: {held} of {most} are in use, {more} more do not fit",
        retry_after_s=1.0 if more <= most else None,
        violations=[Violation(subject, f"at most {most}")],
        reason="LIMIT_REACHED",
    )
