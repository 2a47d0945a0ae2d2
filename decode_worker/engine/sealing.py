"""Sealing: the oldest 256 tokens of a session's tail become a durable pack, read from the window that holds them."""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray

from decode_worker.engine.prefix import token_digest
from decode_worker.engine.session import Session
from decode_worker.failures import refused_for_now
from decode_worker.pack_writer import PackWriter
from decode_worker.packs import PackCatalogue
from decode_worker.policy.base import Policy
from decode_worker.records import RecordFormat
from decode_worker.transport import Transport
from kvstore_service.client import HASH_BLOCK_TOKENS, NO_PARENT, PackReservation, StoreError

RETRY_S = 1.0


class Sealer:
    """`computing`: what the tails' KV is computed under. `slot_bytes`: of each slot's part of the window."""

    def __init__(
        self,
        records: RecordFormat,
        policy: Policy,
        transport: Transport,
        writer: PackWriter,
        catalogue: PackCatalogue,
        *,
        computing: bytes,
        slot_bytes: int,
    ) -> None:
        self._records = records
        self._policy = policy
        self._transport = transport
        self._writer = writer
        self._catalogue = catalogue
        self._computing = computing
        self._slot_bytes = slot_bytes

    def seal_if_due(self, session: Session) -> None:
        """Seals a tail that has grown long enough. A store without room for it is asked again before later steps, as
        long as the tail has a place for the next token; then StoreError."""
        if not self._policy.wants_seal(session.slot, session.position - 1):
            return
        room = self._policy.room(session.slot, session.position)
        if room > 0 and time.monotonic() < session.seal_after_s:
            return
        try:
            self._seal(session)
        except StoreError as error:
            if not refused_for_now(error):
                raise
            if room <= 0:
                reason = f"the session's tail is full and the store does not take it: {error.message}"
                raise StoreError(error.code, reason, error.retry_after_s, error.violations) from error
            session.seal_after_s = time.monotonic() + (error.retry_after_s or RETRY_S)

    def _seal(self, session: Session) -> None:
        first = session.stored
        ids = session.tokens[first : first + HASH_BLOCK_TOKENS]
        parent = session.packs[-1].ref.pack_id if session.packs else NO_PARENT
        reservation = PackReservation(first, len(ids), token_digest(ids, self._computing), parent)
        (draft,) = self._writer.reserve(session.session_id, [reservation], compete=True)
        try:
            for layer in range(session.geometry.layers):
                keys, values = self._tail(session, layer, np.arange(first, first + len(ids)))
                self._writer.store(draft, layer, keys, values, torch.zeros(keys.shape[1], len(ids)))
            self._writer.flush()
            pack = self._writer.seal(session.session_id, draft)
        except BaseException as error:
            self._writer.abort([draft], error)
            raise
        session.packs.append(pack)
        self._policy.extend(session.slot, pack)
        if draft.known is None:
            self._catalogue.publish([pack])

    def _tail(self, session: Session, layer: int, tokens: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """K, V [n, H, d] of tokens that no pack holds yet."""
        geometry, settings = session.geometry, self._policy.settings
        records = []
        for head in range(self._records.kv_heads):
            resident = settings.resident[layer, head]
            places = tokens if resident else geometry.first_tail + tokens % settings.tail
            offset = session.slot * self._slot_bytes + int(geometry.offsets[layer, head])
            lane = self._transport.window.bytes[
                offset : offset + int(geometry.places[layer, head]) * geometry.record_bytes
            ]
            records.append(lane.reshape(-1, geometry.record_bytes)[places])
        return self._records.unpack(np.stack(records, axis=1))
