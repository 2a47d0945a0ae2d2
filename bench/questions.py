"""The demo's questions as a benchmark asks them: how daemon and worker are set is the caller's."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.decoder import SEED, WAIT_MS
from bench.document import counters
from decode_worker.config import WorkerConfig
from decode_worker.demo.document import Fact, load_words
from decode_worker.demo.run import DEFAULT_MODEL
from decode_worker.demo.texts import own_document
from decode_worker.engine.engine import Engine
from decode_worker.model.checkpoint import Checkpoint
from decode_worker.records import RecordFormat
from kvstore_service.client.private import PrivateDaemon


class Questions:
    """The shipped model answers questions on its own documentation, each in a fresh session, and is given the right
    answers: all runs decode the same. Not thread-safe; `open_questions` makes one."""

    def __init__(self, daemon: PrivateDaemon, engine: Engine, tokens: int, count: int) -> None:
        self.daemon, self._engine = daemon, engine
        self.record_bytes = engine.records.record_bytes
        document = own_document(load_words(engine.config.model), tokens, count, SEED)
        self.facts = document.facts
        self._ids = engine.tokenizer.encode(document.text)
        engine.close_session(engine.prefill(self._ids)[0])

    def ask(self, facts: Sequence[Fact]) -> Counter[str]:
        """What the decode steps took, those of the question's own tokens too."""
        engine, encode, taken = self._engine, self._engine.tokenizer.encode, Counter[str]()
        for fact in facts:
            answer = encode(fact.answer)
            session, rest = engine.attach([*self._ids, *encode(fact.question)], len(answer))
            tokens = [*rest, *answer[:-1]]
            with counted(self.daemon, engine, len(tokens)) as steps:
                for token in tokens:
                    engine.step([session], [token])
            taken += steps
            engine.close_session(session)
        return taken


@contextlib.contextmanager
def open_questions(
    directory: Path, tokens: int, count: int, dram: float, options: Sequence[str] = (), **settings: Any
) -> Iterator[Questions]:
    """`count` questions on `tokens` tokens, stored in a private daemon with that part of their KV in DRAM."""
    with PrivateDaemon(directory, int(dram * demo_kv_bytes(tokens)), options=options) as daemon:
        config = WorkerConfig(
            DEFAULT_MODEL, Path(daemon.socket), Path(daemon.broker), context=2 * tokens, wait_ms=WAIT_MS, **settings
        )
        with contextlib.closing(Engine(config)) as engine:
            yield Questions(daemon, engine, tokens, count)


@contextlib.contextmanager
def counted(daemon: PrivateDaemon, engine: Engine, steps: int) -> Iterator[Counter[str]]:
    """What so many decode steps took: the daemon's counts, the records that moved, nanoseconds, those of each phase."""

    def now() -> Counter[str]:
        moved = {"records_moved": engine.policy.counters.records_moved}
        return Counter(counters(daemon) | engine.loop.spent_ns | moved)

    before, taken, started = now(), Counter[str](), time.monotonic_ns()
    yield taken
    taken.update(ns=time.monotonic_ns() - started, steps=steps)
    taken.update(now() - before)


def demo_kv_bytes(tokens: int) -> int:
    """Bytes of so many tokens' K and V of the shipped model."""
    shape = Checkpoint.open(DEFAULT_MODEL).config
    record_bytes = RecordFormat(shape.kv_heads, shape.head_dim, "bfloat16").record_bytes
    return tokens * shape.layers * shape.kv_heads * record_bytes
