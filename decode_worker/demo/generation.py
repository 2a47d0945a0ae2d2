"""A long generation with all KV in DRAM: what a token costs under our policy, under rivals, and how that grows.

Random weights of shape B8 and random K and V in real packs of a private daemon: prefill of 128K tokens would take
minutes here, and speed does not depend on what is said. Random weights have no continuity, so every token is fed a few
times in a row and most queries resemble the one before, as those of a trained model do.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from decode_worker.config import WorkerConfig
from decode_worker.engine.engine import Engine
from decode_worker.engine.footprint import Footprint, attended_share
from decode_worker.engine.session import Session
from decode_worker.records import STORAGE_DTYPES
from decode_worker.synthetic.checkpoint import B8, Shape, random_checkpoint
from decode_worker.synthetic.packs import inject_packs
from kvstore_service.client import AdminClient
from kvstore_service.client.private import PrivateDaemon
from kvstore_service.shared.types import format_size

# `infinigen` selects anew at every head and step, as InfiniGen does.
POLICIES = ("full", "infinigen", "qsac")
FULL, ALWAYS_SELECTS = POLICIES[:2]
ROUNDS = 4
ROUND_TOKENS = 24
WARM_TOKENS = 6
TOKEN_REPEATS = 5
SPARE_TOKENS = 512  # of the declared context, behind the stored tokens
WAIT_MS = 20_000
SEED = 5
# Of the KV's bytes: the DRAM tier, the window of `full`, the other windows and indexes.
MEMORY_SHARE = 3.0
DRAM_SHARE = 1.25
DISK_SHARE = 1.25
ROOM_BYTES = 64 << 20


@dataclass(frozen=True)
class Result:
    """What one policy did behind `context` stored tokens. `ms`: per token, by round; `moved`: records per token.

    `hit_ratio` counts the session's first step, which misses everywhere; `attended`: as `attended_share`, mean."""

    policy: str
    context: int
    ms: list[float]
    moved: float
    hit_ratio: float
    attended: float
    footprint: Footprint
    nvme_read_bytes: int  # while all policies generated

    @property
    def name(self) -> str:
        return f"generation.{self.context // 1024}k.{self.policy}"


def measure(
    directory: Path,
    context: int,
    config: WorkerConfig,
    note: Callable[[str], None],
    shape: Shape = B8,
) -> list[Result]:
    """All policies behind `context` tokens, in turns; packs lie under `directory` while it runs.

    `config`: budget, retriever, threads and the like. None, and a line to `note`, where this machine has no room.
    Raises StoreError, RingTimeout."""
    kv_bytes = _kv_bytes(shape, context)
    if lack := _lacking(kv_bytes, directory):
        note(f"no generation behind {context:,} tokens: {lack}")
        return []
    torch.set_num_threads(config.threads)
    here = replace(
        config, model=random_checkpoint(directory / "model", shape, SEED), profile="off",
        context=context + SPARE_TOKENS, compute="bfloat16", storage="bfloat16", order="token",
        wait_ms=WAIT_MS, stale="fail",
    )  # fmt: skip
    data_dir = directory / str(context)
    with PrivateDaemon(data_dir, int(DRAM_SHARE * kv_bytes) + ROOM_BYTES) as daemon:
        results = _generate(replace(here, socket=Path(daemon.socket), broker=Path(daemon.broker)), context, daemon)
    shutil.rmtree(data_dir)
    return results


@dataclass
class _Run:
    policy: str
    engine: Engine
    session: Session
    ms: list[float] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)
    attended: list[float] = field(default_factory=list)

    def feed(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.engine.step([self.session], [token])

    def feed_timed(self, tokens: Sequence[int]) -> None:
        moved, started = self.engine.policy.counters.records_moved, time.monotonic()
        self.feed(tokens)
        self.ms.append(1000 * (time.monotonic() - started) / len(tokens))
        self.moved.append((self.engine.policy.counters.records_moved - moved) / len(tokens))
        self.attended.append(attended_share(self.engine, self.session))

    def result(self, context: int, nvme_read_bytes: int) -> Result:
        counters, footprint = self.engine.policy.counters, Footprint.of(self.engine, self.session)
        lookups = counters.lookups + footprint.offloaded_heads
        return Result(
            self.policy, context, self.ms, statistics.mean(self.moved), counters.hits / lookups if lookups else 1.0,
            statistics.mean(self.attended), footprint, nvme_read_bytes,
        )  # fmt: skip


def _generate(config: WorkerConfig, context: int, daemon: PrivateDaemon) -> list[Result]:
    """In turns, so that a slow minute of the machine counts for all."""
    with contextlib.ExitStack() as stack:
        runs = list(_runs(config, context, stack))
        vocabulary = runs[0].engine.model.config.vocab
        tokens = _spoken(vocabulary, WARM_TOKENS + ROUNDS * ROUND_TOKENS)
        for run in runs:
            run.feed(tokens[:WARM_TOKENS])
        before = _nvme_read_bytes(daemon)
        for first in range(WARM_TOKENS, len(tokens), ROUND_TOKENS):
            for run in runs:
                run.feed_timed(tokens[first : first + ROUND_TOKENS])
        read = _nvme_read_bytes(daemon) - before
        return [run.result(context, read) for run in runs]


def _runs(config: WorkerConfig, context: int, stack: contextlib.ExitStack) -> Iterator[_Run]:
    """Engines over one model; the first one stores the packs that all attach."""
    model = None
    for policy in POLICIES:
        engine = stack.enter_context(contextlib.closing(Engine(replace(config, policy=policy), model)))
        ids = [token % engine.model.config.vocab for token in range(context + 1)]
        if model is None:
            inject_packs(engine, ids[:context], SEED)
        model = engine.model
        yield _Run(policy, engine, engine.attach(ids)[0])


def _spoken(vocabulary: int, tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(SEED)
    words = torch.randint(vocabulary, (-(-tokens // TOKEN_REPEATS),), generator=generator)
    return words.repeat_interleave(TOKEN_REPEATS)[:tokens].tolist()


def _nvme_read_bytes(daemon: PrivateDaemon) -> int:
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        return int(admin.get_status().counters["nvme_read_bytes"])


def _kv_bytes(shape: Shape, tokens: int) -> int:
    layers, heads, d = (int(shape[key]) for key in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
    return tokens * layers * heads * 2 * d * STORAGE_DTYPES["bfloat16"][1].itemsize


def _lacking(kv_bytes: int, directory: Path) -> str:
    """What this machine has too little of, in words; empty if there is room."""
    disk_free = shutil.disk_usage(directory).free
    lacks = []
    for what, share, free in (("memory", MEMORY_SHARE, memory_available()), ("disk", DISK_SHARE, disk_free)):
        needed = int(share * kv_bytes) + ROOM_BYTES
        if free < needed:
            lacks.append(f"{format_size(needed)} of {what} are needed, {format_size(free)} are free")
    return "; ".join(lacks)


def memory_available() -> int:
    """Bytes, as the kernel estimates them."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/meminfo has no MemAvailable")
