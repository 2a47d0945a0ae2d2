"""Writes packs into the store: reserve, store layer by layer through the staging memory, commit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from decode_worker import packing
from decode_worker.failures import clean_up
from decode_worker.importance import IMPORTANCES, grades, hot_records
from decode_worker.packs import IndexedPack, PackCatalogue
from decode_worker.policy.plan import RUN_DTYPE
from decode_worker.records import RecordFormat
from decode_worker.retrieval.base import Retriever
from decode_worker.store_calls import StoreCalls
from decode_worker.transport import Posted, Transport
from decode_worker.work import Pause, Pieces
from kvstore_service.client import (
    RECORD_ORDERS,
    CommittedPack,
    PackImportance,
    PackRef,
    PackReservation,
    ReservedPack,
    StoreClient,
    StoreError,
)

OTHERS_WAIT_S = 120.0


class LeftAlone(RuntimeError):
    """What was left to another worker has to be written here after all, by computing it again: that worker gave it up,
    or (`compete`) is too slow."""

    def __init__(self, packs: int, compete: bool) -> None:
        super().__init__(f"another worker {'is too slow with' if compete else 'gave up'} {packs} packs of this prompt")
        self.compete = compete


@dataclass
class PackDraft:
    """A pack on its way into the store.

    One that is stored already takes no records; if nobody has indexed it for this retriever, it still takes an index,
    in the stored pack's order. Nor does one that another worker is writing: `commit` waits for that worker's.
    """

    reservation: PackReservation
    reserved: ReservedPack
    known: IndexedPack | None = None  # stored and indexed: nothing is left to do
    stored_order: NDArray[np.uint16] | None = None  # stored, not indexed: [layers, H, n]
    orders: list[NDArray[np.uint16]] = field(default_factory=list)  # per layer [H, n]
    index_layers: list[Any] = field(default_factory=list)
    posted: list[Posted] = field(default_factory=list)  # STORE tickets
    sealed: PackRef | None = None  # what the store has appended to the session


class PackWriter:
    """`order`: one of packing.ORDERS; `importance`: one of IMPORTANCES. StoreError on whatever the store refuses.

    Drafts of several prompts and tails may be on their way at once. `reserve`, `seal` and `abort` only call the store,
    and may do so in another thread than the one that does the pieces."""

    def __init__(
        self,
        records: RecordFormat,
        retriever: Retriever,
        client: StoreClient,
        transport: Transport,
        catalogue: PackCatalogue,
        calls: StoreCalls,
        *,
        order: str,
        importance: str,
    ) -> None:
        self._records = records
        self._retriever = retriever
        self._client = client
        self._transport = transport
        self._catalogue = catalogue
        self._calls = calls
        self._order, self._number = packing.ORDERS[order], RECORD_ORDERS.index(order)
        self.importance = IMPORTANCES[importance]

    def reserve(
        self, session_id: str, reservations: Sequence[PackReservation], compete: bool = False
    ) -> list[PackDraft]:
        """compete: writes also what another worker is writing; the first commit wins. DATA_LOSS, once all of them have
        been looked at, if stored packs are damaged: reserve again, and they are written anew."""
        if not reservations:
            return []
        reservations = [replace(item, record_order=self._number) for item in reservations]
        answers = self._client.reserve_pack(session_id, reservations, compete)
        drafts = [PackDraft(*pair) for pair in zip(reservations, answers, strict=True)]
        try:
            self._join(drafts)
        except BaseException as error:
            self.abort(drafts, error)
            raise
        return drafts

    def _join(self, drafts: Sequence[PackDraft]) -> None:
        """Finds indexes and maps of the drafts that are stored already."""
        damage: StoreError | None = None
        for draft in drafts:
            if not draft.reserved.exists:
                continue
            try:
                draft.known = self._catalogue.find(draft.reserved.pack)
                draft.stored_order = None if draft.known else self._client.get_map(draft.reserved.pack)
            except StoreError as error:
                if error.code != "DATA_LOSS":
                    raise
                damage = error
        if damage is not None:
            raise damage

    def store(
        self,
        draft: PackDraft,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        importance: torch.Tensor,
        order: NDArray[np.uint16] | None = None,
        hot: NDArray[np.bool_] | None = None,
    ) -> Pieces[None]:
        """Orders, indexes and stages one layer: K, V [n, H, d]; importance [H, n]. Layers come in order. Their device
        finds the order, the host does the rest.

        order: [H, n], record -> token, of who knows one; a pack that is stored already keeps its own. hot: [H, n],
        tokens that DRAM is to have, as far as it has room."""
        if draft.known is not None:
            return
        rounded = self._records.rounded(keys)
        if draft.stored_order is not None:
            order = draft.stored_order[layer]
        elif order is None:
            order = packing.record_order(self._order, rounded, importance)
        rounded, keys, values = rounded.cpu(), keys.cpu(), values.cpu()
        draft.orders.append(order)
        draft.index_layers.append(self._retriever.build(layer, rounded.numpy(), order))
        if draft.reserved.upload_id is not None:
            yield from self._transport.staging.room(self._records.staged_bytes(len(keys)))
            self._stage(draft, layer, keys, values, order, hot)
        yield None

    def _stage(
        self,
        draft: PackDraft,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        order: NDArray[np.uint16],
        hot: NDArray[np.bool_] | None,
    ) -> None:
        graded = None if hot is None else grades(hot, order, self._records.records_per_block)

        def fill(part: NDArray[np.uint8], offset: int) -> NDArray[np.void]:
            runs = np.zeros(len(order), dtype=RUN_DTYPE)
            runs["slot"] = draft.reserved.upload_id
            runs["lane"] = range(len(order))
            runs["pair_count"] = 0 if graded is None else graded.shape[1]
            runs["arg"] = offset + self._records.stage(part, keys, values, order, graded)
            return runs

        posted = self._transport.staging.store(layer, self._records.staged_bytes(len(keys)), fill)
        draft.posted.append(posted)

    def flush(self, drafts: Sequence[PackDraft]) -> Pieces[None]:
        """Until the daemon has acknowledged every staged layer."""
        for posted in [posted for draft in drafts for posted in draft.posted]:
            if not posted.done():
                yield posted
            posted.check()

    def commit(self, session_id: str, drafts: Sequence[PackDraft]) -> Pieces[list[IndexedPack]]:
        """Makes the drafts durable; a pack that another writer committed first is taken from the store.

        LeftAlone if another worker does not commit a pack that this one has left to it."""
        yield from self.flush(drafts)
        yield from self._await_others(session_id, drafts)
        return (yield from self._calls.call(self._commit, session_id, drafts))

    def _commit(self, session_id: str, drafts: Sequence[PackDraft]) -> list[IndexedPack]:
        mine = [d.reserved.upload_id for d in drafts if d.reserved.upload_id is not None]
        committed = iter(self._client.commit_pack(session_id, mine) if mine else [])
        packs, fresh = [], []
        for draft in drafts:
            pack = draft.known or self._committed(draft, None if draft.reserved.exists else next(committed))
            if draft.known is None:
                fresh.append(pack)
            packs.append(pack)
        self._catalogue.publish(fresh)
        self._hint(session_id, packs)
        return packs

    def _await_others(self, session_id: str, drafts: Sequence[PackDraft]) -> Pieces[None]:
        """Until every pack that other workers are writing is stored."""
        deadline = time.monotonic() + OTHERS_WAIT_S
        while theirs := [draft for draft in drafts if draft.reserved.retry_after_s is not None]:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise LeftAlone(len(theirs), compete=True)
            yield Pause(min(remaining_s, *(draft.reserved.retry_after_s or 0 for draft in theirs)))
            parents = dict(zip(map(id, drafts[1:]), (d.reserved.pack.pack_id for d in drafts), strict=False))
            again = [replace(d.reservation, parent=parents.get(id(d), d.reservation.parent)) for d in theirs]
            answers = yield from self._calls.call(self._client.reserve_pack, session_id, again)
            for draft, answer in zip(theirs, answers, strict=True):
                draft.reserved = answer
            given_up = [draft for draft in theirs if draft.reserved.upload_id is not None]
            if given_up:
                raise LeftAlone(len(given_up), compete=False)

    def seal(self, session_id: str, draft: PackDraft) -> IndexedPack:
        """Commits a draft of the session's oldest tail tokens, appends it to the bound session, publishes its index.

        Called again with a draft that is `sealed` already, it does what was left."""
        ref = draft.sealed = draft.sealed or self._append(session_id, draft)
        if draft.known is not None:
            return draft.known
        pack = self._committed(draft, CommittedPack(ref, exists=ref.build != draft.reserved.pack.build))
        self._catalogue.publish([pack])
        return pack

    def _append(self, session_id: str, draft: PackDraft) -> PackRef:
        if draft.reserved.upload_id is None:
            return self._client.seal_existing(session_id, draft.reserved.pack)
        return self._client.seal_tail(session_id, draft.reserved.upload_id)

    def _committed(self, draft: PackDraft, result: CommittedPack | None) -> IndexedPack:
        """The indexed pack of a draft; `result` is None for one that was stored already, or by another worker."""
        index, order = self._retriever.assemble(draft.index_layers), np.stack(draft.orders)
        if result is None:
            if draft.stored_order is not None:
                return IndexedPack(draft.reserved.pack, order, index)
            result = CommittedPack(draft.reserved.pack, exists=True)
        if result.pack is None:
            raise result.error or StoreError("INTERNAL", "the store committed a pack without naming it")
        if not result.exists:
            return IndexedPack(result.pack, order, index)
        # Another writer won: its records lie in another order, and so must our index.
        theirs = self._client.get_map(result.pack)
        record_of_token = order.argsort(axis=2)
        return IndexedPack(result.pack, theirs, index.reordered(np.take_along_axis(record_of_token, theirs, axis=2)))

    def abort(self, drafts: Sequence[PackDraft], error: BaseException) -> None:
        """Gives uploads up after `error`, as far as the store lets it."""
        mine = [d.reserved.upload_id for d in drafts if d.reserved.upload_id is not None]
        if mine:
            clean_up(error, self._client.abort_pack, mine)

    def _hint(self, session_id: str, packs: Sequence[IndexedPack]) -> None:
        """Tells the store which records are worth its memory: the important class at the front of each segment. It
        reads nothing of packs whose grades it has just followed."""
        if not self._order.hot_first or not self.importance.hints or not packs:
            return
        self._client.hint_importance(
            session_id,
            [PackImportance(p.ref, np.full(p.order.shape[:2], hot_records(p.tokens), dtype=np.uint32)) for p in packs],
        )
