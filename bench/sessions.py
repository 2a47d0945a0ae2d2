"""What do concurrent sessions gain from sharing steps? Tokens per second of eight, against one alone in the same run.

The shipped model, prompts of random tokens, everything in DRAM. Only decode steps are timed, as the scheduler makes
them, sampling and text included.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.document import scratch
from bench.parts import count
from decode_worker.config import WorkerConfig
from decode_worker.demo.run import DEFAULT_MODEL
from decode_worker.engine.engine import Engine
from decode_worker.engine.session import Session
from decode_worker.figures import Figure, print_json, print_table
from decode_worker.scheduler import Request, Scheduler
from decode_worker.turns import Turns
from kvstore_service.client import parse_size
from kvstore_service.client.private import PrivateDaemon

SEED = 3
NEW_TOKENS = 4096  # of each session: the first makes steps while the last prompt is computed


@dataclass(frozen=True)
class Settings:
    """`sessions` at a time, each of them behind `prompt` tokens for `steps` steps."""

    sessions: int = 8
    prompt: int = 8192
    steps: int = 100
    repeats: int = 5
    threads: int = len(os.sched_getaffinity(0))
    dram_bytes: int = 1 << 30


def main() -> int:
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m bench.sessions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("sessions", "prompt", "steps", "repeats", "threads"):
        parser.add_argument(f"--{name}", type=count, default=getattr(default, name))
    parser.add_argument("--dram-bytes", type=parse_size, default=default.dram_bytes, help="the daemon's DRAM tier")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    figures = measure(Settings(a.sessions, a.prompt, a.steps, a.repeats, a.threads, a.dram_bytes))
    print_json(figures) if a.json else print_table("Sessions that share steps", figures)
    return 0


def measure(settings: Settings) -> list[Figure]:
    torch.set_num_threads(settings.threads)
    together, alone = [], []
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(scratch()))
        daemon = stack.enter_context(PrivateDaemon(directory / "data", settings.dram_bytes))
        config = WorkerConfig(
            model=DEFAULT_MODEL, socket=Path(daemon.socket), broker=Path(daemon.broker), wait_ms=20_000,
            context=settings.prompt + NEW_TOKENS, slots=settings.sessions, threads=settings.threads,
        )  # fmt: skip
        engine = stack.enter_context(contextlib.closing(Engine(config)))
        _tokens_per_s(engine, settings, settings.sessions)  # stores the prompts
        for _ in range(settings.repeats):
            together.append(_tokens_per_s(engine, settings, settings.sessions))
            alone.append(_tokens_per_s(engine, settings, 1))
    count = settings.sessions
    ratios = [a / b for a, b in zip(together, alone, strict=True)]
    return [
        Figure.of_runs(f"tokens_per_s.{count}", together, "tokens/s", "one session", alone),
        Figure.of_runs(f"sessions_speedup.{count}", ratios, "x one session"),
    ]


def _tokens_per_s(engine: Engine, settings: Settings, sessions: int) -> float:
    """Of all together, from the moment when the last of them has its prompt computed."""
    scheduler: Scheduler[Session] = Scheduler(engine, engine.tokenizer.stream, Turns())
    generator = torch.Generator().manual_seed(SEED)
    prompts = torch.randint(engine.model.config.vocab, (sessions, settings.prompt), generator=generator).tolist()
    made = [scheduler.submit(Request(prompt, NEW_TOKENS)) for prompt in prompts]
    while any(generation.session is None for generation in made):
        scheduler.advance()
    started = time.monotonic()
    for _ in range(settings.steps):
        scheduler.advance()
    seconds = time.monotonic() - started
    if any(generation.finish is not None for generation in made):
        raise RuntimeError("a session ended before the measurement did: give fewer --steps")
    for generation in made:
        scheduler.cancel(generation)
    return settings.steps * sessions / seconds


if __name__ == "__main__":
    sys.exit(main())
