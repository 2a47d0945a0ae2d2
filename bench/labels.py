"""What do kept labels save a session that attaches to stored packs, and what do they cost? In turns, in one daemon.

The shipped model's own documentation is stored. A session asks a question of it and ends; then the next one attaches.
`again`: it asks the same. `on`: it goes on with the conversation, and asks something else. The rival is `off`.
`attach_ms.LABELS.CASE`; `first_step_ms.…`, and its ratio to the median of the steps behind it, `first_step_ratio.…`;
`first_token_ms.…`: of the attach and all steps of what no pack holds; `first_step_records.…`: what the first one moved;
`hit_ratio.…` of the steps; `end_ms.LABELS`: of the end of a session.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.decoder import SEED, WAIT_MS
from bench.document import scratch
from bench.parts import count
from decode_worker.config import WorkerConfig
from decode_worker.demo.document import load_words
from decode_worker.demo.run import DEFAULT_MODEL
from decode_worker.demo.texts import own_document
from decode_worker.engine.engine import Engine
from decode_worker.figures import Figure, print_json, print_table
from decode_worker.model.checkpoint import Checkpoint
from decode_worker.records import RecordFormat
from kvstore_service.client.private import PrivateDaemon

LABELS = ("kept", "off")
RIVAL = "off"
UNITS = {"first_step_ratio": "x a step", "first_step_records": "records", "hit_ratio": "of lookups"}


@dataclass(frozen=True)
class Settings:
    """`dram`: part of the document's KV; `answer`: tokens of each answer."""

    tokens: int = 8 << 10
    dram: float = 1.25
    answer: int = 8
    repeats: int = 8
    budget: float = 0.1


def main() -> int:
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m bench.labels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=count, default=default.tokens)
    parser.add_argument("--dram", type=float, default=default.dram, help="part of the document's KV that fits DRAM")
    parser.add_argument("--repeats", type=count, default=default.repeats, help="questions")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    figures = measure(Settings(a.tokens, a.dram, repeats=a.repeats))
    print_json(figures) if a.json else print_table("Labels that survive a session", figures)
    return 0


def measure(settings: Settings) -> list[Figure]:
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    shape = Checkpoint.open(DEFAULT_MODEL).config
    record_bytes = RecordFormat(shape.kv_heads, shape.head_dim, "bfloat16").record_bytes
    kv_bytes = settings.tokens * shape.layers * shape.kv_heads * record_bytes
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(scratch()))
        daemon = stack.enter_context(PrivateDaemon(directory, int(settings.dram * kv_bytes)))
        engines = {
            labels: stack.enter_context(contextlib.closing(Engine(_config(settings, daemon, labels))))
            for labels in LABELS
        }
        words = load_words(DEFAULT_MODEL)
        document = own_document(words, settings.tokens, settings.repeats + 1, SEED)
        encode = engines[RIVAL].tokenizer.encode
        ids = encode(document.text)
        engines[RIVAL].close_session(engines[RIVAL].prefill(ids)[0])
        questions = [encode(fact.question) for fact in document.facts]
        for repeat in range(settings.repeats):
            for labels in LABELS if repeat % 2 else LABELS[::-1]:
                asked = ids + questions[repeat]
                for name, value in _sessions(settings, engines[labels], asked, questions[repeat + 1]):
                    found[name, labels].append(value)
    figures = []
    for (name, labels), values in found.items():
        rival = found[name, RIVAL] if labels != RIVAL and all(found[name, RIVAL]) else None
        what, _, case = name.partition(".")
        shown = ".".join(filter(None, (what, labels, case)))
        figures.append(Figure.of_runs(shown, values, UNITS.get(what, "ms"), rival and RIVAL, rival))
    return figures


def _config(settings: Settings, daemon: PrivateDaemon, labels: str) -> WorkerConfig:
    return WorkerConfig(
        DEFAULT_MODEL, Path(daemon.socket), Path(daemon.broker), context=2 * settings.tokens, wait_ms=WAIT_MS,
        budget=settings.budget, layer0="offloaded", labels=labels,
    )  # fmt: skip


def _sessions(
    settings: Settings, engine: Engine, asked: list[int], next_question: list[int]
) -> Iterator[tuple[str, float]]:
    """One whose labels are left, and those that come behind it."""
    conversation, _ = _session(settings, engine, asked)
    for case, ids in (("again", asked), ("on", conversation + next_question)):
        _, figures = _session(settings, engine, ids)
        for name, value in figures.items():
            yield (name if name == "end_ms" else f"{name}.{case}"), value


def _session(settings: Settings, engine: Engine, ids: list[int]) -> tuple[list[int], dict[str, float]]:
    """(its tokens, figures) of one that attaches, takes the rest of `ids` and answers."""
    began = time.monotonic()
    session, rest = engine.attach(ids, growth=settings.answer)
    attached = time.monotonic()
    before = engine.policy.counters
    ends, records, token = [attached], 0, rest[0]
    for number in range(1, len(rest) + settings.answer + 1):
        logits = engine.step([session], [token])[0]
        ends.append(time.monotonic())
        if number == 1:
            records = engine.policy.counters.records_moved - before.records_moved
        token = rest[number] if number < len(rest) else int(logits.argmax())
    after, tokens = engine.policy.counters, list(session.tokens)
    began_end = time.monotonic()
    engine.close_session(session)
    ended = time.monotonic()
    steps = [1000 * (end - start) for start, end in itertools.pairwise(ends)]
    return tokens, {
        "attach_ms": 1000 * (attached - began),
        "first_step_ms": steps[0],
        "first_step_ratio": steps[0] / statistics.median(steps[1:]),
        "first_token_ms": 1000 * (ends[len(rest)] - began),
        "first_step_records": records,
        "hit_ratio": (after.hits - before.hits) / (after.lookups - before.lookups),
        "end_ms": 1000 * (ended - began_end),
    }


if __name__ == "__main__":
    sys.exit(main())
