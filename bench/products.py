"""What does a decode step cost outside attention and selection, and what does int8 cost in accuracy?

Milliseconds per step, by shape and number of rows: random weights of the shapes B8 and Q05 (docs/performance.md); every
step makes the speculative queries too. In the same run: our layers in torch, and the limit, which is the weights' bytes
over the rate at which as many threads read memory (torch.sum). `kept`: memory of the products beside the model's.

`difference` (the largest, of a logit) and `top1` (agreement) compare with float32 over a whole sequence: int8 weights,
and in the same run bfloat16 weights and activations; with random weights, and with models/retriever on our own docs.
`std` is the deviation of a logit.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.parts import count
from decode_worker.figures import Figure, print_json, print_table
from decode_worker.kernels.products import PRODUCTS, Products
from decode_worker.kernels.products.base import WEIGHTS
from decode_worker.kernels.products.int8 import MATRICES, rounded
from decode_worker.model.attention import causal_attention
from decode_worker.model.checkpoint import Checkpoint
from decode_worker.model.tokenizer import Tokenizer
from decode_worker.model.transformer import Transformer
from decode_worker.records import STORAGE_DTYPES
from decode_worker.synthetic.checkpoint import B8, Q05, Shape, random_checkpoint

RETRIEVER = Path(__file__).parents[1] / "models" / "retriever"
DOCS = ("architecture.md", "operations.md")
DECLARED_MAX = 4096
SETTLE_S = 0.02  # torch's threads spin for a while after a product
SEED = 3


@dataclass(frozen=True)
class Settings:
    rows: tuple[int, ...] = (1, 4, 16, 64)
    steps: int = 10
    repeats: int = 9
    threads: int = len(os.sched_getaffinity(0))
    compute: str = "bfloat16"
    stream_bytes: int = 1 << 30
    compared_tokens: int = 1024
    shapes: Mapping[str, Shape] = field(default_factory=lambda: {"b8": B8, "q05": Q05})


def main() -> int:
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m bench.products", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default=",".join(map(str, default.rows)), help="sessions of a step")
    parser.add_argument("--steps", type=count, default=default.steps, help="steps per repeat")
    parser.add_argument("--repeats", type=count, default=default.repeats)
    parser.add_argument("--threads", type=count, default=default.threads)
    parser.add_argument("--compute", default=default.compute, choices=tuple(STORAGE_DTYPES))
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    rows = tuple(int(part) for part in a.rows.split(","))
    figures = measure(Settings(rows, a.steps, a.repeats, a.threads, a.compute))
    print_json(figures) if a.json else print_table("A decode step outside attention and selection", figures)
    return 0


def measure(settings: Settings) -> list[Figure]:
    torch.set_num_threads(settings.threads)
    figures = [Figure("threads", settings.threads, "threads")]
    for name, shape in settings.shapes.items():
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = Checkpoint.open(random_checkpoint(Path(directory) / "model", shape, SEED))
            compute = STORAGE_DTYPES[settings.compute][1]
            figures += _measure_shape(settings, name, Transformer.load(checkpoint, DECLARED_MAX, compute))
            generator = torch.Generator().manual_seed(SEED)
            ids = torch.randint(int(shape["vocab_size"]), (settings.compared_tokens,), generator=generator)
            figures += _accuracy(name, Transformer.load(checkpoint, DECLARED_MAX), ids)
    shipped = Transformer.load(Checkpoint.open(RETRIEVER), DECLARED_MAX)
    text = "".join((RETRIEVER.parents[1] / "docs" / name).read_text() for name in DOCS)
    ids = torch.tensor(Tokenizer.load(RETRIEVER, shipped.config.vocab).encode(text)[: settings.compared_tokens])
    return figures + _accuracy("retriever", shipped, ids)


def _measure_shape(settings: Settings, shape: str, model: Transformer) -> list[Figure]:
    """Every set at every number of rows in turn, `repeats` times."""
    batch = max(settings.rows)
    sets = {weights: PRODUCTS["cpu"](model, batch, settings.threads, weights) for weights in WEIGHTS}
    sets["torch"] = PRODUCTS["reference"](model, batch, settings.threads, "compute")
    samples: dict[tuple[str, int], list[float]] = defaultdict(list)
    seconds_per_byte: list[float] = []
    stream = torch.ones(settings.stream_bytes // 4)
    for products in sets.values():
        products.attention.normal_()
        products.positions.copy_(torch.arange(batch))
        step(products, model.config.layers, batch)
    for _ in range(settings.repeats):
        for rows in settings.rows:
            for name, products in sets.items():
                samples[name, rows].append(_step_ms(products, model.config.layers, rows, settings.steps))
        seconds_per_byte.append(_seconds(stream.sum) / stream.nbytes)
    own = weight_bytes(model, "compute")
    figures = [Figure(f"{shape}.weights", own, "B")]
    for weights in WEIGHTS:
        size = weight_bytes(model, weights)
        floor = [1000 * size * each for each in seconds_per_byte]
        kept = 0 if weights == "compute" else size - model.weights.head.nbytes
        figures.append(Figure(f"{shape}.{weights}.kept", kept, "B", "weights", own, kept / own))
        for rows in settings.rows:
            name, found = f"{shape}.{weights}.rows{rows}", samples[weights, rows]
            figures.append(Figure.of_runs(name, found, "ms/step", "torch", samples["torch", rows]))
            figures.append(Figure.of_runs(f"{name}.of_floor", found, "ms/step", "weights' bytes", floor))
    return figures


# --- accuracy ---


def _accuracy(name: str, model: Transformer, ids: torch.Tensor) -> list[Figure]:
    exact = _logits(model, ids)
    changed = {"int8": rounded(model.weights), "bfloat16": model.weights.to(torch.bfloat16)}
    found = {key: _logits(Transformer(model.config, each, DECLARED_MAX), ids) for key, each in changed.items()}
    difference = {key: float((each - exact).abs().max()) for key, each in found.items()}
    top1 = {key: 100 * float((each.argmax(1) == exact.argmax(1)).float().mean()) for key, each in found.items()}
    rival = "bfloat16"
    return [
        Figure.of_runs(f"{name}.int8.difference", [difference["int8"]], "logits", rival, [difference[rival]]),
        Figure.of_runs(f"{name}.int8.top1", [top1["int8"]], "%", rival, [top1[rival]]),
        Figure(f"{name}.std", float(exact.std()), "logits"),
    ]


@torch.inference_mode()
def _logits(model: Transformer, ids: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(len(ids))
    x = model.embed(ids)
    for layer in range(model.config.layers):
        q, k, v = model.qkv(layer, x, positions)
        x = model.finish(layer, x, causal_attention(q, k, v, 0, model.scale))
    return model.logits(x)


# --- speed ---


def step(products: Products, layers: int, rows: int) -> None:
    products.embed(rows)
    for layer in range(layers):
        products.layer(layer, rows, speculate=True)
    products.finish(rows)


def weight_bytes(model: Transformer, weights: str) -> int:
    """What a step must read once: the layers' matrices and the head."""
    total = model.weights.head.nbytes
    for layer in model.weights.layers:
        total += sum(m.nbytes if weights == "compute" else m.numel() for m in (getattr(layer, n) for n in MATRICES))
    return total


def _step_ms(products: Products, layers: int, rows: int, steps: int) -> float:
    time.sleep(SETTLE_S)
    step(products, layers, rows)
    return 1000 * _seconds(lambda: [step(products, layers, rows) for _ in range(steps)]) / steps


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
