"""Indexes: sidecars of packs, and the maps that packs carry themselves."""

import numpy as np

from kvstore_service.daemon import native
from kvstore_service.daemon.disk import sidecars
from kvstore_service.daemon.store.registry import Worker
from kvstore_service.daemon.store.state import State
from kvstore_service.shared.types import SidecarKey, StoreError


class Indexes:
    """Kept beside packs for whoever attaches them."""

    def __init__(self, state: State) -> None:
        self._state = state

    def put(self, worker: Worker, key: SidecarKey, content: bytes) -> None:
        with self._state.acting(worker):
            self._state.keyed_row(key, worker)
            if len(content) > sidecars.SIDECAR_BYTES_MAX or not key.kind or key.kind == "map":
                raise StoreError(
                    "INVALID_ARGUMENT", f"a sidecar has a kind other than map and at most 1 GiB: {key.kind!r}"
                )
            size_bytes = sidecars.file_bytes(len(content))
            self._state.uploads.promise(size_bytes)
            try:
                sidecars.write(self._state.catalog, key, content)
            finally:
                self._state.uploads.unpromise(size_bytes)

    def get(self, worker: Worker, key: SidecarKey) -> bytes:
        """NOT_FOUND if nobody has put it. Kind "map": the pack's record -> token map, u16[layers, lanes, tokens]."""
        row = self._state.keyed_row(key, worker)
        if key.kind != "map":
            return sidecars.read(self._state.catalog, key)
        with self._state.open_packs.using(row) as handle, native.errors():
            return np.ascontiguousarray(self._state.plane.read_map(handle)).tobytes()

    def map_shape(self, name: bytes) -> tuple[int, int, int]:
        row = self._state.catalog.any_pack(name)
        return row.layout.layers, row.layout.kinds[0].lanes, row.ref.tokens
