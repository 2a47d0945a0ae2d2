"""Sessions: lists of packs that one worker reads."""

from collections.abc import Sequence
from itertools import product

from kvstore_service.daemon import native
from kvstore_service.daemon.store.registry import BOUND_PACK_BYTES, Session, Worker
from kvstore_service.daemon.store.slots import Slots
from kvstore_service.daemon.store.state import State, served
from kvstore_service.shared.types import (
    FINGERPRINT_BYTES,
    NO_PARENT,
    Layout,
    PackRef,
    PackRow,
    StoreError,
)


class Sessions:
    """Opens, forks, grows and closes sessions."""

    def __init__(self, state: State, slots: Slots) -> None:
        self._state = state
        self._slots = slots

    def open(self, worker: Worker, layout: Layout, declared_max_tokens: int) -> Session:
        with self._state.acting(worker, new=True):
            if len(layout.fingerprint) != FINGERPRINT_BYTES or layout.layers < 1 or not layout.kinds:
                raise StoreError(
                    "INVALID_ARGUMENT", f"a layout has a fingerprint of {FINGERPRINT_BYTES} bytes, layers and kinds"
                )
            native.pack_spec(NO_PARENT, bytes(16), NO_PARENT, layout, 256, self._state.config.extent_blocks)
            return self._state.registry.open(worker, layout, declared_max_tokens)

    def fork(self, worker: Worker, session_id: str) -> Session:
        """A session with the same packs; they are shared, not copied."""
        with self._state.acting(worker, new=True):
            origin = self._state.registry.of(worker, session_id)
            fork = self._state.registry.open(worker, origin.layout, origin.declared_max_tokens)
            try:
                self._state.registry.append(fork, origin.packs)
            except BaseException:
                self._state.registry.close(fork)
                raise
            return fork

    def close(self, worker: Worker, session_id: str) -> None:
        """Idempotent."""
        with self._state.acting(worker):
            if session_id in worker.closed:
                return
            session = self._state.registry.of(worker, session_id)
            self._state.use([row.ref.pack_id for row in session.packs])
            for slot in list(session.slots):
                self._slots.release(worker, slot)
            self._state.leases.drop_all(session_id)
            self._state.registry.close(session)

    def attach(self, worker: Worker, session_id: str, refs: Sequence[PackRef]) -> int:
        """Appends committed packs to the session, and to the slots that it is bound to: all or none. Returns its
        tokens. If one of them is damaged, all damage that opening them shows is marked before this fails."""
        with self._state.acting(worker):
            session = self._state.registry.of(worker, session_id)
            stored = [self._state.stored(ref.pack_id, worker) for ref in refs]
            if error := self._state.probe(row for row in stored if row is not None):
                raise error
            rows = [self._state.row(ref, worker) for ref in refs]
            self.check_chain(session, rows)
            self.extend(session, rows)
            names = [row.ref.pack_id for row in rows]
            for holder in (worker.token, session_id):
                self._state.leases.drop(names, holder)
            self._state.use(names)
            return session.tokens

    def check_chain(self, session: Session, rows: Sequence[PackRow]) -> None:
        end, parent = session.tokens, session.packs[-1].ref.pack_id if session.packs else NO_PARENT
        for row in rows:
            if (row.ref.first_token, row.parent) != (end, parent):
                raise StoreError(
                    "FAILED_PRECONDITION",
                    f"pack {row.ref.pack_id.hex()} does not continue token {end}",
                    reason="CHAIN_BROKEN",
                )
            if row.layout != session.layout:
                raise StoreError(
                    "FAILED_PRECONDITION", f"pack {row.ref.pack_id.hex()} has another layout", reason="LAYOUT_DIFFERS"
                )
            end, parent = row.ref.end, row.ref.pack_id
        if end > session.declared_max_tokens:
            raise StoreError(
                "FAILED_PRECONDITION",
                f"{end} tokens; the session declared {session.declared_max_tokens}",
                reason="TOKENS_EXCEEDED",
            )

    def extend(self, session: Session, rows: Sequence[PackRow]) -> None:
        """All or none. Every pack is open before the first slot is told, so that only the end of the worker or of the
        data plane can come between; a slot that was told then ends, because it cannot be told otherwise."""
        worker = session.worker
        self._state.registry.require_memory(worker, len(rows) * len(session.slots) * BOUND_PACK_BYTES)
        self._state.registry.append(session, list(rows))
        opened: list[tuple[int, PackRow, int]] = []
        told: list[int] = []
        try:
            for row in rows:
                self._state.row(row.ref, worker)  # it may have been evicted just before
            for slot, row in product(sorted(session.slots), rows):
                opened.append((slot, row, self._state.open_packs.acquire(row)))
            for slot, row, handle in opened:
                with native.errors():
                    self._state.plane.extend(served(worker), slot, handle)
                worker.bound[slot].packs.append(row)
                told.append(slot)
        except BaseException:
            self._state.registry.retract(session, len(rows))
            for _, row, _ in opened[len(told) :]:
                self._state.open_packs.release(row)
            for slot in dict.fromkeys(told):
                self._slots.release(worker, slot)
            raise
