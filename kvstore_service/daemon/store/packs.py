"""Packs: written, committed, sealed from a tail, and warmed."""

from collections.abc import Sequence

import numpy as np

from kvstore_service.daemon import native
from kvstore_service.daemon.store.registry import Session, Worker
from kvstore_service.daemon.store.sessions import Sessions
from kvstore_service.daemon.store.state import State, served
from kvstore_service.shared.types import CommittedPack, PackRef, PackReservation, ReservedPack, StoreError


class Packs:
    """What workers write."""

    def __init__(self, state: State, sessions: Sessions) -> None:
        self._state = state
        self._sessions = sessions

    def reserve(
        self, worker: Worker, session_id: str, items: Sequence[PackReservation], compete: bool = False
    ) -> list[ReservedPack]:
        """Also while draining: a session that is open may seal and end."""
        with self._state.acting(worker):
            served(worker)
            session = self._state.registry.of(worker, session_id)
            reserved = self._state.uploads.reserve(session, items, self._state.tenant_key(worker), compete)
            self._state.count("reserve_exists", sum(pack.exists for pack in reserved))
            self._state.count("reserve_in_progress", sum(pack.retry_after_s is not None for pack in reserved))
            return reserved

    def commit(self, worker: Worker, session_id: str, upload_ids: Sequence[int]) -> list[CommittedPack]:
        """Durable on return; per item an error, the commit, or the winner of an earlier one."""
        with self._state.acting(worker):
            self._state.registry.of(worker, session_id)
            committed = self._state.uploads.commit(worker, upload_ids)
            self._state.count("commit_exists", sum(item.exists for item in committed))
            stored = [item.pack for item in committed if item.pack is not None and not item.exists]
            self._state.count("commits", len(stored))
            for ref in stored:
                self._state.events.tell("commit", worker.tenant, ref.pack_id, detail=f"{ref.tokens} tokens")
            return committed

    def abort(self, worker: Worker, upload_ids: Sequence[int]) -> None:
        with self._state.acting(worker):
            self._state.uploads.abort(worker, upload_ids)

    def expire(self) -> None:
        """Aborts the uploads of workers that have stopped writing."""
        if expired := self._state.uploads.sweep():
            self._state.count("uploads_expired", expired)
            self._state.events.tell("upload", detail=f"{expired} expired")

    def seal_tail(self, worker: Worker, session_id: str, upload_id: int) -> Session:
        """Commits the pack of the oldest tail tokens and appends what the store then holds to session and slots.

        If another commit won, that is the winner's build: the worker loads its map before it selects from it."""
        with self._state.acting(worker):
            session = self._state.registry.of(worker, session_id)
            row = self._state.uploads.row(worker, upload_id)
            self._sessions.check_chain(session, [row])
            (sealed,) = self.commit(worker, session_id, [upload_id])
            if sealed.error is not None:
                raise sealed.error
            assert sealed.pack is not None
            self._sessions.extend(session, [self._state.row(sealed.pack, worker)])
            return session

    def hint_importance(self, worker: Worker, session_id: str, hints: Sequence[tuple[PackRef, Sequence[int]]]) -> None:
        """Reads ahead the records at the front of each segment, [layers * lanes] counts per pack; a pack that is hotter
        is evicted later."""
        with self._state.acting(worker):
            layout = self._state.registry.of(worker, session_id).layout
            shape = (layout.layers, layout.kinds[0].lanes)
            shares: dict[bytes, float] = {}
            for ref, hot_records in hints:
                row = self._state.row(ref, worker)
                if row.layout != layout or len(hot_records) != shape[0] * shape[1]:
                    raise StoreError("INVALID_ARGUMENT", f"hot_records has one count per layer and lane, {shape}")
                shares[ref.pack_id] = min(1.0, sum(hot_records) / (shape[0] * shape[1] * ref.tokens))
                with self._state.open_packs.using(row) as handle, native.errors():
                    hot = np.array(hot_records, np.uint32).reshape(shape)
                    self._state.plane.warm(handle, hot, worker.uid)
            self._state.weigh(shares)
