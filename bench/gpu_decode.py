"""How fast does a step go on a GPU, against whom, where does it go, and how near is that to what it must take?

Random weights, K and V of a model's shape; all KV in DRAM; batch b is b sessions behind one stored document. Parts
(`--only`), in this order, so that an interrupted run has the most important figures:

    main        tokens per second of every preset at 128K and 64K, with and without graph, sync=flags and sync=layer
    breakdown   a mean layer, by phase (LiteCache's figure 10)
    idle        how much of a step the device does nothing
    break_even  from which missing * budget * delta on full attention is faster
    transfer    the rate of each window by volume and copy threads (CLO's figure 13)
    prefill     against torch's plain prefill (LiteCache's figure 11)
    figure9     tokens per second by context and batch, LiteCache's grid
    figure13    the same, KVDrive's grid

Rivals of the same run: torch's own full attention as one graph, our engine under other policies, and the floor: what
the bytes of a step take at rates that are measured in the same run (bench/floors.py). `--floors` prints the floors of
assumed rates, without a device.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from bench.document import scratch
from bench.floor_tables import tables
from bench.full_attention import prefill as plain_prefill
from bench.gpu_cells import LAUNCHED, OURS, TORCH, VARIANTS, Behind, Bench, Settings, label
from bench.gpu_device import BenchDevice, Cuda, Processor
from bench.gpu_transfer import transfers
from bench.parts import count, directory, some_of
from bench.rivals import NotRun
from decode_worker.figures import Figure, print_table, report
from decode_worker.kernels.sets import KERNELS
from decode_worker.synthetic.checkpoint import B8, LLAMA3_8B, QWEN25_14B, Shape
from decode_worker.window.kinds import WINDOWS

K = 1 << 10
MIB = 1 << 20
QUICK_S = 200  # what has begun by then takes a little longer
WARM_TOKENS, PREFILLS = 1 << 10, 2
PARTS = ("main", "breakdown", "idle", "break_even", "transfer", "prefill", "figure9", "figure13")
TINY: Shape = B8 | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 64,
    "vocab_size": 256,
}  # fmt: skip
SHAPES = {"llama3-8b": LLAMA3_8B, "qwen2.5-14b": QWEN25_14B, "tiny": TINY}
POLICIES = (OURS, "lru", "infinigen", "full", "litecache")  # in this order
Cells = tuple[tuple[int, int], ...]  # (batch, context)


@dataclass(frozen=True)
class Plan:
    """What the parts run. main: context -> batches. Behind the first context, and with the first of its batches, also
    `variants` of ours and the policies that are `launched` one by one, what a step is made of, and the break-even."""

    main: dict[int, tuple[int, ...]]
    policies: tuple[str, ...] = POLICIES
    variants: tuple[str, ...] = tuple(variant for variant in VARIANTS if variant)
    launched: tuple[str, ...] = POLICIES[1:]
    examined: tuple[str, ...] = (OURS, "infinigen", "lru", "full")
    missing: tuple[float, ...] = (0.05, 0.1, 0.21, 0.5, 1.0)
    windows: tuple[str, ...] = tuple(name for name in WINDOWS.names if name != "shm")
    volumes: tuple[int, ...] = (256 * K, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
    threads: tuple[int, ...] = (1, 2, 4, 8)
    prefill: tuple[int, ...] = (8 * K, 32 * K, 128 * K)
    figure9: Cells = ()
    figure13: Cells = tuple(zip((8, 4, 4, 2, 2), (60 * K, 90 * K, 120 * K, 240 * K, 360 * K), strict=True))

    @property
    def context_max(self) -> int:
        grids = (context for cells in (self.figure9, self.figure13) for _, context in cells)
        return max(*self.main, *self.prefill, *grids)


def figure9(batches: Iterable[int], contexts: Iterable[int]) -> Cells:
    """LiteCache's: batches at 8K, and contexts at batch 1."""
    return (*((batch, 8 * K) for batch in batches), *((1, context) for context in contexts))


