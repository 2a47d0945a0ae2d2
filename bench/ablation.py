"""What does each part of the tiers save of what a step reads from the disk? KVDrive's figure 21, part by part.

DRAM holds a quarter of the document's KV. Each step adds one part to those before it:

    token      records in the order of tokens; nothing between wanted blocks is read; DRAM begins empty
    pack       important records first, then by cluster
    gaps       gaps are read through where that costs an ordinary disk less than a request
    seed       a prompt's graded blocks are kept in DRAM as they are written; random K and V have no prompt
    lookahead  what the next layer's misses will want is read ahead
    learnt     the packs are rewritten in an order learnt from the first half of the run

A run has two halves, each over sessions of its own: the first begins right after the document was stored; then it is
repeated, uncounted, and the second follows. Per trace (`demo`, `drifting`, `random`: those of bench.tiers) and step:

    read_per_moved.TRACE.STEP        bytes from the disk per byte of records that reached a window
    first_read_per_moved.TRACE.STEP  the same in the first half
    useful_per_moved.TRACE.STEP      of it, without what lies in gaps
    disk_ms.TRACE.STEP               of a decode step, at an ordinary disk's cost: a count, not a time
    wait_ms.TRACE.STEP               of a decode step, that it waited for records; step_ms: all of it
    blocks_per_moved.TRACE.STEP      bytes of wanted blocks per byte of records: what would be read without DRAM
    floor.TRACE.STEP                 of these, what the best placement that never changes leaves to the disk

The last two are of the trace of the second half. The rival of each is `token`. What binding a session moves and reads
is in none of them.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bench.decoder import SEED, Document
from bench.document import counters, scratch
from bench.parts import count, some_of
from bench.placement import best_static
from bench.questions import Questions, counted, open_questions
from bench.rivals import NotRun
from bench.traces import Listener, Trace, retier
from decode_worker.figures import Figure, print_json, print_table
from decode_worker.records import RecordFormat
from decode_worker.synthetic.checkpoint import B8, Shape, random_checkpoint
from kvstore_service._native import BLOCK_BYTES, DISK_COST
from kvstore_service.client.private import PrivateDaemon

LEARN_BYTES = 256 << 20
RIVAL = "token"
UNITS = {
    "read_per_moved": "B/B", "first_read_per_moved": "B/B", "useful_per_moved": "B/B", "blocks_per_moved": "B/B",
    "floor": "B/B", "disk_ms": "ms/step", "wait_ms": "ms/step", "step_ms": "ms/step",
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """How daemon and worker are set."""

    order: str = "pack"
    disk_cost: str = ",".join(map(str, DISK_COST))  # not measured: reads are to be the same everywhere
    importance: str = "none"
    lookahead: str = "off"
    learns: bool = False

    @property
    def options(self) -> tuple[str, ...]:
        return (f"--disk-cost={self.disk_cost}", f"--learn-bytes={self.learns * LEARN_BYTES}")

    @property
    def settings(self) -> dict[str, Any]:
        return {"order": self.order, "importance": self.importance, "lookahead": self.lookahead}


STEPS = {
    "token": Step("token", "off"),
    "pack": Step(disk_cost="off"),
    "gaps": Step(),
    "seed": Step(importance="head"),
    "lookahead": Step(importance="head", lookahead="next"),
    "learnt": Step(importance="head", lookahead="next", learns=True),
}
NEED_A_PROMPT = ("seed",)


@dataclass(frozen=True)
class Settings:
    """`dram`: part of the KV. `questions` and `decoded` are of both halves together."""

    dram: float = 0.25
    tokens: int = 8 << 10
    questions: int = 20
    demo_budget: float = 0.1
    shape: Shape = field(default_factory=lambda: B8)
    decoded: int = 80
    budget: float = 0.0156
    repeats: int = 1


def main() -> int:
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m bench.ablation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=some_of(TRACES), default=tuple(TRACES), help="traces, such as demo,random")
    parser.add_argument("--tokens", type=count, default=default.tokens)
    parser.add_argument("--questions", type=count, default=default.questions, help="of demo")
    parser.add_argument("--steps", type=count, default=default.decoded, help="of drifting and random")
    parser.add_argument("--dram", type=float, default=default.dram, help="part of the KV")
    parser.add_argument("--repeats", type=count, default=default.repeats)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    settings = Settings(a.dram, a.tokens, a.questions, decoded=a.steps, repeats=a.repeats)
    figures = measure(settings, a.only)
    print_json(figures) if a.json else print_table("What the tiers' parts save", figures)
    return 0


def measure(settings: Settings, traces: Sequence[str]) -> list[Figure]:
    figures: list[Figure] = []
    for trace in traces:
        started = time.monotonic()
        found: dict[str, list[dict[str, float]]] = defaultdict(list)
        missing = {} if trace == "demo" else dict.fromkeys(NEED_A_PROMPT, "random K and V have no prompt")
        for _ in range(settings.repeats):
            for name, step in STEPS.items():
                if name not in missing:
                    with scratch() as directory, TRACES[trace](settings, step, Path(directory)) as run:
                        try:
                            found[name].append(_halves(run, step))
                        except NotRun as error:
                            missing[name] = str(error)
        for name in STEPS:
            figures += _figures(f"{trace}.{name}", found[name], found[RIVAL], missing.get(name))
        print(f"{trace}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return figures


def _figures(
    at: str, samples: Sequence[dict[str, float]], rivals: Sequence[dict[str, float]], missing: str | None
) -> Iterator[Figure]:
    for of, unit in UNITS.items():
        if missing is not None:
            yield Figure.not_run(f"{of}.{at}", missing)
            continue
        ours, theirs = ([sample[of] for sample in each] for each in (samples, rivals))
        rival = RIVAL if samples is not rivals and all(theirs) else None
        yield Figure.of_runs(f"{of}.{at}", ours, unit, rival, theirs)


class Run(Protocol):
    """A stored document behind which each half can be decoded, 0 or 1, once or again."""

    daemon: PrivateDaemon
    record_bytes: int

    def half(self, number: int) -> Counter[str]:
        """What its decode steps took."""


def _halves(run: Run, step: Step) -> dict[str, float]:
    """NotRun if no order was learnt."""
    first = run.half(0)
    if step.learns:
        try:
            retier(run.daemon)
        except RuntimeError as error:
            raise NotRun(str(error)) from None
    run.half(0)
    with Listener(run.daemon) as listener:
        second = run.half(1)
    moved, steps = second["records_moved"] * run.record_bytes, second["steps"]
    request_us, kib_us, _ = DISK_COST
    read_us = request_us * second["nvme_read_ops"] + kib_us * second["nvme_read_bytes"] / 1024
    wanted, missed = _wanted(listener.accesses(), counters(run.daemon)["frames"])
    return {
        "read_per_moved": second["nvme_read_bytes"] / moved,
        "first_read_per_moved": first["nvme_read_bytes"] / (first["records_moved"] * run.record_bytes),
        "useful_per_moved": (second["nvme_read_bytes"] - second["nvme_through_bytes"]) / moved,
        "disk_ms": read_us / 1000 / steps,
        "wait_ms": second["arrive"] / 1e6 / steps,
        "step_ms": second["ns"] / 1e6 / steps,
        "blocks_per_moved": wanted * BLOCK_BYTES / moved,
        "floor": missed * BLOCK_BYTES / moved,
    }


def _wanted(accesses: NDArray[np.void], frames: int) -> tuple[int, int]:
    """Blocks that tickets wanted, and of them those in extents that the best static placement has not in DRAM."""
    trace = Trace("", accesses[accesses["bulk"] == 0], 0)
    blocks = np.bitwise_count(trace.accesses["wanted"])
    return int(blocks.sum()), int(blocks[~best_static(trace.keys, frames, blocks)].sum())


# --- traces ---


class _Demo:
    """Each half asks every second question."""

    def __init__(self, questions: Questions) -> None:
        self.daemon, self.record_bytes, self._questions = questions.daemon, questions.record_bytes, questions

    def half(self, number: int) -> Counter[str]:
        return self._questions.ask(self._questions.facts[number::2])


@contextlib.contextmanager
def _demo(settings: Settings, step: Step, directory: Path) -> Iterator[Run]:
    asked = settings.tokens, settings.questions, settings.dram
    with open_questions(directory, *asked, step.options, budget=settings.demo_budget, **step.settings) as questions:
        yield _Demo(questions)


class _Random:
    """A random model decodes behind random keys, each half in a session of its own; `fresh` of its tokens are new."""

    def __init__(self, document: Document, fresh: float, steps: int) -> None:
        self.daemon, self._document, self._fresh, self._steps = document.daemon, document, fresh, steps
        heads, dim = int(document.shape["num_key_value_heads"]), int(document.shape["head_dim"])
        self.record_bytes = RecordFormat(heads, dim, "bfloat16").record_bytes

    def half(self, number: int) -> Counter[str]:
        with contextlib.closing(self._document.decoder("qsac", warm_steps=0)) as decoder:
            decoder.fresh = self._fresh
            with counted(self.daemon, decoder.engine, self._steps) as taken:
                decoder.run(self._steps)
        return taken


@contextlib.contextmanager
def _random(fresh: float, settings: Settings, step: Step, directory: Path) -> Iterator[Run]:
    checkpoint = random_checkpoint(directory / "model", settings.shape, SEED)
    with Document(
        checkpoint, directory, settings.tokens, daemon_options=step.options, dram_share=settings.dram,
        read=False, budget=settings.budget, layer0="offloaded", **step.settings,
    ) as document:  # fmt: skip
        yield _Random(document, fresh, settings.decoded // 2)


TRACES: dict[str, Callable[[Settings, Step, Path], contextlib.AbstractContextManager[Run]]] = {
    "demo": _demo,
    "drifting": partial(_random, 0.1),
    "random": partial(_random, 1.0),
}


if __name__ == "__main__":
    sys.exit(main())
