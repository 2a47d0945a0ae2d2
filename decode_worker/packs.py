"""What a worker knows about stored packs: their maps and indexes, kept by (pack_id, build)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from decode_worker.failures import is_lost
from decode_worker.retrieval.base import Retriever
from decode_worker.retrieval.index import IndexFormatError, PackIndex
from kvstore_service.client import PackRef, SidecarKey, StoreClient, StoreError

UNPUBLISHED_MAX = 64
KEPT_BYTES_MAX = 1 << 30


@dataclass(frozen=True)
class IndexedPack:
    """A pack as selection sees it. `order`: uint16[layers, H, tokens], record -> token within the pack."""

    ref: PackRef
    order: NDArray[np.uint16]
    index: PackIndex

    @property
    def first_token(self) -> int:
        return self.ref.first_token

    @property
    def tokens(self) -> int:
        return self.ref.tokens

    @property
    def nbytes(self) -> int:
        return self.order.nbytes + self.index.index_bytes


class PackCatalogue:
    """Loads maps and index sidecars of committed packs from the daemon. What sessions have is shared; the most recently
    used ones are kept beyond that, up to `kept_bytes_max`.

    Thread-safe."""

    def __init__(self, client: StoreClient, retriever: Retriever, kept_bytes_max: int = KEPT_BYTES_MAX) -> None:
        self._client = client
        self._retriever = retriever
        self._kept_bytes_max = kept_bytes_max
        self._lock = threading.Lock()
        self._packs: WeakValueDictionary[tuple[bytes, bytes], IndexedPack] = WeakValueDictionary()
        self._kept: OrderedDict[tuple[bytes, bytes], IndexedPack] = OrderedDict()
        self._kept_bytes = 0
        self._unpublished: list[IndexedPack] = []
        self.sidecars_refused = 0

    def find(self, ref: PackRef) -> IndexedPack | None:
        """From memory, else from the daemon; None if there is no good index of the pack for this retriever.

        StoreError (DATA_LOSS) if the pack itself is damaged."""
        with self._lock:
            pack = self._packs.get((ref.pack_id, ref.build))
        if pack is None:
            index = self._load(ref)
            if index is None:
                return None
            pack = IndexedPack(ref, self._client.get_map(ref), index)
        self._remember(pack)
        return pack

    def _load(self, ref: PackRef) -> PackIndex | None:
        """A damaged index is none: it can be made again from the pack, and then replaces the damaged one."""
        try:
            blob = self._client.get_sidecar(self._sidecar_key(ref))
            return None if blob is None else self._retriever.load(blob)
        except IndexFormatError:
            return None
        except StoreError as error:
            if error.code != "DATA_LOSS":
                raise
            return None

    def publish(self, packs: Sequence[IndexedPack]) -> None:
        """Keeps indexed packs, and stores their indexes beside them as far as the store takes them.

        One that it does not take is counted and offered again with the next ones: others can make it themselves. So
        none of its answers is an error here; one that is lost answers the caller's next request in the same way."""
        for pack in packs:
            self._remember(pack)
        with self._lock:
            waiting, self._unpublished = [*self._unpublished, *packs], []
        refused = []
        for i, pack in enumerate(waiting):
            try:
                self._client.put_sidecar(self._sidecar_key(pack.ref), pack.index.save())
            except StoreError as error:
                if error.code in ("NOT_FOUND", "FAILED_PRECONDITION"):  # evicted, or replaced by another build
                    continue
                if is_lost(error):
                    refused += waiting[i:]
                    break
                refused.append(pack)
        with self._lock:
            self.sidecars_refused += len(refused)
            self._unpublished = [*self._unpublished, *refused][-UNPUBLISHED_MAX:]

    def _remember(self, pack: IndexedPack) -> None:
        key = (pack.ref.pack_id, pack.ref.build)
        with self._lock:
            self._packs[key] = pack
            if (old := self._kept.pop(key, None)) is not None:
                self._kept_bytes -= old.nbytes
            self._kept[key] = pack
            self._kept_bytes += pack.nbytes
            while self._kept_bytes > self._kept_bytes_max:
                self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes

    def _sidecar_key(self, ref: PackRef) -> SidecarKey:
        return SidecarKey(ref.pack_id, ref.build, self._retriever.name, self._retriever.parameters)
