"""Where does the time of a decode step go? Milliseconds per token, by policy and phase, against transformers and torch.

Random weights of shape B8 (8 layers, hidden 512, FFN 1408, 8 q / 2 kv heads, d = 128, vocabulary 512), random K and V
in real packs of a private daemon, bfloat16 in store, window and rivals. Cases:

    full           every head resident, nothing moves
    qsac_hit       10 % budget, thresholds so low that every head keeps its set
    qsac_mixed     10 % budget, default thresholds, every token five times in a row, so that most queries resemble
                   their predecessor: random weights have no continuity of their own
    qsac_miss      10 % budget, every head selects anew at every step (policy none), random tokens: the worst case

Rivals, on the same weights in the same run: transformers with a StaticCache, and torch matmul over contiguous [H, C, d]
inside our own layers. The limit of `full` is the rate at which as many threads read memory (torch.sum).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.store import counters, scratch
from decode_worker.config import WorkerConfig
from decode_worker.engine.engine import Engine
from decode_worker.figures import Figure, print_json, print_table
from decode_worker.model.transformer import Transformer
from decode_worker.records import STORAGE_DTYPES
from decode_worker.synthetic.checkpoint import B8, random_checkpoint
from decode_worker.synthetic.packs import inject_packs
from kvstore_service.client import AdminClient, parse_size
from kvstore_service.client.private import PrivateDaemon

SPARE_TOKENS = 512  # of the declared context, behind the stored tokens
STEPS_MAX = 256  # of one session: before its tail is sealed
WARM_STEPS = 5
TOKEN_REPEATS = 5
DRAM_SHARE = 4
SEED = 5
CASES: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "qsac_hit": {"policy": "qsac", "eta": -1.0},
    "qsac_mixed": {"policy": "qsac"},
    "qsac_miss": {"policy": "none"},
}
PHASES = ("model", "plan", "wait", "attend")


@dataclass(frozen=True)
class Settings:
    """`compute`: dtype of activations and weights, ours and the matmul rival's. `dram_bytes`: default KV / 4."""

    contexts: tuple[int, ...] = (8192, 32768, 131072)
    steps: int = 20
    repeats: int = 5
    threads: int = len(os.sched_getaffinity(0))
    compute: str = "bfloat16"
    budget: float = 0.1
    dram_bytes: int | None = None
    stream_bytes: int = 1 << 30
    shape: Mapping[str, int] = field(default_factory=lambda: B8)

    def __post_init__(self) -> None:
        if self.steps * self.repeats + WARM_STEPS > STEPS_MAX:
            raise ValueError(f"steps * repeats must be at most {STEPS_MAX - WARM_STEPS}: later steps would seal tails")
        if any(context % 256 for context in self.contexts):
            raise ValueError("contexts must be multiples of 256, the unit in which packs hold tokens")

    def kv_bytes(self, context: int) -> int:
        heads = self.shape["num_hidden_layers"] * self.shape["num_key_value_heads"]
        return int(context * heads * 2 * self.shape["head_dim"]) * STORAGE_DTYPES["bfloat16"][1].itemsize


def main() -> int:
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m bench.step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", default=",".join(map(str, default.contexts)), help="tokens, multiples of 256")
    parser.add_argument("--steps", type=int, default=default.steps, help="steps per repeat")
    parser.add_argument("--repeats", type=int, default=default.repeats)
    parser.add_argument("--threads", type=int, default=default.threads, help="of torch and of the worker's kernels")
    parser.add_argument("--compute", default=default.compute, choices=tuple(STORAGE_DTYPES))
    parser.add_argument("--dram-bytes", type=parse_size, help="the daemon's DRAM tier; default: a quarter of the KV")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    contexts = tuple(int(part) for part in a.contexts.split(","))
    figures = measure(Settings(contexts, a.steps, a.repeats, a.threads, a.compute, dram_bytes=a.dram_bytes))
    print_json(figures) if a.json else print_table("One decode step, batch 1", figures)
    return 0


def measure(settings: Settings) -> list[Figure]:
    torch.set_num_threads(settings.threads)
    with scratch() as directory:
        checkpoint = random_checkpoint(Path(directory) / "model", settings.shape, SEED)
        figures = [Figure("worker_threads", settings.threads, "threads")]
        for context in settings.contexts:
            data_dir = Path(directory) / str(context)
            figures += _measure_context(settings, checkpoint, data_dir, context)
    return figures


