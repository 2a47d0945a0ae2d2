"""A worker as others see it, in this process or behind a Ray actor: documents in, answers and figures out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from decode_worker import _native
from decode_worker.config import WorkerConfig
from decode_worker.engine.engine import Engine
from decode_worker.engine.footprint import Footprint, attended_share
from decode_worker.engine.session import Session
from decode_worker.failures import explained
from decode_worker.model.transformer import Transformer
from decode_worker.scheduler import Generation, Output, Request, Scheduler
from decode_worker.turns import Turns
from kvstore_service.client import AdminClient, StoreError

LOADED_WITH = ("model", "context", "compute", "kernels")  # settings that loaded weights depend on


@dataclass(frozen=True)
class PrefillReport:
    tokens: int
    stored_tokens: int
    seconds: float


@dataclass(frozen=True)
class Answer:
    """Token ids of one answer, and what its decode steps cost. Bytes and records are the daemon's counts during the
    steps; `bind_s` is what came before them, a prefill of the question included. `attended`: what an offloaded head
    attended to in the last step, as a share of the session's tokens."""

    tokens: list[int]
    steps: int
    decode_s: float
    bind_s: float
    records_moved: int
    attended: float
    nvme_read_bytes: int | None  # None for a user who may not administer the daemon
    proc_read_bytes: int | None  # the kernel's count; None where it may not be read