MAIN = {128 * K: (1, 4, 3, 8), 64 * K: (1, 4)}
PLANS = {
    "llama3-8b": Plan(MAIN, figure9=figure9((4, 8, 16, 32, 64), (32 * K, 64 * K, 128 * K, 256 * K, 512 * K))),
    "qwen2.5-14b": Plan(MAIN, figure9=figure9((2, 4, 8, 16, 32), (16 * K, 32 * K, 64 * K, 128 * K, 256 * K))),
    "tiny": Plan(
        {1024: (1, 2), 512: (1,)}, volumes=(64 * K,), threads=(1,), prefill=(512,), missing=(0.5, 1.0),
        figure9=((2, 512),), figure13=((1, 768),),
    ),
}  # fmt: skip
QUICK = {
    "policies": (OURS, "lru", "infinigen", "full"), "variants": ("-layer", LAUNCHED), "launched": (),
    "examined": (OURS, "full"), "missing": (0.1, 0.5, 1.0), "volumes": (MIB, 16 * MIB), "threads": (1, 4),
    "prefill": (8 * K,), "figure9": (), "figure13": (),
}  # fmt: skip


def main() -> int:
    arguments = _parser().parse_args()
    if arguments.floors:
        print(tables())
        return 0
    try:
        device = _device(arguments.shape, arguments.kernels)
        settings = _settings(arguments)
    except ValueError as error:
        print(f"gpu_decode: {error}", file=sys.stderr)
        return 1
    results = Results(device.name, arguments.out, arguments.seconds or (QUICK_S if arguments.quick else float("inf")))
    with scratch(arguments.directory) as directory:
        measure(settings, _plan(arguments), device, Path(directory), arguments.only, results)
    if arguments.json:
        print(results.json())
    else:
        print_table(f"Decode steps on a GPU ({device.name})", results.figures)
    for name in results.failed:
        print(f"gpu_decode: {name} failed", file=sys.stderr)
    return 1 if results.failed else 0


def _parser() -> argparse.ArgumentParser:
    default = Settings("", LLAMA3_8B)
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--only", type=some_of(PARTS), default=PARTS, help="parts, such as main,transfer")
    parser.add_argument("--quick", action="store_true", help="the most important figures, in four minutes on an H200")
    parser.add_argument("--seconds", type=float, help="begin nothing after so long")
    parser.add_argument("--hits", type=float, default=default.hits, help="label hits per lookup")
    parser.add_argument("--delta", type=float, default=default.delta, help="part of a selection that a miss fetches")
    parser.add_argument("--budget", type=float, default=default.budget, help="selected part of the stored tokens")
    parser.add_argument("--steps", type=count, default=default.steps, help="per repeat")
    parser.add_argument("--repeats", type=count, default=default.repeats)
    parser.add_argument(
        "--window", choices=("auto", *WINDOWS.names), default=default.window, help="of all parts but transfer"
    )
    parser.add_argument(
        "--copy-threads", type=count, default=default.copy_threads, help="the daemon's, but in transfer"
    )
    parser.add_argument("--kernels", choices=KERNELS.names, default="triton", help="others: to try --shape tiny")
    parser.add_argument("--directory", type=directory, default="/var/tmp", help="the disk that packs are written to")
    parser.add_argument("--out", type=Path, help="the JSON is written there too, after every figure")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--floors", action="store_true", help="print the floors of assumed rates; needs no device")
    return parser


def _device(shape: str, kernels: str) -> BenchDevice:
    """ValueError where a run would say nothing."""
    if kernels != "triton":
        if shape != "tiny":
            raise ValueError(f"--kernels {kernels} only tries the program: add --shape tiny")
        return Processor()
    if not torch.cuda.is_available():
        raise ValueError(
            "torch finds no GPU here; --floors prints what can be computed without one, "
            "--shape tiny --kernels cpu tries the program"
        )
    return Cuda()


def _settings(a: argparse.Namespace) -> Settings:
    return Settings(
        a.shape, SHAPES[a.shape], kernels=a.kernels, window=a.window, hits=a.hits, delta=a.delta, budget=a.budget,
        steps=a.steps, repeats=a.repeats, copy_threads=min(a.copy_threads, len(os.sched_getaffinity(0))),
    )  # fmt: skip