def _measure_context(settings: Settings, checkpoint: Path, data_dir: Path, context: int) -> list[Figure]:
    """All cases and rivals in turn, `repeats` times."""
    dram_bytes = settings.dram_bytes or settings.kv_bytes(context) // DRAM_SHARE
    samples: dict[str, list[dict[str, float]]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(PrivateDaemon(data_dir, dram_bytes))
        cases = list(_cases(settings, checkpoint, daemon, context, stack))
        model = cases[0].engine.model
        rivals = {
            "transformers StaticCache": transformers_step(settings, checkpoint, context),
            "torch matmul": matmul_step(model, context),
        }
        for step in rivals.values():
            _timed_ms(step, WARM_STEPS)
        stream = torch.ones(settings.stream_bytes // 4)
        for _ in range(settings.repeats):
            for case in cases:
                samples[case.name].append(case.run(settings.steps))
            for name, step in rivals.items():
                samples[name].append({"step": _timed_ms(step, settings.steps)})
            samples["stream read"].append({"gb_per_s": _gb_per_s(stream)})
        with AdminClient.connect(daemon.socket, daemon.broker) as admin:
            daemon_threads = int(admin.get_config().values["copy_threads"])
    suffix = f"_{context // 1024}k" if context >= 1024 else f"_{context}"
    return [
        Figure(f"kv{suffix}", settings.kv_bytes(context), "B"),
        Figure(f"dram{suffix}", dram_bytes, "B"),
        Figure(f"daemon_threads{suffix}", daemon_threads, "threads"),
        *(figure for case in CASES for figure in _figures(case, suffix, samples)),
        _bandwidth(settings, context, suffix, samples),
    ]


# --- ours ---


@dataclass
class Case:
    """One engine with a session behind `context` stored tokens."""

    name: str
    engine: Engine
    daemon: PrivateDaemon
    ids: list[int]
    generator: torch.Generator

    def __post_init__(self) -> None:
        self._session, (self._next,) = self.engine.attach(self.ids)
        self._repeated = 0
        self.run(WARM_STEPS)

    def run(self, steps: int) -> dict[str, float]:
        """Means over the steps: milliseconds of the whole step and of each phase, and what the store did."""
        policy, spent = self.engine.policy.counters, self.engine.loop.spent_ns
        store, before, moved = counters(self.daemon), dict(spent), policy.records_moved
        hits, lookups = policy.hits, policy.lookups
        started = time.monotonic_ns()
        for _ in range(steps):
            logits = self.engine.step([self._session], [self._next])
            self._next = self._token(logits)
        step_ns = time.monotonic_ns() - started
        phases = {phase: (spent[phase] - before.get(phase, 0)) / steps / 1e6 for phase in PHASES[1:]}
        read_bytes = counters(self.daemon)["nvme_read_bytes"] - store["nvme_read_bytes"]
        return {
            "step": step_ns / steps / 1e6,
            "model": step_ns / steps / 1e6 - sum(phases.values()),
            **phases,
            "hit_ratio": (policy.hits - hits) / max(1, policy.lookups - lookups),
            "moved": (policy.records_moved - moved) / steps,
            "nvme_read": read_bytes / steps,
        }

    def _token(self, logits: torch.Tensor) -> int:
        self._repeated += 1
        if self.name == "qsac_mixed" and self._repeated % TOKEN_REPEATS:
            return self._next
        return int(torch.randint(logits.shape[1], (1,), generator=self.generator))


def _cases(
    settings: Settings, checkpoint: Path, daemon: PrivateDaemon, context: int, stack: contextlib.ExitStack
) -> Iterator[Case]:
    """Engines over one model; the first one stores the packs that all attach."""
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(int(settings.shape["vocab_size"]), (context + 1,), generator=generator).tolist()
    model: Transformer | None = None
    for name, changes in CASES.items():
        config = WorkerConfig(
            model=checkpoint, socket=Path(daemon.socket), broker=Path(daemon.broker), profile="off",
            context=context + SPARE_TOKENS, threads=settings.threads, compute=settings.compute,
            budget=settings.budget, wait_ms=20_000, stale="fail", **changes,
        )  # fmt: skip
        engine = stack.enter_context(contextlib.closing(Engine(config, model)))
        if model is None:
            inject_packs(engine, ids[:context], SEED)
        model = engine.model
        yield Case(name, engine, daemon, ids, generator)


# --- rivals ---


def transformers_step(settings: Settings, checkpoint: Path, context: int) -> Callable[[], object]:
    """One token at position context - 1 of a full StaticCache, bfloat16."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    cache = transformers.StaticCache(config=model.config, max_cache_len=context)
    heads, d = int(settings.shape["num_key_value_heads"]), int(settings.shape["head_dim"])
    cache.early_initialization(1, heads, d, torch.bfloat16, torch.device("cpu"))
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    token, position = torch.tensor([[7]]), torch.tensor([[context - 1]])

    @torch.inference_mode()
    def step() -> object:
        for layer in cache.layers:
            layer.cumulative_length.fill_(context - 1)
        return model(input_ids=token, position_ids=position, past_key_values=cache, use_cache=True).logits

    return step


def matmul_step(model: Transformer, context: int) -> Callable[[], object]:
    """Our layers around softmax(q K^T) V with K and V bfloat16 [H, context, d], one token at position context - 1."""
    config = model.config
    shape = (config.layers, 2, config.kv_heads, context, config.head_dim)
    kv = torch.empty(shape, dtype=torch.bfloat16).normal_()
    token, position = torch.tensor([7]), torch.tensor([context - 1])

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = kv[layer]
        keys[:, -1], values[:, -1] = k[0], v[0]
        grouped = q.view(config.kv_heads, -1, config.head_dim).to(torch.bfloat16)
        weights = (grouped @ keys.transpose(1, 2)).float().mul_(model.scale).softmax(-1)
        return (weights.to(torch.bfloat16) @ values).to(q.dtype)

    @torch.inference_mode()
    def step() -> object:
        x = model.embed(token)
        for layer in range(config.layers):
            q, k, v = model.qkv(layer, x, position)
            x = model.finish(layer, x, attend(layer, q, k, v))
        return model.logits(x)

    return step


def _timed_ms(step: Callable[[], object], steps: int) -> float:
    started = time.perf_counter()
    for _ in range(steps):
        step()
    return 1000 * (time.perf_counter() - started) / steps


def _gb_per_s(buffer: torch.Tensor) -> float:
    started = time.perf_counter()
    buffer.sum()
    return buffer.nbytes / (time.perf_counter() - started) / 1e9


# --- figures ---

Samples = Mapping[str, Sequence[Mapping[str, float]]]


def _figures(case: str, suffix: str, samples: Samples) -> list[Figure]:
    """The step against each rival (for qsac also against `full`), its phases, and what a sparse step moved."""

    def values(name: str, key: str) -> list[float]:
        return [sample[key] for sample in samples[name]]

    rivals = ["transformers StaticCache", "torch matmul"] + (["full"] if case != "full" else [])
    name, steps = f"{case}{suffix}", values(case, "step")
    figures = [Figure.of_runs(name, steps, "ms/token", rival, values(rival, "step")) for rival in rivals]
    figures += [Figure.of_runs(f"{name}.{phase}", values(case, phase), "ms/token") for phase in PHASES]
    if case != "full":
        figures += [
            Figure(f"{name}.hit_ratio", statistics.mean(values(case, "hit_ratio")), "hits / lookups"),
            Figure.of_runs(f"{name}.moved", values(case, "moved"), "records/token"),
            Figure.of_runs(f"{name}.nvme_read", values(case, "nvme_read"), "B/token"),
        ]
    return figures


def _bandwidth(settings: Settings, context: int, suffix: str, samples: Samples) -> Figure:
    """What attention of `full` reads per second, against a stream read with as many threads."""
    attended = [settings.kv_bytes(context) / (sample["attend"] / 1000) / 1e9 for sample in samples["full"]]
    stream = [sample["gb_per_s"] for sample in samples["stream read"]]
    return Figure.of_runs(f"full{suffix}.attend_read", attended, "GB/s", "stream read", stream)


if __name__ == "__main__":
    sys.exit(main())
