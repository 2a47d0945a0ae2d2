"""Accesses of real runs: a daemon that holds a document in DRAM is traced while an engine decodes behind it."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.decoder import SEED, WAIT_MS, Document
from decode_worker.config import WorkerConfig
from decode_worker.demo.document import Fact, load_words
from decode_worker.demo.run import DEFAULT_MODEL
from decode_worker.demo.texts import own_document
from decode_worker.synthetic.checkpoint import Shape, random_checkpoint
from decode_worker.worker import Worker
from kvstore_service.client import AdminClient
from kvstore_service.client.private import PrivateDaemon
from kvstore_service.shared.accesses import joined

FOREVER_S = 3600.0
START_S = 30.0
DEMO_DRAM = "512MiB"
EXTENT_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Trace:
    """`accesses`: records of the fields that the daemon names. `extents`: of the whole document."""

    name: str
    accesses: NDArray[np.void]
    extents: int

    @property
    def keys(self) -> NDArray[np.uint64]:
        """Which extent each access is of."""
        pack, extent = self.accesses["pack"], self.accesses["extent"].astype(np.uint64)
        return pack + extent * EXTENT_MIX


class Listener:
    """Traces a daemon in a thread of its own, until it is closed. RuntimeError if anything was dropped."""

    def __init__(self, daemon: PrivateDaemon) -> None:
        self._admin = AdminClient.connect(daemon.socket, daemon.broker)
        self._on, self._done = threading.Event(), threading.Event()
        self._parts: list[bytes] = []
        self._dropped, self._complete = 0, False
        self._thread = threading.Thread(target=self._listen)

    def __enter__(self) -> Listener:
        self._thread.start()
        if not self._on.wait(START_S):
            self.__exit__()
            raise RuntimeError("the daemon did not begin to trace")
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._admin.close()

    def _listen(self) -> None:
        with contextlib.closing(self._admin.trace(FOREVER_S)) as answers:  # type: ignore[type-var]
            fields = json.loads(next(answers).fields)
            self._fields = np.dtype([tuple(field) for field in fields])
            self._on.set()
            ending = 0
            for answer in answers:
                self._parts.append(answer.accesses)
                self._dropped = answer.dropped
                ending += self._done.is_set()
                if ending == 2:  # the turn that was under way, and one after it
                    self._complete = True
                    return

    def accesses(self) -> NDArray[np.void]:
        """After it was closed."""
        if self._dropped:
            raise RuntimeError(f"{self._dropped} accesses were dropped; trace a slower run")
        if not self._complete:
            raise RuntimeError("the daemon ended the trace before the run was over; trace a shorter one")
        return joined(np.frombuffer(b"".join(self._parts), self._fields))


def demo(
    directory: Path,
    tokens: int,
    questions: int,
    budget: float,
    order: str = "pack",
    options: Sequence[str] = (),
    every: int = 1,
    learn: bool = False,
) -> Trace:
    """The shipped model answers questions on its own documentation, each in a fresh session, as `headgate demo`; one in
    `every` is traced. options: further ones of the daemon. learn: the others are answered before, and the packs
    rewritten in the order that is learnt from them; RuntimeError if none is."""
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(PrivateDaemon(directory / "demo", DEMO_DRAM, options=options))
        config = WorkerConfig(
            DEFAULT_MODEL,
            Path(daemon.socket),
            Path(daemon.broker),
            context=2 * tokens,
            budget=budget,
            wait_ms=WAIT_MS,
            order=order,
        )
        worker = stack.enter_context(contextlib.closing(Worker(config)))
        document = own_document(load_words(config.model), tokens, questions, SEED)
        ids = worker.encode(document.text)
        worker.prefill_document(ids)

        def answer(facts: Sequence[Fact]) -> None:
            for fact in facts:
                new_tokens = len(worker.encode(fact.answer))
                worker.answer(ids, worker.encode(fact.question), new_tokens, decode_question=True)

        traced = document.facts[::every]
        if learn:
            answer([fact for fact in document.facts if fact not in traced])
            retier(daemon)
        with Listener(daemon) as listener:
            answer(traced)
        return Trace("demo", listener.accesses(), _extents(daemon))


def retier(daemon: PrivateDaemon) -> None:
    """Rewrites the packs in the order that is learnt from what runs wanted. RuntimeError if none is rewritten."""
    with contextlib.closing(AdminClient.connect(daemon.socket, daemon.broker)) as admin:
        answers = list(admin.retier())
        if all(answer.code for answer in answers):
            raise RuntimeError(f"no pack was rewritten: {answers[0].message}; ask more questions")


def synthetic(directory: Path, name: str, shape: Shape, tokens: int, steps: int, fresh: float, budget: float) -> Trace:
    """A random model decodes behind random keys; `fresh` of its tokens are new, the others are fed once more."""
    checkpoint = random_checkpoint(directory / f"{name}-model", shape, SEED)
    settings: dict[str, Any] = {"budget": budget, "layer0": "offloaded"}
    with Document(checkpoint, directory / name, tokens, **settings) as document:
        with contextlib.closing(document.decoder("qsac")) as decoder:
            decoder.fresh = fresh
            with Listener(document.daemon) as listener:
                decoder.run(steps)
        return Trace(name, listener.accesses(), _extents(document.daemon))


def _extents(daemon: PrivateDaemon) -> int:
    """That the stored packs have."""
    with contextlib.closing(AdminClient.connect(daemon.socket, daemon.broker)) as admin:
        status = admin.get_status()
        return status.pack_bytes // status.counters["frame_bytes"]
