"""Slots: what a worker's record ids and places mean, from bind to unbind."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore_service.daemon import native
from kvstore_service.daemon.store.registry import BOUND_PACK_BYTES, Binding, Worker
from kvstore_service.daemon.store.state import State, served
from kvstore_service.shared.types import PackRef, StoreError


class Slots:
    """Binds slots to sessions."""

    def __init__(self, state: State) -> None:
        self._state = state

    def bind(
        self, worker: Worker, session_id: str, slot: int, refs: Sequence[PackRef], windows: NDArray[np.uint64]
    ) -> Binding:
        """Binds a slot to the session's packs; `refs` is the list that the worker's index was built from.

        windows: uint64[layers * lanes, 2] = (byte offset of place 0, places)."""
        with self._state.acting(worker):
            session = self._state.registry.of(worker, session_id)
            kind = session.layout.kinds[0]
            if [(ref.pack_id, ref.build) for ref in refs] != [
                (row.ref.pack_id, row.ref.build) for row in session.packs
            ]:
                raise StoreError(
                    "FAILED_PRECONDITION",
                    "the list of packs is not the session's; load its maps again",
                    reason="LIST_DIFFERS",
                )
            if windows.shape != (session.layout.layers * kind.lanes, 2):
                raise StoreError("INVALID_ARGUMENT", f"{len(windows)} windows; one per layer and lane is needed")
            if slot in worker.bound:
                raise StoreError("FAILED_PRECONDITION", f"slot {slot} is bound; unbind it first", reason="SLOT_BOUND")
            binding = Binding(session, [], 0, len(windows))
            more_bytes = binding.memory_bytes + len(session.packs) * BOUND_PACK_BYTES
            self._state.registry.require_memory(worker, more_bytes)
            try:
                handles = []
                for row in session.packs:
                    handles.append(self._state.open_packs.acquire(row))
                    binding.packs.append(row)
                shaped = windows.reshape(session.layout.layers, kind.lanes, 2)
                with native.errors():
                    binding.epoch = self._state.plane.bind(served(worker), slot, handles, shaped, kind.record_bytes)
            except BaseException:
                self._state.release_packs(binding)
                raise
            worker.bound[slot] = binding
            session.slots.add(slot)
            return binding

    def unbind(self, worker: Worker, slot: int) -> None:
        """Returns when nothing of the slot's epoch can store any more. Idempotent."""
        with self._state.acting(worker):
            self.release(worker, slot)

    def release(self, worker: Worker, slot: int) -> None:
        """For a caller that holds the worker's lock."""
        if slot not in worker.bound:
            if slot in worker.unbound:
                return
            raise StoreError("NOT_FOUND", f"slot {slot} is not bound", reason="SLOT_NOT_BOUND")
        with native.errors():
            self._state.plane.unbind(served(worker), slot)
        binding = worker.bound.pop(slot)
        worker.unbound.add(slot)
        binding.session.slots.discard(slot)
        self._state.release_packs(binding)
