"""Indexes: sidecars of packs, and the maps that packs carry themselves."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kvstore_service.daemon import native
from kvstore_service.daemon.disk import sidecars
from kvstore_service.daemon.store.registry import Worker
from kvstore_service.daemon.store.state import State
from kvstore_service.shared import memory
from kvstore_service.shared.types import SidecarKey, StoreError, Violation

SIDECARS_MAX = 16  # of a pack


class Indexes:
    """Kept beside packs for whoever attaches them."""

    def __init__(self, state: State) -> None:
        self._state = state

    def put(self, worker: Worker, key: SidecarKey, content: bytes | memoryview, replace: bool = False) -> None:
        """Durable on return. The first content of a key stays, unless it is to be replaced."""
        with self._state.acting(worker), self._keeping(key, worker):
            if len(content) > sidecars.SIDECAR_BYTES_MAX or not key.kind or key.kind == "map":
                raise StoreError(
                    "INVALID_ARGUMENT", f"a sidecar has a kind other than map and at most 1 GiB: {key.kind!r}"
                )
            held = self._state.catalog.sidecar_count(key.pack_id)
            if held >= SIDECARS_MAX and self._state.catalog.sidecar(key) is None:
                raise StoreError(
                    "RESOURCE_EXHAUSTED",
                    f"pack {key.pack_id.hex()} has {held} sidecars, at most {SIDECARS_MAX}; evict it to begin anew",
                    violations=[Violation("sidecars of a pack", f"at most {SIDECARS_MAX}")],
                    reason="LIMIT_REACHED",
                )
            file_bytes = sidecars.file_bytes(key, len(content))
            self._state.room.promise(worker.tenant, file_bytes)
            try:
                self._state.room.clear_disk(file_bytes)
                sidecars.write(self._state.catalog, key, content, replace)
            finally:
                self._state.room.unpromise(worker.tenant, file_bytes)

    @contextmanager
    def _keeping(self, key: SidecarKey, worker: Worker) -> Iterator[None]:
        """While room is made for its sidecar the pack stays. NOT_FOUND."""
        self._state.keyed_row(key, worker)
        with self._state.registry.keeping(key.pack_id):
            self._state.keyed_row(key, worker)  # it may have gone before it was held
            yield

    def size(self, worker: Worker, key: SidecarKey) -> int:
        """Bytes that `get` will take. NOT_FOUND."""
        row = self._state.keyed_row(key, worker)
        if key.kind != "map":
            return sidecars.content_bytes(self._state.catalog, key)
        return row.layout.layers * row.layout.kinds[0].lanes * row.ref.tokens * np.dtype(np.uint16).itemsize

    def get(self, worker: Worker, key: SidecarKey) -> int:
        """The content as a constant memfd, the caller's. NOT_FOUND if nobody has put it, or it was damaged or lost
        since. Kind "map": the pack's record -> token map, u16[layers, lanes, tokens]."""
        row = self._state.keyed_row(key, worker)
        if key.kind != "map":
            shared = sidecars.share(self._state.catalog, key)
            if shared is None:
                raise StoreError(
                    "NOT_FOUND", f"no sidecar {key.kind!r} of pack {key.pack_id.hex()}", reason="SIDECAR_NOT_STORED"
                )
            return shared
        shared = memory.create("kvstore-map", self.size(worker, key))
        try:
            with self._state.open_packs.using(row) as handle, native.errors():
                self._state.plane.copy_map(handle, shared)
            memory.add_seals(shared, memory.CONSTANT | memory.F_SEAL_SEAL)
        except BaseException:
            os.close(shared)
            raise
        return shared

    def map_shape(self, name: bytes) -> tuple[int, int, int]:
        row = self._state.catalog.any_pack(name)
        return row.layout.layers, row.layout.kinds[0].lanes, row.ref.tokens