class Worker:
    """One engine at a time over a model that is loaded once. Thread-safe: one call computes at a time, but for the
    steps of `generate`, which take all its callers along."""

    def __init__(self, config: WorkerConfig) -> None:
        # A decode step's products are small: more threads than the kernels get only take cores from the daemon.
        torch.set_num_threads(config.threads)
        self._lock = Turns()  # of the engine
        self._closed = False
        self._join(config, None)
        self._admin: AdminClient | None = None
        self._may_administer = True
        self._footprint: Footprint | None = None
        self._progress = (0, 0)

    def ping(self) -> None:
        """Returns when the worker is ready."""

    def progress(self) -> tuple[int, int]:
        """(done, total) of the prefill under way; may be asked from another thread."""
        return self._progress

    def reconfigure(self, **changes: Any) -> None:
        """Replaces the engine by one with other settings (policy, retriever, budget, ...). The model stays loaded,
        unless it is another one or computes otherwise.

        With settings that cannot be had the worker goes on with those that it has."""
        with self._lock:
            self._require_ready()
            if self._scheduler.busy:
                raise ValueError("the worker is generating; other settings need an idle one")
            config, model = self._engine.config, self._engine.model
            changed = replace(config, **changes)
            loaded = all(getattr(changed, name) == getattr(config, name) for name in LOADED_WITH)
            self._engine.close()
            self._footprint = None
            try:
                self._join(changed, model if loaded else None)
            except Exception:
                self._join(config, model)
                raise

    def _join(self, config: WorkerConfig, model: Transformer | None) -> None:
        try:
            self._engine = Engine(config, model)
        except StoreError as error:
            raise explained(error, config, None) from error
        self._scheduler = Scheduler(self._engine, self._engine.tokenizer.stream, self._lock)

    def encode(self, text: str) -> list[int]:
        return self._engine.tokenizer.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._engine.tokenizer.decode(list(tokens))

    def prefill_document(self, ids: Sequence[int], progress: Callable[[int, int], None] | None = None) -> PrefillReport:
        """Computes and stores a document, in turns with `generate`; its session is closed again, the packs stay."""

        def show(done: int, total: int) -> None:
            self._progress = (done, total)
            if progress is not None:
                progress(done, total)

        scheduler, generation = self._submit(Request(ids, 1), show)
        with self._explaining():
            *_, last = scheduler.stream(generation)
        assert last.usage is not None, "the last output of a text says what it took"
        return PrefillReport(len(ids), last.usage.stored, last.usage.prefill_s)

    def prefill_speed(self, ids: Sequence[int], stored: bool) -> float:
        """Tokens/s of computing a prompt, with its packs written and committed or with nothing kept."""
        with self._using():
            started = time.monotonic()
            session = self._engine.prefill(ids)[0] if stored else self._engine.compute_only(ids)
            seconds = time.monotonic() - started
            if isinstance(session, Session):
                with self._closing(session):
                    pass
        return len(ids) / seconds

    def answer(
        self, document: Sequence[int], question: Sequence[int], new_tokens: int, decode_question: bool = False
    ) -> Answer:
        """Asks one question of a stored document in a fresh session: one decode step per answer token but the first.
        Holds the engine for its whole run, because what it counts must be its own; `generate` is what serves.

        The question is prefilled: exact attention over all of the document, computed behind what is stored of it.
        `decode_question`: in steps of its own instead, as sparse as the policy, behind every stored block."""
        prompt = [*document, *question]
        with self._using():
            began = time.monotonic()
            if decode_question:
                session, rest = self._engine.attach(prompt, new_tokens)
                logits = None
            else:
                (session, logits), rest = self._engine.prefill(prompt, growth=new_tokens), []
            bind_s = time.monotonic() - began
            return self._answer(session, rest, logits, new_tokens, bind_s)

    def _answer(
        self, session: Session, rest: Sequence[int], logits: torch.Tensor | None, new_tokens: int, bind_s: float
    ) -> Answer:
        with self._closing(session):
            before, moved, started = self._io(), self._engine.policy.counters.records_moved, time.monotonic()
            for token in rest:
                logits = self._engine.step([session], [token])[0]
            assert logits is not None, "an attached session lacks a token at least"
            tokens = list(self._greedy(session, logits, new_tokens))
            seconds = time.monotonic() - started
            after = self._io()
            attended = attended_share(self._engine, session)
            self._footprint = Footprint.of(self._engine, session)
        return Answer(
            tokens,
            len(rest) + new_tokens - 1,
            seconds,
            bind_s,
            self._engine.policy.counters.records_moved - moved,
            attended,
            *(b - a if a is not None and b is not None else None for a, b in zip(before, after, strict=True)),
        )

    def windows(self) -> tuple[str, dict[str, str]]:
        """By name: the window in use, and why those before it were not taken."""
        return self._engine.transport.window_name, self._engine.transport.windows_refused

    def counters(self) -> dict[str, float]:
        """The policy's counters since its engine was made (lookups, hits, ...)."""
        return self._engine.policy.counters.as_dict()

    def footprint(self) -> Footprint:
        """Of the last answered session."""
        if self._footprint is None:
            raise ValueError("no session has run with the present settings yet")
        return self._footprint

    def generate(self, request: Request, progress: Callable[[int, int], None] | None = None) -> Iterator[Output]:
        """Continues a prompt until `new_tokens`, one of its stops or an end-of-sequence token. Requests of several
        threads are decoded together, as many at a time as there are slots; closing the iterator cancels its own."""
        request = replace(request, stop_ids=request.stop_ids | self._engine.tokenizer.eos_ids)
        scheduler, generation = self._submit(request, progress)
        with self._explaining():
            yield from scheduler.stream(generation)

    def _submit(
        self, request: Request, progress: Callable[[int, int], None] | None
    ) -> tuple[Scheduler[Session], Generation[Session]]:
        with self._lock:  # an engine is replaced only while nothing is submitted to its scheduler
            self._require_ready()
            return self._scheduler, self._scheduler.submit(request, progress)

    def cancel(self, key: str) -> None:
        """Ends the generation whose request has this key; nothing if there is none."""
        self._scheduler.cancel_key(key)

    def close(self) -> None:
        """Generations under way end with an error that says so. Idempotent.

        A prompt's `progress` may call it: the engine is closed behind that piece, once the prompt has given back what
        it held."""
        with self._lock:
            self._closed = True
            self._scheduler.end(ValueError("the worker was closed while it was generating"))
            self._lock.leave(self._close_engine)

    def _require_ready(self) -> None:
        """Joins the daemon anew if the engine is finished, once what ran on it has ended."""
        if self._closed:
            raise ValueError("the worker is closed; make another one")
        if self._engine.finished and not self._scheduler.busy:
            self._close_engine()
            self._join(self._engine.config, self._engine.model)

    def _close_engine(self) -> None:
        self._engine.close()
        if self._admin is not None:
            self._admin.close()
            self._admin = None

    @contextlib.contextmanager
    def _closing(self, session: Session) -> Iterator[None]:
        """Closes the session; an error under way matters more than one of the closing."""
        try:
            yield
            self._engine.close_session(session)
        except BaseException as error:
            self._engine.give_up(session, error)
            raise

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        """The engine, for one thread alone."""
        with self._lock:
            self._require_ready()
            with self._explaining():
                yield

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Failures in words for whoever waits for the answer."""
        engine = self._engine
        try:
            yield
        except (StoreError, _native.RingError) as error:
            raise explained(error, engine.config, engine.client) from error

    def _greedy(self, session: Session, logits: torch.Tensor, new_tokens: int) -> Iterator[int]:
        """From float32 logits [vocab] on."""
        for produced in range(new_tokens):
            token = int(logits.argmax())
            yield token
            if produced + 1 < new_tokens:
                logits = self._engine.step([session], [token])[0]

    def _io(self) -> tuple[int | None, int | None]:
        """(the daemon's own count, the kernel's count) of bytes that the daemon has read from storage.

        None where this user may not know: decoding needs no administrator's rights."""
        if not self._may_administer:
            return None, None
        config = self._engine.config
        self._admin = self._admin or AdminClient.connect(str(config.socket), str(config.broker), config.answer_s)
        try:
            status = self._admin.get_status()
        except StoreError as error:
            if error.code != "PERMISSION_DENIED":
                raise
            self._may_administer = False
            return None, None
        return status.counters["nvme_read_bytes"], _proc_read_bytes(status.pid)


def _proc_read_bytes(pid: int) -> int | None:
    """None where the daemon runs as another user, whose counters the kernel does not show."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except PermissionError:
        return None
    return next(int(line.partition(":")[2]) for line in lines if line.startswith("read_bytes"))