def _plan(a: argparse.Namespace) -> Plan:
    plan = PLANS[a.shape]
    if a.kernels != "triton":
        plan = replace(plan, windows=("shm",))
    if a.quick and a.shape != "tiny":
        plan = replace(plan, main={128 * K: (1, 4), 64 * K: (1, 4)}, **QUICK)
    return plan


@dataclass
class Results:
    """Figures as they come, on stderr and in the file `out`; `failed`: what an error ended."""

    device: str
    out: Path | None = None
    seconds: float = float("inf")
    figures: list[Figure] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._started = time.monotonic()

    def json(self) -> str:
        return json.dumps({"device": self.device, "failed": self.failed, **report(self.figures)}, indent=2)

    def take(self, name: str, figures: Callable[[], Iterable[Figure]], *ends: type[BaseException]) -> None:
        """All of them, or as a figure why not. ends: errors that are an answer, such as too little memory."""
        try:
            if time.monotonic() - self._started > self.seconds:
                raise NotRun("the time that --seconds gives is over")
            for figure in figures():
                self.add(figure)
        except NotRun as error:
            self.add(Figure.not_run(name, str(error)))
        except Exception as error:
            if not isinstance(error, ends):
                traceback.print_exc()
                self.failed.append(name)
            line = (str(error).splitlines() or [""])[0]
            self.add(
                Figure.not_run(name, f"{'out of memory' if isinstance(error, ends) else type(error).__name__}: {line}")
            )

    def add(self, figure: Figure) -> None:
        self.figures.append(figure)
        shown = figure.unit if figure.value is None else f"{figure.value:.5g} {figure.unit}"
        beside = f" ({figure.ratio:.3g} x {figure.rival})" if figure.ratio is not None else ""
        print(f"{time.monotonic() - self._started:6.1f} s  {figure.name}: {shown}{beside}", file=sys.stderr, flush=True)
        if self.out is not None:
            part = self.out.with_suffix(".part")
            part.write_text(self.json() + "\n")
            part.replace(self.out)


# --- what is run, in which order ---


def measure(
    settings: Settings, plan: Plan, device: BenchDevice, directory: Path, parts: Iterable[str], results: Results
) -> None:
    rates = device.rates()
    results.add(Figure("rate_gbps.memory", rates.memory_gbps, "GB/s, read and written, of a copy within the device"))
    results.add(Figure("rate_gbps.bus", rates.bus_gbps, "GB/s, of a copy from pinned memory"))
    results.add(Figure("launch_us", rates.launch_us, "us, of a launch in a graph that does nothing"))
    bench = Bench(settings, device, rates, directory, plan.context_max)
    for run in _groups(bench, plan, set(parts), results):
        run()


Task = tuple[str, Callable[[Behind], Iterable[Figure]]]  # a figure's name, and where it comes from


def _groups(bench: Bench, plan: Plan, parts: set[str], results: Results) -> Iterator[Callable[[], None]]:
    """Everything behind one document at once: storing it takes longer than most of what is measured behind it."""
    shape = bench.settings.shape_name
    first, *others = plan.main
    yield partial(_behind, bench, first, _first_tasks(shape, plan, first, parts), results)
    if "transfer" in parts:
        moved = partial(transfers, bench, plan.windows, plan.volumes, plan.threads)
        yield partial(results.take, "transfer_gbps", moved, bench.device.out_of_memory)
    if "main" in parts:
        for context in others:
            tasks = [task for batch in plan.main[context] for task in _cells(shape, plan, context, batch)]
            yield partial(_behind, bench, context, tasks, results)
    if "prefill" in parts:
        for context in plan.prefill:
            name = f"prefill_ratio.{shape}.{label(context)}"
            yield partial(results.take, name, partial(_prefill, bench, context), bench.device.out_of_memory)
    seen = {(batch, context) for context in plan.main for batch in plan.main[context]} if "main" in parts else set()
    for part, cells in (("figure9", plan.figure9), ("figure13", plan.figure13)):
        if part in parts:
            for context in dict.fromkeys(context for _, context in cells):
                batches = [batch for batch, at in cells if at == context and (batch, context) not in seen]
                tasks = [task for batch in batches for task in _cells(shape, plan, context, batch)]
                yield partial(_behind, bench, context, tasks, results)


