"""Engines that decode behind the same stored tokens, all KV in DRAM, with as many hits as wanted.

Random weights have no continuity: the queries of two random tokens differ as much as any two. So hits are steered by
thresholds: a profile says of each head that its set always serves (tau = -1) or never (tau = 1). Tokens are random, so
that a head which misses has to exchange most of its set.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from bench.rivals import NotRun
from bench.store import counters
from decode_worker.config import KEYS, WorkerConfig
from decode_worker.engine.engine import Engine
from decode_worker.model.transformer import Transformer
from decode_worker.records import STORAGE_DTYPES
from decode_worker.synthetic.checkpoint import Shape
from decode_worker.synthetic.packs import inject_packs
from kvstore_service.client.private import PrivateDaemon

# Hits -> the part of the heads whose sets never serve, rounded down to whole heads.
HITS = {"hit": 0.0, "hit75": 0.25, "miss": 1.0}
SPARE_TOKENS = 512  # of the declared context, behind the stored tokens
STEPS_MAX = 250  # of one session: before its tail is sealed
WARM_STEPS = 5
WAIT_MS = 60_000
DRAM_SPARE = 256 << 20
SEED = 5
POLICY = next(key for key in KEYS if key.name == "policy")

Sample = dict[str, float]


class Document:
    """`tokens` random tokens whose KV a private daemon holds in DRAM. Context manager, not thread-safe."""

    def __init__(
        self, checkpoint: Path, directory: Path, tokens: int, *, budget: float, threads: int, layer0: str = "resident"
    ) -> None:
        self.checkpoint = checkpoint
        self.tokens = tokens
        self.shape: Shape = json.loads((checkpoint / "config.json").read_text())
        self.threads = threads
        self.model: Transformer | None = None
        self._directory = directory
        self._options: dict[str, Any] = {"budget": budget, "threads": threads, "layer0": layer0}
        self._generator = torch.Generator().manual_seed(SEED)
        self._ids = self.random_ids(tokens + 1)
        self._stored = False

    def __enter__(self) -> Document:
        with contextlib.ExitStack() as stack:
            # A quarter more than the records: maps, checksums and extents that are not full.
            dram_bytes = self.kv_bytes * 5 // 4 + DRAM_SPARE
            self.daemon = stack.enter_context(PrivateDaemon(self._directory / "store", dram_bytes))
            self._resources = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._resources.close()

    @property
    def kv_bytes(self) -> int:
        return self.tokens * kv_token_bytes(self.shape)

    def engine(self, policy: str, hits: str = "miss", sessions: int = 1) -> Engine:
        """Closed with the document. NotRun if there is no such policy."""
        try:
            POLICY.parse(policy)
        except ValueError as error:
            raise NotRun(f"policy={policy}: {error}") from None
        config = WorkerConfig(
            model=self.checkpoint, socket=Path(self.daemon.socket), broker=Path(self.daemon.broker),
            profile=str(self._profile(hits)), policy=policy, slots=sessions, context=self.tokens + SPARE_TOKENS,
            compute="bfloat16", wait_ms=WAIT_MS, stale="fail", **self._options,
        )  # fmt: skip
        engine = self._resources.enter_context(contextlib.closing(Engine(config, self.model)))
        self.model = engine.model
        return engine

    def decoder(self, policy: str, hits: str = "miss", sessions: int = 1) -> Decoder:
        """`sessions` of an engine of its own behind the document's tokens, after its first steps.

        The first engine stores the tokens."""
        engine = self.engine(policy, hits, sessions)
        if not self._stored:
            inject_packs(engine, self._ids[: self.tokens], SEED)
            # A prompt of one token more reads all of it, layer by layer, and so brings it into DRAM.
            engine.close_session(engine.prefill(self._ids)[0])
            self._stored = True
        return Decoder(engine, self.daemon, self._ids, sessions, self.random_ids)

    def random_ids(self, count: int) -> list[int]:
        return torch.randint(int(self.shape["vocab_size"]), (count,), generator=self._generator).tolist()

    def _profile(self, hits: str) -> Path:
        """A profile after which `HITS[hits]` of the heads always miss, spread evenly over the layers, and no other."""
        layers, heads = int(self.shape["num_hidden_layers"]), int(self.shape["num_key_value_heads"])
        resident = heads if self._options["layer0"] == "resident" else 0
        offloaded = layers * heads - resident
        missing = int(HITS[hits] * offloaded)
        steps = [(i + 1) * missing // offloaded - i * missing // offloaded for i in range(offloaded)]
        importance = torch.tensor([0] * resident + steps).view(layers, heads).tolist()
        path = self._directory / f"{hits}.json"
        path.write_text(json.dumps({"kv_importance": importance, "eta": 1.0}))
        return path


@dataclass
class Decoder:
    """Sessions of one engine; every step takes one random token of each."""

    engine: Engine
    daemon: PrivateDaemon
    ids: list[int]
    count: int
    random_ids: Callable[[int], list[int]]

    def __post_init__(self) -> None:
        self._sessions = [self.engine.attach(self.ids)[0] for _ in range(self.count)]
        self.device_bytes = self._sessions[0].geometry.device_bytes
        self.run(WARM_STEPS)

    def run(self, steps: int) -> Sample:
        """Means over the steps: ms of the step, ms of each phase that the engine times, and what was moved."""
        loop, read_bytes = self.engine.loop, counters(self.daemon)["nvme_read_bytes"]
        before, phases = self.engine.policy.counters, dict(loop.spent_ns)
        tokens = [self.random_ids(self.count) for _ in range(steps)]
        started = time.perf_counter_ns()
        for step in tokens:
            self.engine.step(self._sessions, step)
        step_ns = time.perf_counter_ns() - started
        after = self.engine.policy.counters
        return {
            "step": step_ns / steps / 1e6,
            **{f"phase.{phase}": (ns - phases.get(phase, 0)) / steps / 1e6 for phase, ns in loop.spent_ns.items()},
            "hit_ratio": (after.hits - before.hits) / max(1, after.lookups - before.lookups),
            "moved": (after.records_moved - before.records_moved) / steps,
            "nvme_read": (counters(self.daemon)["nvme_read_bytes"] - read_bytes) / steps,
        }

    def python_ms(self, steps: int) -> float:
        """What a step takes whose native calls return at once: all that Python does. Decodes nothing sensible, and no
        step behind it does."""
        loop = self.engine.loop
        with patch.object(loop.kernels, "_step", _Nothing()), patch.object(loop._products, "_native", _Nothing()):
            return self.run(steps)["step"]


class _Nothing:
    """In the place of a native object."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _return_at_once


def _return_at_once(*_: object) -> None: ...


def kv_token_bytes(shape: Shape) -> int:
    """Bytes of one token's K and V over all layers."""
    heads = int(shape["num_hidden_layers"]) * int(shape["num_key_value_heads"])
    return heads * 2 * int(shape["head_dim"]) * STORAGE_DTYPES["bfloat16"][1].itemsize
