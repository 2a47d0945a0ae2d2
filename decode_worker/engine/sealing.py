"""Sealing: the oldest 256 tokens of a session's tail become a durable pack, read from the window that holds them.

It happens beside decode steps: bounded pieces between two of them, the store's answers awaited in another thread. The
session goes on with the pack SEAL_STEPS steps after it was due, so that what a step selects from depends neither on
how fast the store was, unless that takes longer, nor on how many sessions there are: each seal has a schedule by steps.
What it is behind of that is done whatever time it takes; the time that there is beside steps goes to work ahead of it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from decode_worker.engine.prefix import token_digest
from decode_worker.engine.session import Session
from decode_worker.failures import is_lost
from decode_worker.pack_writer import PackDraft, PackWriter
from decode_worker.packs import IndexedPack
from decode_worker.policy.base import Policy
from decode_worker.policy.settings import SEAL_TOKENS, STAGGER
from decode_worker.records import RecordFormat
from decode_worker.store_calls import StoreCalls
from decode_worker.transport import Transport
from decode_worker.work import Pieces, Work
from kvstore_service.client import HASH_BLOCK_TOKENS, NO_PARENT, PackReservation, StoreError

RETRY_S = 1.0
SEAL_STEPS = 128
STEP_SHARE = 0.25  # of a step's time, which the pieces of all sessions' seals may take ahead of their schedules
PIECES_S_MAX = 0.02


class Sealer:
    """`provenance`: what the tails' KV is computed under. `slot_bytes`: of each slot's part of the window."""

    def __init__(
        self,
        records: RecordFormat,
        policy: Policy,
        transport: Transport,
        writer: PackWriter,
        calls: StoreCalls,
        *,
        provenance: bytes,
        slot_bytes: int,
    ) -> None:
        self._records = records
        self._policy = policy
        self._transport = transport
        self._writer = writer
        self._calls = calls
        self._provenance = provenance
        self._slot_bytes = slot_bytes
        settings = policy.settings
        # A tail of the least size is full STAGGER steps after its seal is due.
        self._steps = min(SEAL_STEPS, settings.tail - settings.recent - SEAL_TOKENS - STAGGER)
        self._pace = max(1, self._steps // 2)  # steps for all layers; what is left of them is the store's
        self._pieces_a_step = -(-(settings.layers + 1) // self._pace)
        self._turn = 0
        self._left_s = time.monotonic()

    def advance(self, sessions: Sequence[Session]) -> list[StoreError | None]:
        """Between two steps: goes on with the seals of tails that have grown long enough. Returns each session's fault.

        What the store refuses is tried again before later steps, as long as the tail has a place for the next token;
        then it is a fault. A tail without a place waits for its seal. Raises when the store is lost."""
        entered_s = time.monotonic()
        until_s = entered_s + min(PIECES_S_MAX, STEP_SHARE * (entered_s - self._left_s))
        self._turn += 1
        faults: list[StoreError | None] = [None] * len(sessions)
        for i in range(len(sessions)):
            row = (self._turn + i) % len(sessions)
            try:
                self._advance(sessions[row], until_s)
            except StoreError as error:
                if is_lost(error):
                    raise
                faults[row] = error
        self._left_s = time.monotonic()
        return faults

    def give_up(self, session: Session, error: BaseException | None = None) -> None:
        """Ends the seal under way, if there is one, and leaves nothing of it in the store."""
        if session.sealing is not None:
            session.sealing.give_up(error)
            session.sealing = None

    def _advance(self, session: Session, until_s: float) -> None:
        """The pieces that one session's schedule asks for, and more of them until `until_s`."""
        if session.sealing is None and not self._due(session):
            return
        full = self._policy.room(session.slot, session.position) <= 0
        if session.sealing is None:
            if time.monotonic() < session.seal_after_s and not full:
                return
            session.sealing = Work(self._seal(session))
        try:
            if full:
                session.sealing.finish()
            else:
                self._go_on(session, session.sealing, until_s)
        except StoreError as error:
            session.sealing = None
            if is_lost(error):
                raise
            if full:
                reason = f"the session's tail is full and the store does not take it: {error.message}"
                raise StoreError(error.code, reason, error.retry_after_s, error.violations) from error
            session.seal_after_s = time.monotonic() + (error.retry_after_s or RETRY_S)
        except BaseException:
            session.sealing = None
            raise
        else:
            self._take_over(session, session.sealing, full)

    def _go_on(self, session: Session, sealing: Work[IndexedPack], until_s: float) -> None:
        for _ in range(self._pieces_a_step):
            if self._behind(session, sealing):
                sealing.advance()
        left_s = until_s - time.monotonic()
        if left_s > 0:
            sealing.advance(left_s)

    def _behind(self, session: Session, sealing: Work[IndexedPack]) -> bool:
        """Whether it is time for its next layer. Slots begin one after another, so that they do not all want a piece
        before the same step."""
        settings = self._policy.settings
        phase = session.slot * self._pace // settings.slots
        return self._due(session, (sealing.pieces * self._pace + phase) // (settings.layers + 1))

    def _due(self, session: Session, steps: int = 0) -> bool:
        """Whether a seal was due `steps` steps ago."""
        return self._policy.wants_seal(session.slot, session.position - 1 - steps)

    def _take_over(self, session: Session, sealing: Work[IndexedPack], full: bool) -> None:
        """N grows, once the pack is there and its time has come."""
        if not sealing.ended or not (full or self._due(session, self._steps)):
            return
        session.sealing = None
        session.packs.append(sealing.result)
        self._policy.extend(session.slot, sealing.result)

    def _seal(self, session: Session) -> Pieces[IndexedPack]:
        """The pack of the oldest tail tokens, once it is durable. Their places are not used again before N grows."""
        draft = session.sealed or (yield from self._draft(session))
        try:
            if draft.sealed is None:
                yield from self._store(session, draft)
            pack = yield from self._calls.call(self._writer.seal, session.session_id, draft)
        except BaseException as error:
            if draft.sealed is None:
                self._writer.abort([draft], error)
            else:
                session.sealed = draft
            raise
        session.sealed = None
        return pack

    def _draft(self, session: Session) -> Pieces[PackDraft]:
        first = session.stored
        ids = session.tokens[first : first + HASH_BLOCK_TOKENS]
        parent = session.packs[-1].ref.pack_id if session.packs else NO_PARENT
        reservation = PackReservation(first, len(ids), token_digest(ids, self._provenance), parent)
        (draft,) = yield from self._calls.call(
            self._writer.reserve, session.session_id, [reservation], True, undo=self._writer.abort
        )
        return draft

    def _store(self, session: Session, draft: PackDraft) -> Pieces[None]:
        if draft.known is not None:
            return
        tokens = np.arange(session.stored, session.stored + HASH_BLOCK_TOKENS)
        for layer in range(session.geometry.layers):
            keys, values = self._tail(session, layer, tokens)
            yield from self._writer.store(draft, layer, keys, values, torch.zeros(keys.shape[1], len(tokens)))
        yield from self._writer.flush([draft])

    def _tail(self, session: Session, layer: int, tokens: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """K, V [n, H, d] of tokens that no pack holds yet."""
        geometry, settings = session.geometry, self._policy.settings
        records = []
        for head in range(self._records.kv_heads):
            resident = settings.resident[layer, head]
            places = tokens if resident else tokens % settings.tail
            lane_places = geometry.resident_places if resident else settings.tail
            first = session.slot * self._slot_bytes + int(geometry.own_offsets[layer, head])
            lane = self._transport.window.tensor[first : first + lane_places * geometry.own_bytes]
            records.append(lane.view(-1, geometry.own_bytes)[torch.from_numpy(places)].cpu())
        return self._records.own.unpack(torch.stack(records, dim=1))
