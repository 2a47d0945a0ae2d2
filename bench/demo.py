"""How fast does the demo answer its questions, against the store as it was? 32K tokens, a quarter of the KV in DRAM.

`demo_tokens_per_s.STORE`, of rounds of ten questions that all stores answer in turn:

    now    what is the default of daemon and worker
    clock  the clock keeps DRAM, nothing between wanted blocks is read, DRAM is warmed by hints: the defaults of before
    token  the clock and hints, and records in the order of tokens; gaps are read through, as now
    dram   now's, with all of the KV in DRAM: what no tier can better

`demo_speedup` is now / token, `demo_speedup.clock` now / clock, `demo_speedup.dram` now / dram: medians of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.document import scratch
from bench.parts import count
from bench.questions import open_questions
from decode_worker.figures import Figure, print_json, print_table

NOW = "now"
SPEEDUPS = {"token": "demo_speedup", "clock": "demo_speedup.clock", "dram": "demo_speedup.dram"}


@dataclass(frozen=True)
class Store:
    """Flags of the daemon and settings of the worker, beside the defaults."""

    options: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    dram: float | None = None  # part of the KV, where it is not as much as all others have


STORES = {
    NOW: Store(),
    "clock": Store(("--tier-policy=clock", "--disk-cost=off"), {"importance": "hint"}),
    "token": Store(("--tier-policy=clock",), {"importance": "hint", "order": "token"}),
    "dram": Store(dram=1.5),
}


@dataclass(frozen=True)
class Settings:
    tokens: int = 32 << 10
    questions: int = 100
    of_a_round: int = 10
    dram: float = 0.25


def main() -> int:
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m bench.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=count, default=default.tokens)
    parser.add_argument("--questions", type=count, default=default.questions)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    figures = measure(Settings(a.tokens, a.questions))
    print_json(figures) if a.json else print_table("The demo's questions", figures)
    return 0


def measure(settings: Settings) -> list[Figure]:
    rates: dict[str, list[float]] = {name: [] for name in STORES}
    with scratch() as directory, contextlib.ExitStack() as stack:
        asked = {
            name: stack.enter_context(
                open_questions(
                    Path(directory) / name, settings.tokens, settings.questions, store.dram or settings.dram,
                    store.options, **store.settings,
                )
            )
            for name, store in STORES.items()
        }  # fmt: skip
        for first in range(0, settings.questions, settings.of_a_round):
            for name, questions in asked.items():
                taken = questions.ask(questions.facts[first : first + settings.of_a_round])
                rates[name].append(taken["steps"] * 1e9 / taken["ns"])
    ratios = {name: [a / b for a, b in zip(rates[NOW], rates[name], strict=True)] for name in SPEEDUPS}
    return [
        *(Figure.of_runs(SPEEDUPS[name], of, "x") for name, of in ratios.items()),
        *(Figure.of_runs(f"demo_tokens_per_s.{name}", of, "tokens/s") for name, of in rates.items()),
    ]


if __name__ == "__main__":
    sys.exit(main())
