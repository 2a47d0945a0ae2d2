"""The engine: a model joined to its node's KV store. Runs without Ray; the actor is a thin shell around it."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence

import torch

from decode_worker.config import WorkerConfig
from decode_worker.engine.computing import computing
from decode_worker.engine.pack_reader import PackReader
from decode_worker.engine.prefill import Prefill, Prefilled, Progress, StoredPrefix, reusable
from decode_worker.engine.prefix import HASH_BLOCK_TOKENS, candidates
from decode_worker.engine.sealing import Sealer
from decode_worker.engine.session import Session
from decode_worker.engine.step import DecodeLoop
from decode_worker.failures import clean_up, prefix_changed
from decode_worker.model.checkpoint import Checkpoint
from decode_worker.model.tokenizer import Tokenizer
from decode_worker.model.transformer import Transformer
from decode_worker.pack_writer import LeftAlone, PackWriter
from decode_worker.packs import IndexedPack, PackCatalogue
from decode_worker.policy.base import make_policy
from decode_worker.profile import Profile
from decode_worker.records import STORAGE_DTYPES, RecordFormat
from decode_worker.retrieval.base import make_retriever
from decode_worker.transport import Transport
from kvstore_service.client import (
    KindSpec,
    Layout,
    PackRef,
    PrefixCandidate,
    RingGeometry,
    StoreClient,
    StoreError,
)

LAYOUT_VERSION = 1
ATTEMPTS = 4  # at a prefix that changes, or is damaged, while it is taken
BULK_TICKETS = 8
BULK_RUNS_MAX = 4096
BULK_PAIRS_MAX = 1 << 16
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it


class Engine:
    """Sessions of one model over one policy. Not thread-safe; `close` gives everything back.

    Any call may raise StoreError (a refused or failed request) or RingTimeout (the daemon did not answer within
    `wait_ms`; this engine is then finished: close it and make another).
    """

    def __init__(self, config: WorkerConfig, model: Transformer | None = None) -> None:
        """`model`: shares loaded weights between engines of the same checkpoint, context and compute dtype."""
        self.config = config
        checkpoint = Checkpoint.open(config.model)
        shape, compute = checkpoint.config, STORAGE_DTYPES[config.compute][1]
        self.tokenizer = Tokenizer.load(config.model, shape.vocab)
        self.model = model or Transformer.load(checkpoint, config.context, compute)
        self.records = RecordFormat(shape.kv_heads, shape.head_dim, config.storage)
        kind = KindSpec(shape.kv_heads, shape.head_dim, self.records.code, self.records.record_bytes)
        fingerprint = checkpoint.fingerprint(config.context, compute, config.storage, LAYOUT_VERSION)
        self.layout = Layout(fingerprint, shape.layers, (kind,))
        profile = Profile.load(
            config.profile, shape, directory=config.model, eta=config.eta, p=config.p, margin=config.margin
        )
        self.retriever = make_retriever(config.retriever, shape, profile)
        self.policy = make_policy(config, shape, self.records, profile, self.retriever)
        self._computing = computing(config, self.policy)
        self._free_slots = list(range(config.slots))[::-1]
        self._open_sessions: set[Session] = set()
        with contextlib.ExitStack() as stack:
            self.client = StoreClient.connect(
                str(config.socket), str(config.broker), config.name, broker_timeout_s=config.answer_s
            )
            stack.callback(self.client.close)
            self.transport = self._connect_rings()
            stack.callback(self.transport.close)
            self._resources = stack.pop_all()
        self.catalogue = PackCatalogue(self.client, self.retriever)
        self._writer = PackWriter(
            self.records, self.retriever, self.client, self.transport, self.catalogue,
            clustered=config.order == "clustered",
        )  # fmt: skip
        self._prefill = Prefill(
            self.model, self.records, self._writer, self.transport.pack_tokens, self.transport.require_daemon
        )
        self._sealer = Sealer(
            self.records, self.policy, self.transport, self._writer, self.catalogue,
            computing=self._computing, slot_bytes=self.slot_bytes,
        )  # fmt: skip
        self.loop = DecodeLoop(
            self.model, self.records, self.policy, self.transport,
            speculative=config.query == "speculative", stale_fails=config.stale == "fail", threads=config.threads,
        )  # fmt: skip

    def _connect_rings(self) -> Transport:
        config, shape = self.config, self.model.config
        largest = self.policy.geometry(config.context)
        self.slot_bytes = largest.slot_bytes
        runs_max = config.slots * shape.kv_heads
        # Room for the step in which every head misses everything, sinks included.
        pairs_max = runs_max * (largest.k + config.sink)
        return Transport(
            self.client,
            slots=config.slots,
            window_bytes=config.slots * largest.slot_bytes,
            staging_bytes=config.staging_bytes,
            decode_ring=RingGeometry(_power_of_two(2 * shape.layers), runs_max, pairs_max),
            bulk_ring=RingGeometry(BULK_TICKETS, BULK_RUNS_MAX, BULK_PAIRS_MAX),
            wait_ms=config.wait_ms,
        )

    # --- sessions ---

    def prefill(
        self, ids: Sequence[int], progress: Progress | None = None, growth: int = 0
    ) -> tuple[Session, torch.Tensor]:
        """Computes and stores a prompt, binds a slot. Returns the session and float32 logits [vocab] after the last
        token. `growth`: how many tokens are expected to follow; the number of selected places is chosen for them."""
        self._check_prompt(ids)
        compete = False
        for attempt in range(1, ATTEMPTS + 1):
            session = self._open(growth)
            try:
                logits = self._prefill_into(session, ids, progress, compete)
                break
            except BaseException as error:
                self.give_up(session, error)
                if attempt == ATTEMPTS or not (isinstance(error, LeftAlone) or prefix_changed(error)):
                    raise
                compete = isinstance(error, LeftAlone) and error.compete
        self._shrink()
        return session, logits

    def _prefill_into(
        self, session: Session, ids: Sequence[int], progress: Progress | None, compete: bool
    ) -> torch.Tensor:
        with self._stored_prefix(session, ids) as prefix:
            prefilled = self._prefill.run(session.session_id, ids, progress, compete, prefix)
        if prefilled.packs:
            self.client.attach_packs(session.session_id, [pack.ref for pack in prefilled.packs])
        session.packs += prefilled.packs
        session.tokens = list(ids)
        self._bind(session)
        self._continue_prompt(session, prefilled)
        return prefilled.logits

    @contextlib.contextmanager
    def _stored_prefix(self, session: Session, ids: Sequence[int]) -> Iterator[StoredPrefix | None]:
        """What the store has of a prompt in whole chunks, attached, and bound to be read for as long as the block
        lasts; None if it has none."""
        found = self._look_up(reusable(ids[:-1], self.transport.pack_tokens))
        if not found:
            yield None
            return
        self.client.attach_packs(session.session_id, found)
        session.packs = self._indexed(session, found)
        with self._reading(session, found) as reader:

            def read(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
                parts = [reader.read(layer, pack.ref, pack.order) for pack in session.packs]
                keys, values = (torch.cat(each) for each in zip(*parts, strict=True))
                return keys, values

            yield StoredPrefix(found[-1].pack_id, session.stored, read)
        session.reused = sum(ref.tokens for ref in found)

    def _look_up(self, wanted: Sequence[PrefixCandidate]) -> list[PackRef]:
        return self.client.lookup_prefix(self.layout.fingerprint, wanted)

    def attach(self, ids: Sequence[int]) -> tuple[Session, list[int]]:
        """Binds a slot to the longest stored prefix of `ids`, without copying. Returns the session and the ids it
        lacks.

        At least one id is always left, because logits come from a step. What proves to be damaged is no part of the
        prefix: the next longest one is attached.
        """
        self._check_prompt(ids)
        for attempt in range(1, ATTEMPTS + 1):
            session = self._open()
            try:
                self._attach_to(session, ids)
                break
            except BaseException as error:
                self.give_up(session, error)
                if attempt == ATTEMPTS or not prefix_changed(error):
                    raise
        return session, list(ids[session.stored :])

    def _attach_to(self, session: Session, ids: Sequence[int]) -> None:
        found = self._look_up(candidates(ids[:-1], self.transport.pack_tokens, self._computing))
        if found:
            self.client.attach_packs(session.session_id, found)
        session.packs = self._indexed(session, found)
        session.tokens = list(ids[: session.stored])
        self._bind(session)

    def _indexed(self, session: Session, found: Sequence[PackRef]) -> list[IndexedPack]:
        """The packs with their indexes; what has no good index is read back and indexed anew."""
        packs = {ref: self.catalogue.find(ref) for ref in found}
        lacking = [ref for ref, pack in packs.items() if pack is None]
        if lacking:
            fresh = []
            with self._reading(session, found) as reader:
                for ref in lacking:
                    order = self.client.get_map(ref)
                    fresh.append(IndexedPack(ref, order, reader.index(ref, order, self.retriever)))
            self.catalogue.publish(fresh)
            packs.update((pack.ref, pack) for pack in fresh)
        return [pack for pack in packs.values() if pack is not None]

    @contextlib.contextmanager
    def _reading(self, session: Session, refs: Sequence[PackRef]) -> Iterator[PackReader]:
        """Binds the session's slot for as long as its packs are read; after an error `give_up` unbinds it."""
        offset = session.slot * self.slot_bytes
        geometry = self.policy.geometry(self.config.context, sum(ref.tokens for ref in refs))
        epoch = self.client.bind_slot(session.session_id, session.slot, refs, geometry.windows(offset))
        reader = PackReader(self.transport, self.records, geometry, session.slot, epoch, offset)
        yield reader
        self.client.unbind_slot(session.slot)

    def compute_only(self, ids: Sequence[int]) -> torch.Tensor:
        """Computes a prompt and keeps nothing; float32 logits [vocab]."""
        self._check_prompt(ids)
        return self._prefill.compute_only(ids)

    def step(self, sessions: Sequence[Session], tokens: Sequence[int]) -> torch.Tensor:
        """One token of each session; float32 logits [B, vocab]. First seals tails that have grown long enough.

        A seal that the store has no room for is tried again at later steps, as long as the tail has room itself.
        After an error no session has taken its token. ValueError for a closed session, and for one that stands twice.
        """
        if len(set(sessions)) != len(sessions):
            raise ValueError("a session stands twice in one step; it takes one token at a time")
        if not self._open_sessions.issuperset(sessions):
            raise ValueError("a session of this step is closed; open another one")
        positions = [session.position for session in sessions]
        if max(positions) >= self.config.context:
            raise StoreError(
                "RESOURCE_EXHAUSTED", f"a session has reached context={self.config.context} tokens: raise it"
            )
        for session in sessions:
            self._sealer.seal_if_due(session)
        logits = self.loop.step([session.slot for session in sessions], tokens, positions)
        for session, token in zip(sessions, tokens, strict=True):
            session.tokens.append(token)
        return logits

    def close_session(self, session: Session) -> None:
        """Unbinds the slot and closes the session in the store. Packs stay stored.

        Idempotent; after an error `give_up` remains."""
        if session not in self._open_sessions:
            return
        self.policy.unbind(session.slot)
        self.client.close_session(session.session_id)
        self._release(session)

    def give_up(self, session: Session, error: BaseException) -> None:
        """Closes a session after `error`, which matters more than another one from the clean-up.

        A slot that the store may still write to is not used again."""
        if session not in self._open_sessions:
            return
        self.policy.unbind(session.slot)
        if clean_up(error, self.client.close_session, session.session_id):
            self._release(session)
        self._open_sessions.discard(session)

    def index_bytes(self, session: Session) -> int:
        """Of the session's packs: index and record -> token maps."""
        return sum(pack.index.index_bytes + pack.order.nbytes for pack in session.packs)

    def close(self) -> None:
        self._resources.close()

    # --- binding ---

    @property
    def free_slots(self) -> int:
        """How many more sessions can be opened."""
        return len(self._free_slots)

    def _open(self, growth: int = 0) -> Session:
        if not self._free_slots:
            raise StoreError(
                "RESOURCE_EXHAUSTED", f"all {self.config.slots} slots are bound: close a session or raise `slots`"
            )
        session_id = self.client.open_session(self.layout, self.config.context)
        session = Session(session_id, self._free_slots.pop(), growth)
        self._open_sessions.add(session)
        return session

    def _bind(self, session: Session) -> None:
        """Gives the slot its window and fetches what a session always holds: sinks, recent tokens, resident heads."""
        slot = session.slot
        expected = min(self.config.context, session.position + session.growth)
        session.geometry = self.policy.geometry(self.config.context, expected // HASH_BLOCK_TOKENS * HASH_BLOCK_TOKENS)
        self.policy.bind(slot, session.geometry, slot * self.slot_bytes, session.packs, session.position)
        refs = [pack.ref for pack in session.packs]
        session.epoch = self.client.bind_slot(session.session_id, slot, refs, self.policy.windows(slot))
        self.policy.set_epoch(slot, session.epoch)
        self.transport.run(self.policy.bind_tickets(slot, BULK_RUNS_MAX, BULK_PAIRS_MAX))

    def _continue_prompt(self, session: Session, prefilled: Prefilled) -> None:
        """Writes the prompt's tokens behind the last pack into the tail, and fetches what its last query selects."""
        for i, position in enumerate(range(session.stored, session.position)):
            self.policy.begin_step([session.slot], [position])
            for layer, (keys, values) in enumerate(prefilled.rest):
                self.loop.remember(layer, keys[i : i + 1], values[i : i + 1])
        queries = [query.float().numpy() for query in prefilled.last_query]
        self.transport.run(self.policy.first_sets(session.slot, queries, BULK_RUNS_MAX, BULK_PAIRS_MAX))
        self.policy.commit_first_sets(session.slot)

    def _shrink(self) -> None:
        """Returns what prefill alone needed. The C library keeps freed layers of a long prompt for itself otherwise."""
        if _malloc_trim is not None:
            _malloc_trim(0)

    def _release(self, session: Session) -> None:
        self._open_sessions.discard(session)
        self._free_slots.append(session.slot)

    def _check_prompt(self, ids: Sequence[int]) -> None:
        if not ids:
            raise ValueError("the prompt is empty: give at least one token")
        if len(ids) > self.config.context:
            raise ValueError(f"the prompt has {len(ids)} tokens, more than context={self.config.context}: raise it")
        self.model.config.check_prompt(len(ids), self.config.context)


def _power_of_two(n: int) -> int:
    return 1 << max(1, (n - 1).bit_length())
