"""The engine: a model joined to its node's KV store. Runs without Ray; the actor is a thin shell around it."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence

import torch

from decode_worker.calibration.profile import Profile
from decode_worker.config import WorkerConfig
from decode_worker.device import device_of
from decode_worker.engine.graphs import Graphs
from decode_worker.engine.pack_reader import PackReader
from decode_worker.engine.prefill import Prefill, Prefilled, Progress, StoredPrefix, computing, reusable
from decode_worker.engine.prefix import candidates
from decode_worker.engine.provenance import provenance
from decode_worker.engine.sealing import Sealer
from decode_worker.engine.session import Session
from decode_worker.engine.step import DecodeLoop
from decode_worker.engine.under_way import End, UnderWay
from decode_worker.engine.widening import widen
from decode_worker.failures import clean_up, prefix_changed
from decode_worker.kernels.base import RecordKind, StepContext
from decode_worker.kernels.ends import Row
from decode_worker.kernels.products import PRODUCTS
from decode_worker.kernels.sets import KERNELS
from decode_worker.labels import Labels
from decode_worker.model.checkpoint import Checkpoint
from decode_worker.model.sampling import Sampling
from decode_worker.model.tokenizer import Tokenizer
from decode_worker.model.transformer import Transformer
from decode_worker.pack_writer import OTHERS_WAIT_S, LeftAlone, PackWriter
from decode_worker.packs import IndexedPack, PackCatalogue
from decode_worker.policy.base import make_policy
from decode_worker.policy.lookahead import Lookahead
from decode_worker.records import STORAGE_DTYPES, RecordFormat
from decode_worker.retrieval.base import make_retriever
from decode_worker.store_calls import StoreCalls
from decode_worker.transport import Transport
from decode_worker.work import Pieces, Work, finish
from kvstore_service.client import (
    HASH_BLOCK_TOKENS,
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

    def __init__(
        self, config: WorkerConfig, model: Transformer | None = None, checkpoint: Checkpoint | None = None
    ) -> None:
        """`model`: shares loaded weights between engines of the same checkpoint, context and compute dtype.
        `checkpoint`: in the place of the one that lies in `config.model`, which still has the tokenizer."""
        self.config = config
        checkpoint = checkpoint or Checkpoint.open(config.model)
        shape, compute = checkpoint.config, STORAGE_DTYPES[config.compute][1]
        self.device = device_of(config.kernels)
        self.tokenizer = Tokenizer.load(config.model, shape.vocab)
        self.model = model or Transformer.load(
            checkpoint,
            config.context,
            compute,
            self.device.torch_device,
            self.device.operations(shape, config.context, compute),
        )
        self.records = RecordFormat(shape.kv_heads, shape.head_dim, config.storage, config.record_kind)
        kind = KindSpec(shape.kv_heads, shape.head_dim, self.records.code, self.records.record_bytes)
        fingerprint = checkpoint.fingerprint(config.context, compute, self.records.name, LAYOUT_VERSION)
        self.layout = Layout(fingerprint, shape.layers, (kind,))
        profile = Profile.load(
            config.profile, shape, directory=config.model, eta=config.eta, p=config.p, margin=config.margin
        )
        self.retriever = make_retriever(config.retriever, shape, profile)
        self.policy = make_policy(config, shape, self.records, profile, self.retriever, self.device.torch_device)
        self._provenance = provenance(config, self.policy)
        self._free_slots = list(range(config.slots))[::-1]
        self._open_sessions: set[Session] = set()
        self._unclosed: list[Session] = []  # given up, while the store did not answer
        self._under_way: list[UnderWay] = []
        self._calls = StoreCalls()
        with contextlib.ExitStack() as stack:
            stack.callback(self._calls.close)
            self.client = StoreClient.connect(
                str(config.socket), str(config.broker), config.name, broker_timeout_s=config.answer_s
            )
            stack.callback(self.client.close)
            self.transport = self._connect_rings()
            stack.callback(self.transport.close)
            self._build()
            stack.callback(self.loop.close)
            self._resources = stack.pop_all()

    def _build(self) -> None:
        """What works on the worker's memory."""
        config = self.config
        self.catalogue = PackCatalogue(self.client, self.retriever)
        self.labels = Labels(self.client, self.policy, self._provenance)
        self._writer = PackWriter(
            self.records, self.retriever, self.client, self.transport, self.catalogue, self._calls,
            order=config.order, importance=config.importance,
        )  # fmt: skip
        self._prefill = Prefill(
            self.model, self.records, self._writer, self._calls, self.transport.pack_tokens,
            self.transport.require_daemon, self.device.wait,
        )  # fmt: skip
        self._sealer = Sealer(
            self.records, self.policy, self.transport, self._writer, self._calls,
            provenance=self._provenance, slot_bytes=self.slot_bytes,
        )  # fmt: skip
        window = self.transport.window
        context = StepContext(
            self.policy.settings, self.policy.state, self.retriever, self.device, window.tensor, window.landing,
            self.transport.decode, dtype=self.records.own.code, record_bytes=self.records.own.record_bytes,
            scale=self.model.scale, threads=config.threads, stale_fails=config.stale == "fail",
            wait_us=self.transport.wait_us, frames=window.frames,
            stored=RecordKind(self.records.code, self.records.record_bytes),
            lookahead=Lookahead.of(config.lookahead), more_rings=tuple(self.transport.more_decode),
        )  # fmt: skip
        products = PRODUCTS[config.kernels](self.model, config.slots, config.threads, config.weights)
        graphs = Graphs(self.device) if config.graph == "auto" and self.device.graphs else None
        self.loop = DecodeLoop(
            self.policy, products, self.transport, KERNELS[config.kernels](context), graphs, config.sync == "layer"
        )

    def _connect_rings(self) -> Transport:
        config, shape = self.config, self.model.config
        largest = self.policy.geometry(config.context)
        self.slot_bytes = largest.slot_bytes
        runs_max = config.slots * shape.kv_heads
        # Room for the step in which every head misses everything, sinks included.
        pairs_max = runs_max * (int(largest.selected.max()) + config.sink)
        return Transport(
            self.client,
            self.device,
            slots=config.slots,
            window_bytes=config.slots * largest.slot_bytes,
            staging_bytes=config.staging_bytes,
            decode_ring=RingGeometry(
                _power_of_two((4 if Lookahead.of(config.lookahead) else 2) * shape.layers),
                runs_max,
                pairs_max,
                device=not self.device.wakes,
            ),
            bulk_ring=RingGeometry(BULK_TICKETS, BULK_RUNS_MAX, BULK_PAIRS_MAX),
            wait_ms=config.wait_ms,
            windows=self.device.windows if config.window == "auto" else (config.window,),
            decode_rings=config.decode_rings,
        )

    # --- sessions ---

    def prefill(
        self, ids: Sequence[int], progress: Progress | None = None, growth: int = 0
    ) -> tuple[Session, torch.Tensor]:
        """Computes and stores a prompt, binds a slot. Returns the session and float32 logits [vocab] after the last
        token. `growth`: how many tokens are expected to follow; the number of selected places is chosen for them."""
        self._check_prompt(ids)
        return Work(self._prompt(ids, progress, growth, patient=False), computing).finish()

    def begin(
        self, ids: Sequence[int], progress: Progress | None = None, growth: int = 0
    ) -> Work[tuple[Session, torch.Tensor]]:
        """A `prefill` in pieces, with steps of other sessions between them. It holds a slot from its first piece on.

        While a prompt that began before is computing most of this one, it waits: whoever drives it drives them all."""
        self._check_prompt(ids)
        return Work(self._prompt(ids, progress, growth, patient=True), computing)

    def _prompt(
        self, ids: Sequence[int], progress: Progress | None, growth: int, patient: bool
    ) -> Pieces[tuple[Session, torch.Tensor]]:
        """Not `patient`: nobody drives the others meanwhile, so it waits for none of them."""
        mine, earlier = UnderWay(ids), list(self._under_way)
        self._under_way.append(mine)
        try:
            return (yield from self._attempts(ids, progress, growth, earlier, patient))
        finally:
            mine.ended = True
            self._under_way.remove(mine)

    def _attempts(
        self,
        ids: Sequence[int],
        progress: Progress | None,
        growth: int,
        earlier: Sequence[UnderWay],
        patient: bool,
    ) -> Pieces[tuple[Session, torch.Tensor]]:
        hasty = compete = bool(earlier) and not patient
        for attempt in range(1, ATTEMPTS + 1):
            session = yield from self._open(growth)
            try:
                if patient:
                    yield from self._await(earlier, ids)
                logits = yield from self._prefill_into(session, ids, progress, compete)
                break
            except BaseException as error:
                self.give_up(session, error)
                if attempt == ATTEMPTS or not (isinstance(error, LeftAlone) or prefix_changed(error)):
                    raise
                compete = hasty or (isinstance(error, LeftAlone) and error.compete)
        self._shrink()
        return session, logits

    def _await(self, earlier: Sequence[UnderWay], ids: Sequence[int]) -> Pieces[None]:
        """Until none of them computes most of `ids`, unless the store has that already."""
        pack_tokens = self.transport.pack_tokens
        for other in earlier:
            shared = other.gives(ids, pack_tokens)
            if other.ended or not shared:
                continue
            wanted = reusable(ids[:-1], pack_tokens)
            found = yield from self._calls.call(self.client.lookup_prefix, self.layout.fingerprint, wanted)
            if sum(ref.tokens for ref in found) < shared:
                yield End(other, OTHERS_WAIT_S)

    def _prefill_into(
        self, session: Session, ids: Sequence[int], progress: Progress | None, compete: bool
    ) -> Pieces[torch.Tensor]:
        prefix = yield from self._stored_prefix(session, ids)
        prefilled = yield from self._prefill.run(session.session_id, ids, progress, compete, prefix)
        if prefix is not None:
            yield from self._calls.call(self.client.unbind_slot, session.slot)
        if prefilled.packs:
            refs = [pack.ref for pack in prefilled.packs]
            yield from self._calls.call(self.client.attach_packs, session.session_id, refs)
        session.packs += prefilled.packs
        session.tokens = list(ids)
        yield from self._bind(session)
        yield from self._continue_prompt(session, prefilled)
        return prefilled.logits

    def _stored_prefix(self, session: Session, ids: Sequence[int]) -> Pieces[StoredPrefix | None]:
        """What the store has of a prompt in whole chunks, attached, and bound to be read; None if it has none."""
        yield from self._attach_longest(session, reusable(ids[:-1], self.transport.pack_tokens))
        if not session.packs:
            return None
        session.reused = session.stored
        reader = yield from self._reader(session, [pack.ref for pack in session.packs])

        def read(layer: int) -> Pieces[tuple[torch.Tensor, torch.Tensor]]:
            parts = []
            for pack in session.packs:
                parts.append((yield from reader.read(layer, pack.ref, pack.order)))
            keys, values = (torch.cat(each) for each in zip(*parts, strict=True))
            return keys, values

        return StoredPrefix(session.packs[-1].ref.pack_id, session.stored, read)

    def attach(self, ids: Sequence[int], growth: int = 0) -> tuple[Session, list[int]]:
        """Binds a slot to the longest stored prefix of `ids`, without copying. Returns the session and the ids it
        lacks, for steps to take: what they compute is as sparse as the policy. `growth`: as in `prefill`.

        At least one id is always left, because logits come from a step. What proves to be damaged is no part of the
        prefix: the next longest one is attached.
        """
        self._check_prompt(ids)
        return finish(self._attached(ids, growth))

    def _attached(self, ids: Sequence[int], growth: int) -> Pieces[tuple[Session, list[int]]]:
        for attempt in range(1, ATTEMPTS + 1):
            session = yield from self._open(growth)
            try:
                wanted = candidates(ids[:-1], self.transport.pack_tokens, self._provenance)
                yield from self._attach_longest(session, wanted)
                session.tokens = list(ids[: session.stored])
                yield from self._bind(session)
                yield from self._take_labels(session)
                break
            except BaseException as error:
                self.give_up(session, error)
                if attempt == ATTEMPTS or not prefix_changed(error):
                    raise
        return session, list(ids[session.stored :])

    def _take_labels(self, session: Session) -> Pieces[None]:
        """Those of the latest session that ended with the same packs, if they are kept, and what they select."""
        if self.config.labels == "off" or session.last_pack is None or not self.policy.compares_labels:
            return
        labels = yield from self._calls.call(self.labels.find, session.last_pack)
        if labels is not None:
            labels = labels.flatten(1, 2).to(self.device.torch_device)
            self.loop.relabel(session.slot, session.position, list(labels))

    def _attach_longest(self, session: Session, wanted: Sequence[PrefixCandidate]) -> Pieces[None]:
        """The longest chain of stored packs, attached, with their indexes; what has no good index is read back and
        indexed anew."""
        found = yield from self._calls.call(self._look_up, session.session_id, wanted)
        lacking = [ref for ref, pack in found.items() if pack is None]
        if lacking:
            fresh = []
            reader = yield from self._reader(session, list(found))
            for ref in lacking:
                order = yield from self._calls.call(self.client.get_map, ref)
                index = yield from reader.index(ref, order, self.retriever)
                fresh.append(IndexedPack(ref, order, index))
            yield from self._calls.call(self.client.unbind_slot, session.slot)
            yield from self._calls.call(self.catalogue.publish, fresh)
            found.update((pack.ref, pack) for pack in fresh)
        session.packs = [pack for pack in found.values() if pack is not None]

    def _look_up(self, session_id: str, wanted: Sequence[PrefixCandidate]) -> dict[PackRef, IndexedPack | None]:
        found = self.client.lookup_prefix(self.layout.fingerprint, wanted)
        if found:
            self.client.attach_packs(session_id, found)
        return {ref: self.catalogue.find(ref) for ref in found}

    def _reader(self, session: Session, refs: Sequence[PackRef]) -> Pieces[PackReader]:
        """Binds the session's slot for its packs to be read; the caller unbinds it, after an error `give_up` does."""
        offset = session.slot * self.slot_bytes
        geometry = self.policy.geometry(self.config.context, sum(ref.tokens for ref in refs))
        epoch = yield from self._calls.call(
            self.client.bind_slot, session.session_id, session.slot, refs, geometry.windows(offset)
        )
        return PackReader(self.transport, self.records, geometry, session.slot, epoch, offset)

    def compute_only(self, ids: Sequence[int]) -> torch.Tensor:
        """Computes a prompt and keeps nothing; float32 logits [vocab]."""
        self._check_prompt(ids)
        return Work(self._prefill.compute_only(ids), computing).finish()

    def step(self, sessions: Sequence[Session], tokens: Sequence[int]) -> torch.Tensor:
        """One token of each session; float32 logits [B, vocab]. First goes on with seals of tails that have grown long.

        Raises the first session's fault, if any of them has one: then no session has taken its token. ValueError for a
        closed session, and for one that stands twice.
        """
        _raise_first(self._go_on(sessions))
        logits, faults = self.loop.step([s.slot for s in sessions], tokens, [s.position for s in sessions])
        _raise_first(faults)
        for session, token in zip(sessions, tokens, strict=True):
            session.tokens.append(token)
        return logits

    def advance(
        self, sessions: Sequence[Session], tokens: Sequence[int], samplings: Sequence[Sampling]
    ) -> tuple[list[int | None], list[Exception | None]]:
        """One token of each session: the tokens that they go on with, chosen as each wants it, None where logits are
        not numbers; and their faults, which concern one session each. Who has none has taken its token."""
        faults = self._go_on(sessions)
        following: list[int | None] = [None] * len(sessions)
        ready = [i for i, fault in enumerate(faults) if fault is None]
        if ready:
            rows = [Row(sessions[i].slot, tokens[i], sessions[i].position, samplings[i]) for i in ready]
            for i, token, fault in zip(ready, *self.loop.advance(rows), strict=True):
                following[i], faults[i] = token, fault
        for session, token, fault in zip(sessions, tokens, faults, strict=True):
            if fault is None:
                session.tokens.append(token)
        return following, faults

    def _go_on(self, sessions: Sequence[Session]) -> list[Exception | None]:
        """With their seals, before a step. Returns the faults of those that cannot take another token."""
        if len(set(sessions)) != len(sessions):
            raise ValueError("a session stands twice in one step; it takes one token at a time")
        if not self._open_sessions.issuperset(sessions):
            raise ValueError("a session of this step is closed; open another one")
        faults = [self._unready(session) for session in sessions]
        return [fault or unsealed for fault, unsealed in zip(faults, self._sealer.advance(sessions), strict=True)]

    def _unready(self, session: Session) -> StoreError | None:
        if session.position < self.config.context:
            return None
        reason = f"a session has reached context={self.config.context} tokens: raise it"
        return StoreError("RESOURCE_EXHAUSTED", reason)

    def close_session(self, session: Session) -> None:
        """Keeps its labels, unbinds the slot and closes the session in the store. Packs stay stored.

        Idempotent; after an error `give_up` remains."""
        if session not in self._open_sessions:
            return
        if self.config.labels == "kept":
            self.labels.keep(session)
        self._sealer.give_up(session)
        self.policy.unbind(session.slot)
        self.client.close_session(session.session_id)
        self._release(session)

    def give_up(self, session: Session, error: BaseException) -> None:
        """Closes a session after `error`, which matters more than another one from the clean-up.

        A slot that the store may still write to is not used again before it has closed the session."""
        if session not in self._open_sessions:
            return
        self._sealer.give_up(session, error)
        self.policy.unbind(session.slot)
        if clean_up(error, self.client.close_session, session.session_id):
            self._release(session)
        else:
            self._open_sessions.discard(session)
            self._unclosed.append(session)

    def index_bytes(self, session: Session) -> int:
        """Of the session's packs: index and record -> token maps."""
        return sum(pack.nbytes for pack in session.packs)

    def close(self) -> None:
        self._resources.close()

    # --- binding ---

    @property
    def finished(self) -> bool:
        """Whether the daemon has ended this worker, or has missed a deadline: close it and make another."""
        return self.client.gone or self.transport.poisoned

    @property
    def free_slots(self) -> int:
        """How many more sessions can be opened."""
        return len(self._free_slots) + len(self._unclosed)

    def _open(self, growth: int) -> Pieces[Session]:
        yield from self._close_again()
        if not self._free_slots:
            raise StoreError(
                "RESOURCE_EXHAUSTED", f"all {self.config.slots} slots are bound: close a session or raise `slots`"
            )
        slot = self._free_slots.pop()
        try:
            session_id = yield from self._calls.call(
                self.client.open_session, self.layout, self.config.context,
                undo=lambda opened, error: clean_up(error, self.client.close_session, opened),
            )  # fmt: skip
        except BaseException:
            self._free_slots.append(slot)
            raise
        session = Session(session_id, slot, growth)
        self._open_sessions.add(session)
        return session

    def _close_again(self) -> Pieces[None]:
        while self._unclosed:
            session = self._unclosed.pop()
            try:
                yield from self._calls.call(self.client.close_session, session.session_id)
            except BaseException:
                self._unclosed.append(session)
                raise
            self._release(session)

    def _bind(self, session: Session) -> Pieces[None]:
        """Gives the slot its window and fetches what a session always holds: sinks, recent tokens, resident heads."""
        slot = session.slot
        expected = min(self.config.context, session.position + session.growth)
        session.geometry = self.policy.geometry(self.config.context, expected // HASH_BLOCK_TOKENS * HASH_BLOCK_TOKENS)
        self.policy.bind(slot, session.geometry, slot * self.slot_bytes, session.packs, session.position)
        refs = [pack.ref for pack in session.packs]
        session.epoch = yield from self._calls.call(
            self.client.bind_slot, session.session_id, slot, refs, self.policy.windows(slot)
        )
        self.policy.set_epoch(slot, session.epoch)
        yield from self.transport.run(self.policy.bind_tickets(slot, BULK_RUNS_MAX, BULK_PAIRS_MAX))
        window, first = self.transport.window, slot * self.slot_bytes
        window.take(first, session.geometry.window_bytes)
        widen(
            window.tensor[first : first + session.geometry.window_bytes], self.records, session.geometry,
            session.stored, self.policy.state.current_cover(slot),
        )  # fmt: skip

    def _continue_prompt(self, session: Session, prefilled: Prefilled) -> Pieces[None]:
        """Writes the prompt's tokens behind the last pack into the tail, and fetches what its last query selects."""
        for i, position in enumerate(range(session.stored, session.position)):
            rest = [(keys[i : i + 1], values[i : i + 1]) for keys, values in prefilled.rest]
            self.loop.remember(session.slot, position, rest)
            yield None
        yield from self.loop.seed(session.slot, session.position, prefilled.last_query)

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


def _raise_first(faults: Sequence[Exception | None]) -> None:
    for fault in faults:
        if fault is not None:
            raise fault


def _power_of_two(n: int) -> int:
    return 1 << max(1, (n - 1).bit_length())
