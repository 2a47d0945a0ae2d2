"""Workers: their memory, from registration to release."""

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from logging import DEBUG, INFO, WARNING

from kvstore_service.daemon import native
from kvstore_service.daemon.logs import Sparse, event
from kvstore_service.daemon.store.registry import Worker
from kvstore_service.daemon.store.state import State, log, registered
from kvstore_service.shared import memory
from kvstore_service.shared.types import RingGeometry, StoreError

RINGS_MAX = 64
TICKET_BYTES = 64  # of the daemon's own memory, for each ticket of a ring
WAIT_MS_MAX = 600_000


@dataclass(frozen=True)
class Registered:
    """A worker's memory. `descriptors`, the caller's: window, staging, then (requests, completions) of each ring, then
    the arena of one that pulls. gpu: the UUID of the one that the window lies in; empty: in none."""

    worker_id: int
    descriptors: list[int]
    window_kind: str
    gpu: str


class Workers:
    """Broker peers become workers here, and end here."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._log = Sparse(log)  # of each user
        self._leaving: deque[Worker] = deque()  # gone, but a copy thread has not let them go in time

    def admit(self, uid: int, pid: int, name: str, operator: bool) -> Worker:
        """A new peer of the broker; its token authenticates its calls. PERMISSION_DENIED, RESOURCE_EXHAUSTED."""
        if operator and uid not in self._state.config.admin_uids:
            raise StoreError("PERMISSION_DENIED", f"user id {uid} is not in admin_uids", reason="UID_REFUSED")
        return self._state.registry.add_worker(uid, pid, name, operator)

    def register(
        self,
        worker: Worker,
        slots: int,
        window_bytes: int,
        staging_bytes: int,
        rings: Sequence[RingGeometry],
        wait_ms: int = 0,
        window_kinds: Sequence[str] = (),
    ) -> Registered:
        """Creates the worker's memory; its rings are served after `serve_rings`.
        Completions can be written by nobody else afterwards.

        wait_ms: how long the worker waits for one ticket; 0 is the daemon's default. window_kinds: those that it can
        map, none for shared memory; FAILED_PRECONDITION if the daemon has none of them."""
        with self._state.acting(worker, new=True):
            if worker.native_id is not None:
                raise StoreError(
                    "FAILED_PRECONDITION",
                    "registered already; unregister before you ask for new memory",
                    reason="REGISTERED_ALREADY",
                )
            if wait_ms > WAIT_MS_MAX:
                raise StoreError("INVALID_ARGUMENT", f"wait_ms {wait_ms}: a worker waits at most {WAIT_MS_MAX} ms")
            kind = self._window_kind(window_kinds)
            on_device = kind in native.DEVICE_WINDOW_KINDS
            pinned_bytes = self._state.plane.window_pinned_bytes(kind)
            shared_bytes = native.memory_bytes(kind, window_bytes)
            memory_bytes = _memory_bytes(slots, shared_bytes, staging_bytes, rings) + pinned_bytes
            self._state.registry.grant(worker, slots, memory_bytes, rings)
            worker.wait_ms = wait_ms
            descriptors: list[int] = []
            try:
                descriptors.append(memory.create("kvstore-staging", staging_bytes))
                if not on_device:
                    descriptors.insert(0, memory.create("kvstore-window", shared_bytes))
                with native.errors():
                    worker.native_id = self._state.plane.add_worker(
                        -1 if on_device else descriptors[0], window_bytes, descriptors[-1], staging_bytes,
                        slots, worker.uid, wait_ms, kind,
                    )  # fmt: skip
                    if on_device:
                        descriptors.insert(0, self._state.plane.window_descriptor(worker.native_id))
                    for geometry in rings:
                        descriptors.extend(self._add_ring(worker.native_id, geometry))
                # A device's memory has no seals, and no pages that its worker could give back.
                worker.unsealed.extend(os.dup(fd) for fd in [*descriptors[on_device:2], *descriptors[2::2]])
                if kind == native.PULL:
                    with native.errors():
                        descriptors.append(self._state.plane.arena_descriptor(worker.native_id))
            except BaseException:
                for fd in descriptors:
                    os.close(fd)
                self._forget_memory(worker)
                raise
            self._state.events.tell("worker", worker.tenant, detail=f"registered: {worker.name}, pid {worker.pid}")
            self._log_of(worker, INFO, "worker registered", worker=worker.native_id, window=kind)
            return Registered(worker.native_id, descriptors, kind, self._state.plane.window_gpu if on_device else "")

    def _window_kind(self, wanted: Sequence[str]) -> str:
        kinds = self._state.plane.window_kinds
        unasked = {*native.DEVICE_WINDOW_KINDS, native.PULL}
        for kind in kinds:
            if kind in wanted or (not wanted and kind not in unasked):
                return kind
        missing = "".join(f" ({kind}: {why})" for kind, why in self._state.plane.windows_refused if kind in wanted)
        raise StoreError(
            "FAILED_PRECONDITION",
            f"the daemon's windows are {', '.join(kinds)}, the worker can map {', '.join(wanted) or 'shm'}{missing}: "
            "start the daemon with one of these as its window",
        )

    def _add_ring(self, native_id: int, geometry: RingGeometry) -> list[int]:
        shape = native.ring_geometry(geometry)
        requests = memory.create("kvstore-requests", shape.requests_bytes)
        try:
            completions = memory.create("kvstore-completions", shape.completions_bytes)
            try:
                self._state.plane.add_ring(native_id, requests, completions, shape, geometry.device)
                memory.add_seals(completions, memory.F_SEAL_FUTURE_WRITE | memory.F_SEAL_SEAL)
            except BaseException:
                os.close(completions)
                raise
        except BaseException:
            os.close(requests)
            raise
        return [requests, completions]

    def serve_rings(self, worker: Worker) -> None:
        """Gives the worker's rings to copy threads, once nobody can give pages of its memory back any more: a copy
        thread that met such a page would wait for the kernel. Idempotent.

        FAILED_PRECONDITION for memory that was never registered, or that the worker has sealed itself. After an error
        nothing is registered any more."""
        with self._state.acting(worker):
            native_id = registered(worker)
            if worker.served:
                return
            try:
                for fd in worker.unsealed:
                    _seal(fd)
                with native.errors():
                    self._state.plane.serve_rings(native_id)
            except BaseException:
                self._forget_memory(worker)
                raise
            _close_all(worker.unsealed)
            worker.served = True

    def unregister(self, worker: Worker, reason: str) -> None:
        """Frees the worker's memory, with its uploads; its sessions stay. Nothing if there is none.

        FAILED_PRECONDITION while a slot is bound."""
        with self._state.acting(worker):
            if worker.bound:
                raise StoreError(
                    "FAILED_PRECONDITION",
                    f"slots {', '.join(map(str, sorted(worker.bound)))} are bound: unbind them before you unregister",
                    reason="SLOTS_BOUND",
                )
            self._forget_memory(worker)
            self._state.uploads.forget(worker)
            worker.unbound.clear()
            self._state.events.tell("worker", worker.tenant, detail=f"unregistered: {worker.name}, {reason}")
            self._log_of(worker, INFO, "worker unregistered", reason=reason)

    def _forget_memory(self, worker: Worker) -> None:
        _close_all(worker.unsealed)
        if worker.native_id is not None:
            with native.errors():
                self._state.plane.remove_worker(worker.native_id)
            worker.native_id, worker.served, worker.rings = None, False, ()
        self._state.registry.grant(worker, 0, 0)

    def release(self, worker: Worker) -> None:
        """Frees all that a worker held. Idempotent; its token is void from the first moment."""
        self._state.registry.remove_worker(worker)
        with worker.lock:
            if worker.gone:
                return
            worker.gone = True
        try:
            self._let_go(worker)
        except StoreError as error:
            self._leaving.append(worker)
            event(log, WARNING, "worker not released yet", name=worker.name, pid=worker.pid, error=error.message)

    def release_leaving(self) -> None:
        """Tries again what `release` could not do, until that fails again."""
        self._state.plane.give_back_arenas()
        while self._leaving:
            self._let_go(self._leaving[0])
            self._leaving.popleft()

    def _let_go(self, worker: Worker) -> None:
        """UNAVAILABLE if a copy thread stands still: all else is held as long as that may still touch it."""
        with worker.lock:
            level = DEBUG if worker.native_id is None else INFO  # an operator's visit is worth no line
            self._forget_memory(worker)
            self._state.uploads.forget(worker)
            for binding in worker.bound.values():
                self._state.release_packs(binding)
            worker.bound.clear()
            self._state.leases.drop_all(worker.token)
            for session in list(worker.sessions.values()):
                self._state.leases.drop_all(session.session_id)
                self._state.registry.close(session)
        if level == INFO:
            self._state.events.tell("worker", worker.tenant, detail=f"released: {worker.name}, pid {worker.pid}")
        self._log_of(worker, level, "worker released")

    def _log_of(self, worker: Worker, level: int, message: str, /, **fields: object) -> None:
        self._log.event((worker.uid, message), level, message, name=worker.name, pid=worker.pid, **fields)


def _seal(fd: int) -> None:
    try:
        memory.add_seals(fd, memory.F_SEAL_FUTURE_WRITE | memory.F_SEAL_SEAL)
    except PermissionError:
        raise StoreError("FAILED_PRECONDITION", "the worker has sealed its memory itself; register anew") from None


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def _memory_bytes(slots: int, window_bytes: int, staging_bytes: int, rings: Sequence[RingGeometry]) -> int:
    if slots < 1 or window_bytes < 1 or staging_bytes < 1 or not 1 <= len(rings) <= RINGS_MAX:
        raise StoreError(
            "INVALID_ARGUMENT", f"a worker has slots, window and staging bytes, and 1 to {RINGS_MAX} rings"
        )
    shapes = [native.ring_geometry(ring) for ring in rings]
    tickets_bytes = sum(ring.tickets for ring in rings) * TICKET_BYTES
    shared_bytes = sum(shape.requests_bytes + shape.completions_bytes for shape in shapes)
    return window_bytes + staging_bytes + shared_bytes + tickets_bytes
