"""A worker as others see it, in this process or behind a Ray actor: documents in, answers and figures out."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from decode_worker import _native
from decode_worker.config import WorkerConfig
from decode_worker.engine.engine import Engine
from decode_worker.engine.session import Session
from decode_worker.failures import explained
from decode_worker.model.sampling import Sampler, Sampling
from decode_worker.model.tokenizer import TextStream
from decode_worker.model.transformer import Transformer
from kvstore_service.client import AdminClient, StoreError

PREFILL_THREADS = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class PrefillReport:
    tokens: int
    stored_tokens: int
    seconds: float


@dataclass(frozen=True)
class Answer:
    """Token ids of one answer, and what its decode steps cost. Bytes and records are the daemon's counts during the
    steps."""

    tokens: list[int]
    steps: int
    decode_s: float
    bind_s: float
    records_moved: int
    nvme_read_bytes: int | None  # None for a user who may not administer the daemon
    proc_read_bytes: int | None  # the kernel's count; None where it may not be read


@dataclass(frozen=True)
class Footprint:
    """Bytes of one session of the present policy, as defined in docs/architecture.md (Figures)."""

    device_bytes: int
    resident_bytes: int
    offloaded_bytes: int
    index_bytes: int


class Worker:
    """One engine at a time over a model that is loaded once. Not thread-safe."""

    def __init__(self, config: WorkerConfig) -> None:
        # A decode step's products are small: more threads than the kernels get only take cores from the daemon.
        torch.set_num_threads(config.threads)
        self._engine = _joined(config, None)
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
        """Replaces the engine by one with other settings (policy, retriever, budget, ...); the model stays loaded."""
        config, model = self._engine.config, self._engine.model
        self._engine.close()
        self._footprint = None
        self._engine = _joined(replace(config, **changes), model)

    def text_stream(self) -> TextStream:
        """Turns generated token ids into text as they come."""
        return self._engine.tokenizer.stream()

    def encode(self, text: str) -> list[int]:
        return self._engine.tokenizer.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._engine.tokenizer.decode(list(tokens))

    def prefill_document(self, ids: Sequence[int], progress: Callable[[int, int], None] | None = None) -> PrefillReport:
        """Computes and stores a document; its session is closed again, the packs stay."""

        def show(done: int, total: int) -> None:
            self._progress = (done, total)
            if progress is not None:
                progress(done, total)

        started = time.monotonic()
        with self._explaining():
            with _torch_threads(PREFILL_THREADS):
                session, _ = self._engine.prefill(ids, show)
            seconds = time.monotonic() - started
            stored = session.stored
            self._engine.close_session(session)
        return PrefillReport(len(ids), stored, seconds)

    def prefill_speed(self, ids: Sequence[int], stored: bool) -> float:
        """Tokens/s of computing a prompt, with its packs written and committed or with nothing kept."""
        started = time.monotonic()
        with self._explaining():
            with _torch_threads(PREFILL_THREADS):
                session = self._engine.prefill(ids)[0] if stored else self._engine.compute_only(ids)
            seconds = time.monotonic() - started
            if isinstance(session, Session):
                self._engine.close_session(session)
        return len(ids) / seconds

    def answer(self, document: Sequence[int], question: Sequence[int], new_tokens: int) -> Answer:
        """Asks one question of a stored document in a fresh session: one decode step per question and answer token."""
        began = time.monotonic()
        with self._explaining():
            session, rest = self._engine.attach([*document, *question])
        bind_s = time.monotonic() - began
        with self._explaining(), self._closing(session):
            before, moved, started = self._io(), self._engine.policy.counters.records_moved, time.monotonic()
            tokens = list(self._greedy(session, rest, new_tokens))
            seconds = time.monotonic() - started
            after = self._io()
            self._footprint = self._footprint_of(session)
        return Answer(
            tokens,
            len(rest) + new_tokens - 1,
            seconds,
            bind_s,
            self._engine.policy.counters.records_moved - moved,
            *(b - a if a is not None and b is not None else None for a, b in zip(before, after, strict=True)),
        )

    def counters(self) -> dict[str, float]:
        """The policy's counters since its engine was made (lookups, hits, ...)."""
        return self._engine.policy.counters.as_dict()

    def footprint(self) -> Footprint:
        """Of the last answered session."""
        if self._footprint is None:
            raise ValueError("no session has run with the present settings yet")
        return self._footprint

    def generate(
        self,
        ids: Sequence[int],
        new_tokens: int,
        sampling: Sampling,
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[int]:
        """Prefills a prompt and yields its continuation until `new_tokens` or an end-of-sequence token."""
        with self._explaining(), _torch_threads(PREFILL_THREADS):
            session, logits = self._engine.prefill(ids, progress, growth=new_tokens)
        sampler = Sampler([sampling])
        with self._explaining(), self._closing(session):
            for produced in range(new_tokens):
                token = int(sampler.next(logits[None])[0])
                if token in self._engine.tokenizer.eos_ids:
                    return
                yield token
                if produced + 1 < new_tokens:
                    logits = self._engine.step([session], [token])[0]

    def close(self) -> None:
        self._engine.close()
        if self._admin is not None:
            self._admin.close()

    @contextlib.contextmanager
    def _closing(self, session: Session) -> Iterator[None]:
        """Closes the session; an error under way matters more than one of the closing."""
        try:
            yield
        except BaseException as error:
            self._engine.give_up(session, error)
            raise
        self._engine.close_session(session)

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Failures in words for whoever waits for the answer."""
        try:
            yield
        except (StoreError, _native.RingError) as error:
            raise explained(error, self._engine.config, self._engine.client) from error

    def _footprint_of(self, session: Session) -> Footprint:
        geometry = session.geometry
        return Footprint(
            geometry.device_bytes,
            geometry.resident_bytes,
            geometry.offloaded_bytes(session.stored),
            self._engine.index_bytes(session),
        )

    def _greedy(self, session: Session, prompt: Sequence[int], new_tokens: int) -> Iterator[int]:
        for token in prompt:
            logits = self._engine.step([session], [token])
        for produced in range(new_tokens):
            token = int(logits[0].argmax())
            yield token
            if produced + 1 < new_tokens:
                logits = self._engine.step([session], [token])

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


def _joined(config: WorkerConfig, model: Transformer | None) -> Engine:
    try:
        return Engine(config, model)
    except StoreError as error:
        raise explained(error, config, None) from error


@contextlib.contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _proc_read_bytes(pid: int) -> int | None:
    """None where the daemon runs as another user, whose counters the kernel does not show."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except PermissionError:
        return None
    return next(int(line.partition(":")[2]) for line in lines if line.startswith("read_bytes"))
