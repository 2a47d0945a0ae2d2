"""How soon does a prompt answer that shares nine tenths with one stored before?

Seconds until the logits of its last token are there and the session can step: shared chunks are read from the store,
the rest is computed behind them. The rival, in the same run, computes all of it and stores nothing. Random tokens, as
many prompts as repeats; the DRAM tier holds a quarter of one prompt's KV, so most of it comes from the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.document import scratch
from bench.parts import count
from decode_worker.config import WorkerConfig
from decode_worker.demo.run import DEFAULT_MODEL
from decode_worker.engine.engine import Engine
from decode_worker.figures import Figure, print_json, print_table
from decode_worker.model.checkpoint import Checkpoint
from decode_worker.records import STORAGE_DTYPES, RecordFormat
from decode_worker.synthetic.checkpoint import B8, random_checkpoint
from kvstore_service.client.private import PrivateDaemon

SHARED = 0.9
DRAM_SHARE = 4
DRAM_BYTES_MIN = 4 << 20
ROOM_TOKENS = 256
SEED = 9


@dataclass(frozen=True)
class Settings:
    """`shipped`: the repository's model; else random weights of `shape`."""

    contexts: tuple[int, ...] = (8192, 32768)
    repeats: int = 3
    shipped: bool = False
    compute: str = "float32"
    shape: Mapping[str, float] = field(default_factory=lambda: B8)


def main() -> int:
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m bench.restore", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", default=",".join(map(str, default.contexts)), help="tokens of a prompt")
    parser.add_argument("--repeats", type=count, default=default.repeats)
    parser.add_argument("--shipped", action="store_true", help="the shipped model, not random weights of shape B8")
    parser.add_argument("--compute", default=default.compute, choices=tuple(STORAGE_DTYPES))
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    contexts = tuple(int(part) for part in a.contexts.split(","))
    figures = measure(Settings(contexts, a.repeats, a.shipped, a.compute))
    print_json(figures) if a.json else print_table("A prompt of which 90 % is stored", figures)
    return 0


def measure(settings: Settings) -> list[Figure]:
    figures = []
    with scratch() as directory:
        model = DEFAULT_MODEL if settings.shipped else random_checkpoint(Path(directory) / "m", settings.shape, SEED)
        for context in settings.contexts:
            figures += _measure_context(settings, model, Path(directory) / str(context), context)
    return figures


def _measure_context(settings: Settings, model: Path, data_dir: Path, context: int) -> list[Figure]:
    shape = Checkpoint.open(model).config
    record_bytes = RecordFormat(shape.kv_heads, shape.head_dim, "bfloat16").record_bytes
    dram_bytes = max(DRAM_BYTES_MIN, context * shape.layers * shape.kv_heads * record_bytes // DRAM_SHARE)
    generator = torch.Generator().manual_seed(SEED)
    stored, anew, reused = [], [], 0
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(PrivateDaemon(data_dir, dram_bytes))
        config = WorkerConfig(
            model=model, socket=Path(daemon.socket), broker=Path(daemon.broker), context=context + ROOM_TOKENS,
            compute=settings.compute, wait_ms=20_000,
        )  # fmt: skip
        engine = stack.enter_context(contextlib.closing(Engine(config)))
        for _ in range(settings.repeats):
            first, fresh = torch.randint(shape.vocab, (2, context), generator=generator).tolist()
            shared = int(SHARED * context)
            second = [*first[:shared], *fresh[shared:]]
            engine.close_session(engine.prefill(first)[0])
            anew.append(_computed(engine, second))
            reused, seconds = _prefilled(engine, second)
            stored.append(seconds)
    suffix = f"{context // 1024}k" if context >= 1024 else str(context)
    rival = "computed anew"
    ratios = [a / b for a, b in zip(stored, anew, strict=True)]
    return [
        Figure.of_runs(f"ttft_s.{suffix}", stored, "s", rival, anew),
        Figure.of_runs(f"ttft_ratio.{suffix}", ratios, f"stored / {rival}"),
        Figure(f"reused.{suffix}", reused / context, "of the prompt's tokens"),
    ]


def _prefilled(engine: Engine, ids: list[int]) -> tuple[int, float]:
    """(reused tokens, seconds)."""
    started = time.monotonic()
    session, _ = engine.prefill(ids)
    seconds = time.monotonic() - started
    engine.close_session(session)
    return session.reused, seconds


def _computed(engine: Engine, ids: list[int]) -> float:
    """Seconds of computing it anew."""
    started = time.monotonic()
    engine.compute_only(ids)
    return time.monotonic() - started


if __name__ == "__main__":
    sys.exit(main())