def _behind(bench: Bench, context: int, tasks: list[Task], results: Results) -> None:
    end = bench.device.out_of_memory

    def run() -> Iterable[Figure]:
        with Behind(bench, context) as behind:
            for name, figures in tasks:
                results.take(name, partial(figures, behind), end)
        return ()

    if tasks:
        results.take(f"document.{bench.settings.shape_name}.{label(context)}", run, end)


def _first_tasks(shape: str, plan: Plan, context: int, parts: set[str]) -> list[Task]:
    at, tasks = label(context), list[Task]()
    first, *others = plan.main[context]
    if "main" in parts:
        variants = [(OURS, variant) for variant in plan.variants] + [(each, LAUNCHED) for each in plan.launched]
        tasks += _cells(shape, plan, context, first, variants)
    if "breakdown" in parts:
        tasks += [
            (f"breakdown_us.{shape}.{policy}.{at}", lambda behind, policy=policy: behind.breakdown(policy))
            for policy in plan.examined
        ]
    if "idle" in parts:
        tasks += [
            (f"idle_share.{shape}.{policy}.{first}.{at}", lambda behind, policy=policy: behind.idle(policy, first))
            for policy in plan.examined
        ]
    if "break_even" in parts:
        if "main" not in parts:
            tasks.append(_cell(shape, at, "full", first))
        tasks.append((f"break_even.{shape}.{at}", lambda behind: behind.break_even(plan.missing)))
    if "main" in parts:
        tasks += [task for batch in others for task in _cells(shape, plan, context, batch)]
    return tasks


def _cells(shape: str, plan: Plan, context: int, batch: int, variants: Iterable[tuple[str, str]] = ()) -> list[Task]:
    at = label(context)
    return [
        *(_cell(shape, at, policy, batch) for policy in plan.policies),
        (f"tokens_per_s.{shape}.{TORCH}.{batch}.{at}", lambda behind: behind.theirs(batch)),
        *(_cell(shape, at, policy, batch, variant) for policy, variant in variants),
        (f"tokens_per_s.{shape}.{OURS}.{batch}.{at}", lambda behind: behind.rivals(batch)),
    ]


def _cell(shape: str, at: str, policy: str, batch: int, variant: str = "") -> Task:
    name = f"tokens_per_s.{shape}.{policy}{variant}.{batch}.{at}"
    return name, lambda behind: behind.ours(policy, batch, variant)


def _prefill(bench: Bench, context: int) -> Iterator[Figure]:
    """Prompts that the store has nothing of: computed, stored and indexed, beside computing them in one go."""
    ours, theirs = [], []
    with bench.document(context) as document:
        engine = document.engine(OURS, bench.settings.load.missing)
        for tokens in (min(context, WARM_TOKENS), *[context] * PREFILLS):
            ids = document.random_ids(tokens)
            started = time.perf_counter()
            session, _ = engine.prefill(ids)
            ours.append(tokens / (time.perf_counter() - started))
            engine.close_session(session)
            prompt = torch.tensor(ids, device=bench.device.torch_device)
            bench.device.wait()
            started = time.perf_counter()
            plain_prefill(bench.model, prompt)
            bench.device.wait()
            theirs.append(tokens / (time.perf_counter() - started))
    at = f"{bench.settings.shape_name}.{label(context)}"
    ours, theirs = ours[1:], theirs[1:]
    yield Figure.of_runs(f"prefill_tokens_per_s.{at}", ours, "tokens/s", "torch's plain prefill", theirs)
    yield Figure.of_runs(f"prefill_ratio.{at}", [a / b for a, b in zip(ours, theirs, strict=True)], "x torch's")


if __name__ == "__main__":
    sys.exit(main())
