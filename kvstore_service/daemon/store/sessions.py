"""Sessions: lists of packs that one worker reads."""

from collections.abc import Sequence

from kvstore_service.daemon import native
from kvstore_service.daemon.store.registry import Session, Worker
from kvstore_service.daemon.store.slots import Slots
from kvstore_service.daemon.store.state import State, registered
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
            self._state.registry.append(fork, list(origin.packs))
            return fork

    def close(self, worker: Worker, session_id: str) -> None:
        with self._state.acting(worker):
            session = self._state.registry.of(worker, session_id)
            for slot in list(session.slots):
                self._slots.release(worker, slot)
            self._state.registry.close(session)

    def attach(self, worker: Worker, session_id: str, refs: Sequence[PackRef]) -> int:
        """Appends committed packs to the session, and to the slots that it is bound to. Returns its tokens."""
        with self._state.acting(worker):
            session = self._state.registry.of(worker, session_id)
            rows = [self._state.row(ref, worker) for ref in refs]
            self.check_chain(session, rows)
            for row in rows:
                self.append(session, row)
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

    def append(self, session: Session, row: PackRow) -> None:
        worker = session.worker
        self._state.registry.append(session, [row])
        try:
            self._state.row(row.ref, worker)  # it may have been evicted just before
            for slot in sorted(session.slots):
                handle = self._state.open_packs.acquire(row)
                try:
                    with native.errors():
                        self._state.plane.extend(registered(worker), slot, handle)
                except BaseException:
                    self._state.open_packs.release(row)
                    raise
                worker.bound[slot].packs.append(row)
        except BaseException:
            self._state.registry.retract(session)
            raise
