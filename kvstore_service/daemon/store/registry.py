"""Who uses what: workers, their sessions and slots, and the references that keep packs open."""

import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvstore_service.shared.types import Layout, PackRow, RingGeometry, StoreError, Violation

TOKEN_BYTES = 32
SESSION_ID_BYTES = 12


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
    """What a slot reads: the session, and the packs that are held open for it."""

    session: Session
    packs: list[PackRow]
    epoch: int


@dataclass(eq=False)
class Worker:
    """A process that the broker let in. It may call as long as its broker connection lives.

    `lock` serialises its calls with each other and with its release; `gone` is final."""

    token: str
    uid: int
    pid: int
    name: str
    lock: threading.RLock = field(default_factory=threading.RLock)
    gone: bool = False
    native_id: int | None = None
    slots: int = 0
    wait_ms: int = 0
    rings: tuple[RingGeometry, ...] = ()
    sessions: dict[str, Session] = field(default_factory=dict)
    bound: dict[int, Binding] = field(default_factory=dict)

    @property
    def tenant(self) -> str:
        """Users do not share packs: identity is the kernel's word for who connected."""
        return f"uid-{self.uid}"


class Registry:
    """Bounded tables of workers and sessions, and reference counts on packs. Thread-safe."""

    def __init__(self, sessions_max: int, slots_max: int, workers_max: int) -> None:
        self._sessions_max = sessions_max
        self._slots_max = slots_max
        self._workers_max = workers_max
        self._lock = threading.Lock()
        self._workers: dict[str, Worker] = {}
        self._sessions: dict[str, Session] = {}
        self._references: Counter[bytes] = Counter()
        self._condemned: set[bytes] = set()

    def add_worker(self, uid: int, pid: int, name: str) -> Worker:
        worker = Worker(secrets.token_hex(TOKEN_BYTES), uid, pid, name)
        with self._lock:
            if len(self._workers) >= self._workers_max:
                raise _full("workers", self._workers_max)
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
            raise StoreError("UNAUTHENTICATED", "unknown or expired token; connect to the broker again")
        return worker

    def grant_slots(self, worker: Worker, slots: int) -> None:
        with self._lock:
            if sum(other.slots for other in self._workers.values()) + slots > self._slots_max:
                raise _full("slots_max", self._slots_max)
            worker.slots = slots

    def open(self, worker: Worker, layout: Layout, declared_max_tokens: int) -> Session:
        session = Session(secrets.token_hex(SESSION_ID_BYTES), worker, layout, declared_max_tokens)
        with self._lock:
            if len(self._sessions) >= self._sessions_max:
                raise _full("sessions_max", self._sessions_max)
            self._sessions[session.session_id] = session
        worker.sessions[session.session_id] = session
        return session

    def append(self, session: Session, packs: list[PackRow]) -> None:
        """From here on the packs cannot be evicted. NOT_FOUND if one is being evicted."""
        with self._lock:
            for row in packs:
                if row.ref.pack_id in self._condemned:
                    raise StoreError("NOT_FOUND", f"pack {row.ref.pack_id.hex()} is being evicted")
            session.packs.extend(packs)
            self._references.update(row.ref.pack_id for row in packs)

    def retract(self, session: Session) -> None:
        """Takes the last pack back."""
        with self._lock:
            self._references.subtract([session.packs.pop().ref.pack_id])
            self._references += Counter()

    @contextmanager
    def condemned(self, pack_id: bytes) -> Iterator[None]:
        """While it is held, no session can take the pack. FAILED_PRECONDITION if one has it."""
        with self._lock:
            if count := self._references[pack_id]:
                raise StoreError(
                    "FAILED_PRECONDITION", f"pack {pack_id.hex()} is attached to {count} sessions; close them first"
                )
            if pack_id in self._condemned:
                raise StoreError("ABORTED", f"pack {pack_id.hex()} is being evicted by another call")
            self._condemned.add(pack_id)
        try:
            yield
        finally:
            with self._lock:
                self._condemned.remove(pack_id)

    def close(self, session: Session) -> None:
        with self._lock:
            if self._sessions.pop(session.session_id, None) is None:
                return
            self._references.subtract(row.ref.pack_id for row in session.packs)
            self._references += Counter()  # drops the zeros
        session.worker.sessions.pop(session.session_id, None)

    def of(self, worker: Worker, session_id: str) -> Session:
        """NOT_FOUND also for another worker's session: ids are no capability."""
        session = worker.sessions.get(session_id)
        if session is None:
            raise StoreError("NOT_FOUND", f"session {session_id!r} is not open for this worker")
        return session

    def find(self, session_id: str) -> Session:
        """Any worker's session, for the operator."""
        with self._lock:
            session = self._sessions.get(session_id)
        if session is None:
            raise StoreError("NOT_FOUND", f"session {session_id!r} is not open")
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

    def all(self) -> list[Session]:
        with self._lock:
            return list(self._sessions.values())


def _full(subject: str, limit: int) -> StoreError:
    return StoreError(
        "RESOURCE_EXHAUSTED",
        f"all {limit} of {subject} are in use",
        retry_after_s=1.0,
        violations=[Violation(subject, f"at most {limit}")],
    )
