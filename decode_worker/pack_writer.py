"""Writes packs into the store: reserve, store layer by layer through the staging memory, commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from decode_worker import packing
from decode_worker.packs import IndexedPack, PackCatalogue
from decode_worker.policy.plan import RUN_DTYPE
from decode_worker.records import RecordFormat
from decode_worker.retrieval.base import Retriever
from decode_worker.transport import StagingRing, Transport
from kvstore_service.client import PackImportance, PackRef, PackReservation, ReservedPack, StoreClient


@dataclass
class PackDraft:
    """A pack on its way into the store. One that exists already takes nothing."""

    reserved: ReservedPack
    orders: list[NDArray[np.uint16]] = field(default_factory=list)  # per layer [H, n]
    index_layers: list[Any] = field(default_factory=list)


class PackWriter:
    """`clustered=False` keeps records in token order. StoreError on whatever the store refuses."""

    def __init__(
        self,
        records: RecordFormat,
        retriever: Retriever,
        client: StoreClient,
        transport: Transport,
        catalogue: PackCatalogue,
        *,
        clustered: bool,
    ) -> None:
        self._records = records
        self._retriever = retriever
        self._client = client
        self._transport = transport
        self._catalogue = catalogue
        self._clustered = clustered
        self._staging: StagingRing | None = None

    def reserve(self, session_id: str, reservations: Sequence[PackReservation]) -> list[PackDraft]:
        if not reservations:
            return []
        self._staging = StagingRing(
            self._transport, self._records.staged_bytes(max(r.tokens for r in reservations))
        )
        return [PackDraft(item) for item in self._client.reserve_pack(session_id, reservations)]

    def store(
        self, draft: PackDraft, layer: int, keys: torch.Tensor, values: torch.Tensor, importance: torch.Tensor
    ) -> None:
        """Orders, indexes and stages one layer: K, V [n, H, d]; importance [H, n]. Layers come in order."""
        if draft.reserved.exists:
            return
        assert self._staging is not None
        rounded = self._records.rounded(keys)
        heads, tokens = keys.shape[1], len(keys)
        if self._clustered:
            order = packing.clustered_order(rounded.transpose(0, 1), importance)
        else:
            order = packing.token_order(heads, tokens)
        draft.orders.append(order)
        draft.index_layers.append(self._retriever.build(layer, rounded.numpy(), order))

        def fill(part: NDArray[np.uint8], offset: int) -> NDArray[np.void]:
            runs = np.zeros(heads, dtype=RUN_DTYPE)
            runs["slot"] = draft.reserved.upload_id
            runs["lane"] = range(heads)
            for head in range(heads):
                at = self._records.stage(part, head, keys[:, head], values[:, head], order[head])
                runs["arg"][head] = offset + at
            return runs

        self._staging.store(layer, fill)

    def flush(self) -> None:
        """Returns when the daemon has acknowledged every stored layer."""
        if self._staging is not None:
            self._staging.flush()

    def commit(self, session_id: str, drafts: Sequence[PackDraft]) -> list[IndexedPack]:
        """Makes the drafts durable; a pack that another writer committed first is taken from the store."""
        mine = [d.reserved.upload_id for d in drafts if d.reserved.upload_id is not None]
        committed = iter(self._client.commit_pack(session_id, mine) if mine else [])
        packs, fresh = [], []
        for draft in drafts:
            if draft.reserved.exists:
                packs.append(self._catalogue.get(draft.reserved.pack))
                continue
            result = next(committed)
            if result.error is not None or result.pack is None:
                raise result.error or RuntimeError("the store committed a pack without naming it")
            if result.exists:
                packs.append(self._catalogue.get(result.pack))
            else:
                fresh.append(self._indexed(draft, result.pack))
                packs.append(fresh[-1])
        self._catalogue.publish(fresh)
        self._hint(session_id, packs)
        return packs

    def seal(self, session_id: str, draft: PackDraft) -> IndexedPack:
        """Commits a draft of the session's oldest tail tokens and appends it to the bound session."""
        if draft.reserved.upload_id is None:
            return self._catalogue.get(self._client.seal_existing(session_id, draft.reserved.pack))
        ref = self._client.seal_tail(session_id, draft.reserved.upload_id)
        if ref.build != draft.reserved.pack.build:
            return self._catalogue.get(ref)
        pack = self._indexed(draft, ref)
        self._catalogue.publish([pack])
        return pack

    def _indexed(self, draft: PackDraft, ref: PackRef) -> IndexedPack:
        return IndexedPack(ref, np.stack(draft.orders), self._retriever.assemble(draft.index_layers))

    def abort(self, drafts: Sequence[PackDraft]) -> None:
        self._client.abort_pack([d.reserved.upload_id for d in drafts if d.reserved.upload_id is not None])

    def _hint(self, session_id: str, packs: Sequence[IndexedPack]) -> None:
        """Tells the store which records are worth its memory: the important class at the front of each segment."""
        if not self._clustered or not packs:
            return
        self._client.hint_importance(
            session_id,
            [
                PackImportance(p.ref, np.full(p.order.shape[:2], packing.hot_records(p.tokens), dtype=np.uint32))
                for p in packs
            ],
        )
