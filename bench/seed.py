"""What does a session find in DRAM right after its prefill? By the worker's `importance`; DRAM has part of the KV.

The shipped model is given its own documentation and a question; then it answers, in a fresh daemon each time.
`read_bytes.IMPORTANCE`: what the daemon read from the disk until the first steps were over, warm-up and bind included;
`hit_share.IMPORTANCE`, of the extents that were wanted until then; `first_step_ms.IMPORTANCE`;
`seeded_bytes.IMPORTANCE`: what the daemon kept as it was written. The rival, in the same run, is `none`: DRAM begins
empty. With `hint` what stands first in segments is read back.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.decoder import SEED, WAIT_MS
from bench.document import scratch
from bench.parts import count
from bench.questions import demo_kv_bytes
from decode_worker.config import WorkerConfig
from decode_worker.demo.document import load_words
from decode_worker.demo.run import DEFAULT_MODEL
from decode_worker.demo.texts import own_document
from decode_worker.engine.engine import Engine
from decode_worker.figures import Figure, print_json, print_table
from decode_worker.importance import IMPORTANCES
from kvstore_service.client import AdminClient
from kvstore_service.client.private import PrivateDaemon

RIVAL = "none"
UNITS = {"read_bytes": "B", "seeded_bytes": "B", "hit_share": "of wanted extents", "first_step_ms": "ms"}


@dataclass(frozen=True)
class Settings:
    """`dram`: part of the prompt's KV; `steps`: of a session that count."""

    tokens: int = 8 << 10
    dram: float = 0.25
    steps: int = 8
    repeats: int = 3
    budget: float = 0.1


def main() -> int:
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m bench.seed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=count, default=default.tokens)
    parser.add_argument("--dram", type=float, default=default.dram, help="part of the prompt's KV that fits DRAM")
    parser.add_argument("--steps", type=count, default=default.steps)
    parser.add_argument("--repeats", type=count, default=default.repeats)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    figures = measure(Settings(a.tokens, a.dram, a.steps, a.repeats))
    print_json(figures) if a.json else print_table("A session right after its prefill", figures)
    return 0


def measure(settings: Settings) -> list[Figure]:
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for repeat in range(settings.repeats):
        for importance in IMPORTANCES.names:
            with scratch() as directory:
                for name, value in _session(settings, Path(directory), importance, SEED + repeat):
                    found[name, importance].append(value)
    figures = []
    for (name, importance), values in found.items():
        rival = found[name, RIVAL] if importance != RIVAL and all(found[name, RIVAL]) else None
        figures.append(Figure.of_runs(f"{name}.{importance}", values, UNITS[name], rival and RIVAL, rival))
    return figures


def _session(settings: Settings, directory: Path, importance: str, seed: int) -> Iterator[tuple[str, float]]:
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(PrivateDaemon(directory, int(settings.dram * demo_kv_bytes(settings.tokens))))
        admin = stack.enter_context(AdminClient.connect(daemon.socket, daemon.broker))
        config = WorkerConfig(
            DEFAULT_MODEL, Path(daemon.socket), Path(daemon.broker), context=2 * settings.tokens, wait_ms=WAIT_MS,
            budget=settings.budget, layer0="offloaded", importance=importance,
        )  # fmt: skip
        engine = stack.enter_context(contextlib.closing(Engine(config)))
        document = own_document(load_words(config.model), settings.tokens, 1, seed)
        ids = engine.tokenizer.encode(document.text + " " + document.facts[0].question)
        empty = dict(admin.get_status().counters)
        session, logits = engine.prefill(ids)
        ms = []
        for _ in range(settings.steps):
            token, started = int(logits.argmax()), time.monotonic()
            logits = engine.step([session], [token])[0]
            ms.append(1000 * (time.monotonic() - started))
        after = admin.get_status().counters
        hits, misses, read = (after[key] - empty[key] for key in ("extent_hits", "extent_misses", "nvme_read_bytes"))
        engine.close_session(session)
    yield "read_bytes", read
    yield "seeded_bytes", after["seed_bytes"]
    yield "hit_share", hits / (hits + misses)
    yield "first_step_ms", ms[0]


if __name__ == "__main__":
    sys.exit(main())
