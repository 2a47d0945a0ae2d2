"""What a worker knows about stored packs: their maps and indexes, kept by (pack_id, build)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decode_worker.retrieval.base import PackIndex, Retriever
from kvstore_service.client import PackRef, SidecarKey, StoreClient, StoreError


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


class PackCatalogue:
    """Loads maps and index sidecars of committed packs from the daemon, and keeps the most recently used ones."""

    def __init__(self, client: StoreClient, retriever: Retriever, packs_max: int = 4096) -> None:
        self._client = client
        self._retriever = retriever
        self._packs_max = packs_max
        self._packs: OrderedDict[tuple[bytes, bytes], IndexedPack] = OrderedDict()

    def find(self, ref: PackRef) -> IndexedPack | None:
        """From memory, else from the daemon; None if nobody has indexed the pack for this retriever."""
        key = (ref.pack_id, ref.build)
        if key not in self._packs:
            blob = self._client.get_sidecar(self._sidecar_key(ref))
            if blob is None:
                return None
            self._remember(IndexedPack(ref, self._client.get_map(ref), self._retriever.load(blob)))
        self._packs.move_to_end(key)
        return self._packs[key]

    def get(self, ref: PackRef) -> IndexedPack:
        """Like `find`, but a pack without an index is StoreError NOT_FOUND."""
        found = self.find(ref)
        if found is None:
            name, kind = ref.pack_id.hex()[:16], self._retriever.name
            raise StoreError(
                "NOT_FOUND", f"pack {name} has no '{kind}' index: prefill its text once with this retriever"
            )
        return found

    def publish(self, packs: Sequence[IndexedPack]) -> None:
        """Keeps freshly committed packs and stores their indexes beside them."""
        for pack in packs:
            self._client.put_sidecar(self._sidecar_key(pack.ref), pack.index.save())
            self._remember(pack)

    def _remember(self, pack: IndexedPack) -> None:
        self._packs[(pack.ref.pack_id, pack.ref.build)] = pack
        while len(self._packs) > self._packs_max:
            self._packs.popitem(last=False)

    def _sidecar_key(self, ref: PackRef) -> SidecarKey:
        return SidecarKey(ref.pack_id, ref.build, self._retriever.name, self._retriever.parameters)
