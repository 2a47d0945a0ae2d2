"""How long does a decode step take, against whom, and how does that grow? Random weights and KV, all KV in DRAM.

Parts (`--only`), each over private daemons, with all rivals in turn in the same run:

    speedup   shape B8: the step when all heads hit, when three quarters do, when none does, against every rival
    q05       the same on shape Q05
    growth    the step at 512K against 32K, with 4,096 selected places per head, in layer 0 too
    batch     tokens per second of 1, 4, 16 and 64 sessions at 8K
    prefill   shape Q05: prompt tokens per second, stored while they are computed, against transformers
    million   one run at 1M tokens

Rivals: programs of others on the same weights (bench/rivals), and our own engine with other policies at the same
budget. A speedup is the rival's time / ours, the median of paired runs. What cannot be had says `not run` and why.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.comparison import OURS, USUAL, Comparison, Run, column, details, in_turn, ratios
from bench.decoder import HITS, SEED, STEPS_MAX, WARM_STEPS, Document
from bench.parts import count, run, some_of
from bench.rivals import NotRun
from decode_worker.figures import Figure, print_json, print_table
from decode_worker.synthetic.checkpoint import B8, Q05, Shape, random_checkpoint


@dataclass(frozen=True)
class Settings:
    """Contexts are stored tokens. `stream_bytes`: how much memory the limit of `full` reads."""

    contexts: tuple[int, ...] = (8 << 10, 32 << 10, 128 << 10)
    q05_contexts: tuple[int, ...] = (8 << 10, 32 << 10)
    growth_contexts: tuple[int, int] = (32 << 10, 512 << 10)
    growth_places: int = 4096
    batch_context: int = 8 << 10
    batches: tuple[int, ...] = (1, 4, 16, 64)
    prefill_tokens: int = 8 << 10
    prefill_repeats: int = 3  # each takes most of a minute
    prefill_warm_tokens: int = 1 << 10
    million: int = 1 << 20
    steps: int = 20
    repeats: int = 5
    threads: int = min(2, len(os.sched_getaffinity(0)))
    budget: float = 0.1
    layer0: str = "resident"
    stream_bytes: int = 1 << 30
    shape: Shape = field(default_factory=lambda: B8)
    q05: Shape = field(default_factory=lambda: Q05)

    def __post_init__(self) -> None:
        if self.steps * self.repeats + WARM_STEPS > STEPS_MAX:
            raise ValueError(f"steps * repeats must be at most {STEPS_MAX - WARM_STEPS}: later steps would seal tails")
        behind = (*self.contexts, *self.q05_contexts, *self.growth_contexts, self.batch_context, self.million)
        if any(context % 256 for context in behind):
            raise ValueError("contexts must be multiples of 256, the unit in which packs hold tokens")


def main() -> int:
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m bench.decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=some_of(PARTS), default=tuple(PARTS), help="parts, such as speedup,growth")
    parser.add_argument("--contexts", type=_numbers, help="of speedup and q05, in tokens; multiples of 256")
    parser.add_argument("--steps", type=count, default=default.steps, help="steps per repeat")
    parser.add_argument("--repeats", type=count, default=default.repeats)
    parser.add_argument("--threads", type=count, default=default.threads, help="of everybody: ours, torch, llama.cpp")
    parser.add_argument(
        "--layer0", choices=("resident", "offloaded"), default=default.layer0, help="of speedup and q05"
    )
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    contexts = {"contexts": a.contexts, "q05_contexts": a.contexts} if a.contexts else {}
    figures = measure(
        Settings(steps=a.steps, repeats=a.repeats, threads=a.threads, layer0=a.layer0, **contexts), a.only
    )
    print_json(figures) if a.json else print_table("Decode steps", figures)
    return 0


def measure(settings: Settings, parts: Iterable[str]) -> list[Figure]:
    torch.set_num_threads(settings.threads)
    return [Figure("threads", settings.threads, "threads"), *run(parts, PARTS, settings)]


# --- parts ---


def speedup(settings: Settings, directory: Path) -> list[Figure]:
    return _compare(settings, directory, settings.shape, settings.contexts, "")


def q05(settings: Settings, directory: Path) -> list[Figure]:
    return _compare(settings, directory, settings.q05, settings.q05_contexts, "_q05")


def _compare(settings: Settings, directory: Path, shape: Shape, contexts: tuple[int, ...], kind: str) -> list[Figure]:
    checkpoint = random_checkpoint(directory / "model", shape, SEED)
    figures = []
    for context in contexts:
        with _document(settings, checkpoint, directory, context, layer0=settings.layer0) as document:
            comparison = Comparison(document, settings.stream_bytes)
            samples = in_turn(comparison.runs, settings.steps, settings.repeats)
            figures += comparison.figures(samples, _label(context), kind)
    return figures


def growth(settings: Settings, directory: Path) -> list[Figure]:
    """Both documents at once, so that their steps are paired. Layer 0 selects too."""
    checkpoint = random_checkpoint(directory / "model", settings.shape, SEED)
    short, long = (_label(context) for context in settings.growth_contexts)
    name = f"growth_{long}_vs_{short}"
    runs: dict[str, Run] = {}
    try:
        with contextlib.ExitStack() as stack:
            for context in settings.growth_contexts:
                document = stack.enter_context(
                    _document(settings, checkpoint, directory, context, settings.growth_places, "offloaded")
                )
                runs.update((f"{_label(context)}.{hits}", document.decoder(OURS, HITS[hits]).run) for hits in HITS)
            samples = in_turn(runs, settings.steps, settings.repeats)
    except NotRun as error:
        return [Figure.not_run(name, str(error))]
    figures = [Figure.of_runs(f"step_ms.growth.{key}", column(samples[key], "step"), "ms") for key in runs]
    figures += [figure for key in runs for figure in details(samples[key], f"growth.{key}")]
    for hits in HITS:
        grown = ratios(samples[f"{long}.{hits}"], samples[f"{short}.{hits}"])
        figures += [Figure.of_runs(each, grown, "x") for each in _names(name, hits)]
    return figures


def batch(settings: Settings, directory: Path) -> list[Figure]:
    checkpoint = random_checkpoint(directory / "model", settings.shape, SEED)
    at = _label(settings.batch_context)
    with _document(settings, checkpoint, directory, settings.batch_context) as document:
        decoders = {count: document.decoder(OURS, HITS[USUAL], count) for count in settings.batches}
        samples = in_turn({str(count): d.run for count, d in decoders.items()}, settings.steps, settings.repeats)
    rates = {count: [1000 * count / ms for ms in column(samples[str(count)], "step")] for count in settings.batches}
    alone = f"batch {settings.batches[0]}"
    figures = [
        Figure.of_runs(f"tokens_per_s.{at}.batch{count}", rates[count], "tokens/s", alone, rates[settings.batches[0]])
        for count in settings.batches
    ]
    return figures + [f for count in settings.batches for f in details(samples[str(count)], f"{at}.batch{count}")]


def prefill(settings: Settings, directory: Path) -> list[Figure]:
    """Prompts that the store has nothing of, as a worker prefills them: written to packs, indexed and committed."""
    import transformers

    checkpoint = random_checkpoint(directory / "model", settings.q05, SEED)
    rival = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    tokens, at = settings.prefill_tokens, f"q05.{_label(settings.prefill_tokens)}"
    with _document(settings, checkpoint, directory, tokens) as document, torch.inference_mode():
        engine = document.engine(OURS, HITS[USUAL])

        def run(count: int) -> tuple[float, float]:
            """Tokens per second of a prompt, ours and theirs."""
            ids = document.random_ids(count)
            started = time.perf_counter()
            session, _ = engine.prefill(ids)
            ours_s = time.perf_counter() - started
            engine.close_session(session)
            started = time.perf_counter()
            rival(input_ids=torch.tensor([ids]), use_cache=True, logits_to_keep=1)
            return count / ours_s, count / (time.perf_counter() - started)

        run(settings.prefill_warm_tokens)
        ours, theirs = zip(*(run(tokens) for _ in range(settings.prefill_repeats)), strict=True)
    ratio = [a / b for a, b in zip(ours, theirs, strict=True)]
    return [
        Figure.of_runs(f"prefill_vs_transformers.{at}", ratio, "x"),
        Figure.of_runs(f"prefill_tokens_per_s.{at}", ours, "tokens/s", "transformers", theirs),
    ]


def million(settings: Settings, directory: Path) -> list[Figure]:
    """One engine after the other: a window alone takes gigabytes."""
    name = f"step_ms.{_label(settings.million)}"
    checkpoint = random_checkpoint(directory / "model", settings.shape, SEED)
    figures = []
    try:
        with _document(settings, checkpoint, directory, settings.million) as document:
            for hits in HITS:
                decoder = document.decoder(OURS, HITS[hits])
                samples = [decoder.run(settings.steps) for _ in range(settings.repeats)]
                decoder.close()
                figures += [Figure.of_runs(each, column(samples, "step"), "ms") for each in _names(name, hits)]
                figures += details(samples, f"{_label(settings.million)}.{hits}")
    except NotRun as error:
        return [Figure.not_run(name, str(error))]
    return figures


PARTS: dict[str, Callable[[Settings, Path], list[Figure]]] = {
    part.__name__: part for part in (speedup, q05, growth, batch, prefill, million)
}


# --- what parts share ---


def _document(
    settings: Settings,
    checkpoint: Path,
    directory: Path,
    context: int,
    budget: float | None = None,
    layer0: str = "resident",
) -> Document:
    """NotRun if this machine has no room for it."""
    document = Document(
        checkpoint, directory / str(context), context,
        budget=budget or settings.budget, threads=settings.threads, layer0=layer0,
    )  # fmt: skip
    document.require_room()
    return document


def _names(name: str, hits: str) -> list[str]:
    """The figure at these hits, and the one without them where they are the usual ones."""
    return [f"{name}.{hits}"] + ([name] if hits == USUAL else [])


def _label(tokens: int) -> str:
    return f"{tokens >> 20}m" if tokens % (1 << 20) == 0 else f"{tokens >> 10}k"


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
