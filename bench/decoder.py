"""Engines that decode behind the same stored tokens, all KV in DRAM, with as many hits as wanted.

Random weights have no continuity: the queries of two random tokens differ as much as any two. So hits are steered by
thresholds: a profile says of each head that its set always serves (tau = -1) or never (tau = 1). Tokens are random, so
that a head which misses has to exchange most of its set.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from bench.document import counters
from bench.rivals import NotRun
from decode_worker.config import KEYS, WorkerConfig
from decode_worker.engine.engine import Engine
from decode_worker.engine.session import Session
from decode_worker.model.transformer import Transformer
from decode_worker.policy.plan import NO_PAIRS, RUN_DTYPE, Op, Ticket
from decode_worker.records import STORAGE_DTYPES
from decode_worker.synthetic.checkpoint import Shape
from decode_worker.synthetic.packs import inject_packs
from decode_worker.synthetic.weights import DrawnCheckpoint
from decode_worker.work import finish
from kvstore_service.client.private import PrivateDaemon

# Hits -> the part of the heads whose sets never serve, rounded down to whole heads.
HITS = {"hit": 0.0, "hit75": 0.25, "miss": 1.0}
SPARE_TOKENS = 512  # of the declared context, behind the stored tokens
STEPS_MAX = 250  # of one session: before its tail is sealed
WARM_STEPS = 5
WAIT_MS = 60_000
DRAM_SHARE, DRAM_SPARE = 1.25, 256 << 20  # beside the records: maps, checksums and extents that are not full
MEMORY_SHARE, MEMORY_SPARE = 1.6, 1 << 30  # of the KV: the DRAM tier, a window, an index
DISK_SHARE = 1.1
MIB = 1 << 20
SEED = 5
POLICY = next(key for key in KEYS if key.name == "policy")

Sample = dict[str, float]


class Document:
    """`tokens` random tokens behind which engines decode. Context manager, not thread-safe."""

    def __init__(
        self,
        checkpoint: Path | DrawnCheckpoint,
        directory: Path,
        tokens: int,
        *,
        daemon_options: Sequence[str] = (),
        alike: bool = False,
        dram_share: float = 1.0,
        read: bool = True,
        **settings: Any,
    ) -> None:
        """alike: as `inject_packs` says. dram_share: of the bfloat16 KV that DRAM holds, where it does not hold all.
        read: all of it once, before anything is decoded, so that DRAM has what it has room for. settings: of all
        workers."""
        self.drawn = None if isinstance(checkpoint, Path) else checkpoint
        self.checkpoint = checkpoint if isinstance(checkpoint, Path) else checkpoint.directory
        self.tokens = tokens
        self.shape: Shape = json.loads((self.checkpoint / "config.json").read_text())
        self.threads: int = settings.get("threads", 1)
        self.model: Transformer | None = None
        self._directory = directory
        self._daemon_options = daemon_options
        self._alike = alike
        self._dram_share = dram_share
        self._read = read
        self._settings = {
            "context": tokens + SPARE_TOKENS, "compute": "bfloat16", "wait_ms": WAIT_MS, "stale": "fail", **settings
        }  # fmt: skip
        self._generator = torch.Generator().manual_seed(SEED)
        self._ids = self.random_ids(tokens + 1)
        self._stored = False
        self._engines: list[Engine] = []

    def __enter__(self) -> Document:
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self._directory / "store", ignore_errors=True)
            all_of_it = int(self.kv_bytes * DRAM_SHARE) + DRAM_SPARE
            dram_bytes = all_of_it if self._dram_share >= 1 else int(self.kv_bytes * self._dram_share)
            self.daemon = stack.enter_context(
                PrivateDaemon(self._directory / "store", dram_bytes, options=self._daemon_options)
            )
            stack.callback(self._close_all)
            self._resources = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._resources.close()

    def _close_all(self) -> None:
        while self._engines:
            self.close(self._engines[-1])

    @property
    def kv_bytes(self) -> int:
        return self.tokens * kv_token_bytes(self.shape)

    def require_room(self) -> None:
        """NotRun if this machine has no room for it."""
        needed, free = int(self.kv_bytes * MEMORY_SHARE) + MEMORY_SPARE, available_memory()
        if needed > free:
            raise NotRun(f"{self.tokens} tokens need {needed // MIB} MiB of memory, {free // MIB} are available")
        existing = next(path for path in (self._directory, *self._directory.parents) if path.exists())
        needed, free = int(self.kv_bytes * DISK_SHARE), shutil.disk_usage(existing).free
        if needed > free:
            raise NotRun(f"{self.tokens} tokens need {needed // MIB} MiB in {existing}, {free // MIB} are free")

    def engine(self, policy: str, missing: float = 1.0, sessions: int = 1, **settings: Any) -> Engine:
        """Closed with the document. missing: the part of the heads whose sets never serve. NotRun if there is no such
        policy."""
        try:
            POLICY.parse(policy)
        except ValueError as error:
            raise NotRun(f"policy={policy}: {error}") from None
        config = WorkerConfig(
            model=self.checkpoint, socket=Path(self.daemon.socket), broker=Path(self.daemon.broker), policy=policy,
            profile=str(self._profile(missing)), slots=sessions, **(self._settings | settings),
        )  # fmt: skip
        engine = Engine(config, self.model, self.drawn)
        self._engines.append(engine)
        self.model = engine.model
        return engine

    def close(self, engine: Engine) -> None:
        """Before the document's own end: a window may take gigabytes."""
        self._engines.remove(engine)
        engine.close()

    def decoder(
        self, policy: str, missing: float = 1.0, sessions: int = 1, warm_steps: int = WARM_STEPS, **settings: Any
    ) -> Decoder:
        """`sessions` of an engine of its own behind the document's tokens, after its first steps.

        The first engine stores the tokens."""
        engine = self.engine(policy, missing, sessions, **settings)
        try:
            self._store(engine)
            return Decoder(self, engine, self._ids, sessions, warm_steps)
        except BaseException:
            self.close(engine)
            raise

    def _store(self, engine: Engine) -> None:
        if not self._stored:
            inject_packs(engine, self._ids[: self.tokens], SEED, alike=self._alike)
            if self._read:
                read_all(engine, self._ids)
            self._stored = True

    def random_ids(self, count: int) -> list[int]:
        return torch.randint(int(self.shape["vocab_size"]), (count,), generator=self._generator).tolist()

    def _profile(self, missing: float) -> Path:
        """A profile after which this part of the heads always misses, spread evenly over the layers, and no other."""
        layers, heads = int(self.shape["num_hidden_layers"]), int(self.shape["num_key_value_heads"])
        resident = heads if self._settings.get("layer0", "resident") == "resident" else 0
        offloaded = layers * heads - resident
        most = int(missing * offloaded)
        steps = [(i + 1) * most // offloaded - i * most // offloaded for i in range(offloaded)]
        importance = torch.tensor([0] * resident + steps).view(layers, heads).tolist()
        path = self._directory / f"missing-{missing:.4f}.json"
        path.write_text(json.dumps({"kv_importance": importance, "eta": 1.0}))
        return path


def read_all(engine: Engine, ids: Sequence[int]) -> None:
    """Brings every record of a stored prompt into DRAM: over and over into the first places of a session's window."""
    session, _ = engine.attach(ids)
    portion = int(session.geometry.places.min())
    runs = np.zeros(engine.layout.kinds[0].lanes, RUN_DTYPE)
    runs["slot"], runs["slot_epoch"], runs["lane"] = session.slot, session.epoch, range(len(runs))

    def tickets() -> Iterator[Ticket]:
        for layer in range(engine.layout.layers):
            for pack in session.packs:
                for first in range(pack.first_token, pack.first_token + pack.tokens, portion):
                    part = runs.copy()
                    part["first_pair"] = first
                    part["pair_count"] = min(portion, pack.first_token + pack.tokens - first)
                    yield Ticket(Op.RANGE, layer, part, NO_PAIRS)

    finish(engine.transport.run(tickets()))
    engine.close_session(session)


@dataclass
class Decoder:
    """Sessions of one engine; every step takes one token of each: a random one in `fresh` of the steps, else the last
    one again, for which heads that miss select nearly what they have; `walks`: in order, from 0."""

    document: Document
    engine: Engine
    ids: list[int]
    count: int
    warm_steps: int
    fresh: float = 1.0
    walks: bool = False
    walked: int = 0

    def __post_init__(self) -> None:
        self._sessions: list[Session] = []
        self._last = self.document.random_ids(self.count)
        self._due = 0.0  # of a random token
        self.attach()
        self.device_bytes = self._sessions[0].geometry.device_bytes
        if self.warm_steps:
            self.run(self.warm_steps)

    def attach(self) -> None:
        """New sessions in the place of those before: their next step is a first one."""
        while self._sessions:
            self.engine.close_session(self._sessions.pop())
        self._sessions = [self.engine.attach(self.ids)[0] for _ in range(self.count)]

    def run(self, steps: int) -> Sample:
        """Means over the steps: ms of the step, ms of each phase that the engine times, what was moved, and the ms of
        processors that worker and daemon took."""
        engine, daemon = self.engine, self.document.daemon
        read_bytes = counters(daemon)["nvme_read_bytes"]
        before, selected, phases = engine.policy.counters, self._selected(), dict(engine.loop.spent_ns)
        tokens = [self._tokens() for _ in range(steps)]
        worker_ns, daemon_ns = time.process_time_ns(), processor_ns(daemon.pid)
        started = time.perf_counter_ns()
        for step in tokens:
            engine.step(self._sessions, step)
        step_ns = time.perf_counter_ns() - started
        worker_ns, daemon_ns = time.process_time_ns() - worker_ns, processor_ns(daemon.pid) - daemon_ns
        after, spent = engine.policy.counters, engine.loop.spent_ns
        chosen, fetched = (now - then for now, then in zip(self._selected(), selected, strict=True))
        return {
            "step": step_ns / steps / 1e6,
            **{f"phase.{phase}": (ns - phases.get(phase, 0)) / steps / 1e6 for phase, ns in spent.items()},
            "hit_ratio": (after.hits - before.hits) / max(1, after.lookups - before.lookups),
            "moved": (after.records_moved - before.records_moved) / steps,
            "delta": fetched / max(1, chosen),
            "nvme_read": (counters(daemon)["nvme_read_bytes"] - read_bytes) / steps,
            "worker_cpu": worker_ns / steps / 1e6,
            "daemon_cpu": daemon_ns / steps / 1e6,
        }

    def close(self) -> None:
        self.document.close(self.engine)

    def python_ms(self, steps: int) -> float:
        """What a step takes whose native calls return at once: all that Python does. Decodes nothing sensible, and no
        step behind it does."""
        loop = self.engine.loop
        with patch.object(loop.kernels, "_step", _Nothing()), patch.object(loop._products, "_native", _Nothing()):
            return self.run(steps)["step"]

    def _tokens(self) -> list[int]:
        if self.walks:
            self.walked += 1
            return [(self.walked - 1) % int(self.document.shape["vocab_size"])] * self.count
        self._due += self.fresh
        if self._due >= 1:
            self._due -= 1
            self._last = self.document.random_ids(self.count)
        return self._last

    def _selected(self) -> tuple[int, int]:
        """Units that selections took so far, and of them what had to be fetched."""
        state = self.engine.policy.state
        return int(state.chosen.sum()), int(state.missing.sum())


class _Nothing:
    """In the place of a native object."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _return_at_once


def _return_at_once(*_: object) -> None: ...


def available_memory() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def processor_ns(pid: int) -> int:
    """What a process has run so far, in ticks of the kernel's clock (10 ms)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def kv_token_bytes(shape: Shape) -> int:
    """Bytes of one token's K and V over all layers."""
    heads = int(shape["num_hidden_layers"]) * int(shape["num_key_value_heads"])
    return heads * 2 * int(shape["head_dim"]) * STORAGE_DTYPES["bfloat16"][1].itemsize
