"""Cells behind one stored document on a GPU: a policy, a number of sessions, a way to launch; and what a step of each
is made of."""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from bench.comparison import column
from bench.decoder import (
    DRAM_SHARE,
    DRAM_SPARE,
    SPARE_TOKENS,
    STEPS_MAX,
    WARM_STEPS,
    Decoder,
    Document,
    Sample,
    available_memory,
)
from bench.floors import FULL, Cell, Load, Model, Rates, break_even, crossing
from bench.full_attention import FullAttention
from bench.gpu_device import BenchDevice, Step, idle_share, launch_gaps
from bench.rivals import NotRun
from decode_worker.engine.step import DecodeLoop, Launch
from decode_worker.figures import Figure
from decode_worker.model.transformer import Transformer
from decode_worker.policy.presets import PRESETS
from decode_worker.synthetic.checkpoint import Shape
from decode_worker.synthetic.weights import DrawnCheckpoint

OURS = "qsac"
TORCH = "torch"  # its own full attention
ATTEND = "attend"
# How a step is launched, by the end of a preset's name in figures; no end: one graph, the host waits for nothing.
LAUNCHED = "-launched"
VARIANTS: dict[str, dict[str, str]] = {
    "": {},
    LAUNCHED: {"graph": "off"},
    "-layer": {"sync": "layer"},
    "-layer-launched": {"sync": "layer", "graph": "off"},
}
# Ours is to be at least so many times as fast, from so many tokens on.
GOALS = {
    "lru": (2.0, 128 << 10),
    "infinigen": (1.5, 128 << 10),
    "full": (1.0, 64 << 10),
    TORCH: (1.0, 64 << 10),
    f"{OURS}-layer": (1.3, 128 << 10),
    f"{OURS}-layer-launched": (1.3, 128 << 10),
}
GAPS_MAX = 0.02


@dataclass(frozen=True)
class Settings:
    """`shape_name` stands in figures. hits: label hits per lookup under a policy that reuses sets. delta: part of a
    selection that a miss fetches, as near as the stream of tokens allows."""

    shape_name: str
    shape: Shape
    kernels: str = "triton"
    window: str = "auto"
    hits: float = 0.79
    delta: float = 0.5
    budget: float = 0.1
    steps: int = 20
    repeats: int = 5
    few_steps: int = 8  # of calibration, breakdown, trace and transfer
    warm_steps: int = WARM_STEPS
    copy_threads: int = 4
    staging_bytes: int = 256 << 20
    daemon_options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        most = STEPS_MAX - self.warm_steps - 2 * self.few_steps - 1
        if self.steps * self.repeats > most:
            raise ValueError(f"steps * repeats must be at most {most}: later steps would seal tails")
        for name in ("hits", "delta", "budget"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be above 0 and at most 1")

    @property
    def load(self) -> Load:
        return Load(missing=1 - self.hits, delta=self.delta, budget=self.budget)

    @property
    def worker(self) -> dict[str, Any]:
        return {
            "kernels": self.kernels, "window": self.window, "budget": self.budget, "staging_bytes": self.staging_bytes
        }  # fmt: skip


class Bench:
    """What all parts share. The weights are drawn once, for `context_max` tokens."""

    def __init__(
        self, settings: Settings, device: BenchDevice, rates: Rates, directory: Path, context_max: int
    ) -> None:
        self.settings, self.device, self.rates, self.directory = settings, device, rates, directory
        self.sizes = Model.of(settings.shape)
        self.checkpoint = DrawnCheckpoint.of(directory / "model", settings.shape, seed=1)
        self._context_max = context_max
        self._model: Transformer | None = None

    @property
    def model(self) -> Transformer:
        if self._model is None:
            self.require(self.sizes.held_bytes)
            declared = self._context_max + SPARE_TOKENS
            self._model = Transformer.load(self.checkpoint, declared, torch.bfloat16, self.device.torch_device)
        return self._model

    def document(self, context: int) -> Document:
        """NotRun if this machine has no room for it."""
        disk_bytes = int(context * self.sizes.kv_token_bytes * DRAM_SHARE) + DRAM_SPARE
        options = (
            f"--copy-threads={self.settings.copy_threads}", f"--nvme-bytes={disk_bytes}", *self.settings.daemon_options
        )  # fmt: skip
        document = Document(
            self.checkpoint, self.directory / f"at-{context}", context, daemon_options=options, alike=True,
            **self.settings.worker,
        )  # fmt: skip
        document.model = self.model
        document.require_room()
        return document

    def require(self, needed_bytes: int) -> None:
        """NotRun unless the device has so much left."""
        gc.collect()  # an engine that is closed leaves its tensors in cycles
        free = self.device.free_bytes()
        if needed_bytes > free:
            raise NotRun(f"out of memory: {needed_bytes:,} bytes needed on the device, {free:,} are free")


class Behind:
    """Cells behind `context` stored tokens. Context manager; `samples` has those that ran, by (name, batch)."""

    def __init__(self, bench: Bench, context: int) -> None:
        self._bench, self._context = bench, context
        self.at = label(context)
        self.samples: dict[tuple[str, int], Sequence[Sample]] = {}
        self._fresh: float | None = None

    def __enter__(self) -> Behind:
        with contextlib.ExitStack() as stack:
            self._document = stack.enter_context(self._bench.document(self._context))
            self._resources = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._resources.close()

    # --- cells ---

    def ours(self, policy: str, batch: int, variant: str = "") -> Iterator[Figure]:
        """tokens_per_s and what belongs to it; NotRun where it does not fit."""
        with self._decoder(policy, batch, **VARIANTS[variant]) as decoder:
            samples = self._runs(decoder)
            device_bytes = batch * decoder.device_bytes
        name = policy + variant
        self.samples[name, batch] = samples
        floor = self._cell(policy, batch).tokens_per_s(self._bench.rates)
        yield self._figure("tokens_per_s", name, batch, self.rate(name, batch), "tokens/s", "floor", floor)
        yield Figure(self._named("device_bytes", name, batch), device_bytes, "B")
        for what, unit in (("hit_ratio", "hits / lookups"), ("delta", "fetched / selected"), ("moved", "records/step")):
            yield self._figure(what, name, batch, column(samples, what), unit)
        for who in ("worker", "daemon"):
            ms = column(samples, f"{who}_cpu")
            yield Figure(self._named(f"cpu_ms.{who}", name, batch), sum(ms) / len(ms), "ms/step", runs=len(ms))

    def theirs(self, batch: int) -> Iterator[Figure]:
        """torch's full attention, as one graph."""
        bench, settings = self._bench, self._bench.settings
        bench.require(batch * self._context * bench.sizes.kv_token_bytes)
        rival = FullAttention(bench.model, batch, self._context)
        rival.step()
        step = bench.device.graphed(rival.step)

        self.samples[TORCH, batch] = [{"step": self._mean_ms(step)} for _ in range(settings.repeats)]
        floor = self._cell(FULL, batch).tokens_per_s(bench.rates)
        yield self._figure("tokens_per_s", TORCH, batch, self.rate(TORCH, batch), "tokens/s", "floor", floor)

    def rivals(self, batch: int) -> Iterator[Figure]:
        """Ours beside every other one that ran, and how near that is to what was set as a goal."""
        if (OURS, batch) not in self.samples:
            return
        ours = self.rate(OURS, batch)
        for name, of in self.samples:
            if of != batch or name == OURS:
                continue
            beside = self._figure("tokens_per_s", OURS, batch, ours, "tokens/s", name, self.rate(name, batch))
            yield beside
            goal, first = GOALS.get(name, (0.0, 0))
            if goal and self._context >= first and beside.ratio is not None:
                what = self._named("goal", name, batch)
                yield Figure(what, beside.ratio, f"x {name}", "at least", goal, beside.ratio / goal)

    def rate(self, name: str, batch: int) -> list[float]:
        """Tokens per second of each run."""
        return [1000 * batch / ms for ms in column(self.samples[name, batch], "step")]

    # --- what a step is made of ---

    def breakdown(self, policy: str) -> Iterator[Figure]:
        """Batch 1, a mean layer (LiteCache's figure 10). Nothing is waited for between launches, so that none of the
        time is the host's."""
        bench, layers = self._bench, self._bench.sizes.layers
        with self._decoder(policy, 1, graph="off") as decoder:
            spent = phases_us(decoder, bench.device, bench.settings.few_steps)
        cell = self._cell(policy, 1)
        for phase, us in spent.items():
            name = f"breakdown_us.{bench.settings.shape_name}.{policy}.{self.at}.{phase}"
            if phase == ATTEND:
                floor = cell.attended_bytes / bench.rates.memory_gbps / 1e3
                yield Figure(name, us / layers, "us/layer", "floor of its bytes", floor / layers, us / floor)
            else:
                yield Figure(name, us / layers, "us/layer")

    def idle(self, policy: str, batch: int) -> Iterator[Figure]:
        """How much of a step the device does nothing; of a trace, or, where there is none, of the sum of the phases."""
        device, steps = self._bench.device, self._bench.settings.few_steps
        with self._decoder(policy, batch) as decoder:
            spans = device.trace(lambda: decoder.run(steps))
            step_us = 1000 * decoder.run(steps)["step"]
        if spans:
            yield Figure(self._named("idle_share", policy, batch), idle_share(spans), "of a step, traced")
            gaps, name = launch_gaps(spans, steps), self._named("launch_gaps", policy, batch)
            yield Figure(name, gaps, "of a step, traced", "at most", GAPS_MAX, gaps / GAPS_MAX)
            return
        with self._decoder(policy, batch, graph="off") as decoder:
            busy_us = sum(phases_us(decoder, device, steps).values())
        idle = max(0.0, 1 - busy_us / step_us)
        yield Figure(self._named("idle_share", policy, batch), idle, "of a step, without a trace")

    def break_even(self, missing: Sequence[float]) -> Iterator[Figure]:
        """From which missing * budget * delta on, the part of offloaded KV that takes the bus in a step, full
        attention is faster: computed, and where the line through measured steps reaches that of `full`. Batch 1."""
        bench = self._bench
        name = f"break_even.{bench.settings.shape_name}.{self.at}"
        full = next((key for key in ((FULL, 1), (TORCH, 1)) if key in self.samples), None)
        if full is None:
            raise NotRun("neither full nor torch has run behind this context")
        points, heads = [], self._cell(OURS, 1).offloaded_heads
        for part in missing:
            with self._decoder(OURS, 1, missing=part) as decoder:
                sample = decoder.run(bench.settings.steps)
            points.append((sample["moved"] / (heads * self._context), sample["step"]))
            yield Figure(f"step_ms.{bench.settings.shape_name}.missing{part:g}.{self.at}", sample["step"], "ms")
        full_ms = sum(column(self.samples[full], "step")) / len(self.samples[full])
        found = crossing(sorted(points), full_ms)
        computed = bench.rates.break_even
        beside = break_even(self._cell(OURS, 1), bench.rates, self._cell(FULL, 1).step_us(bench.rates))
        if found is None:
            seen = ", ".join(f"{x:.4f}: {ms:.3g} ms" for x, ms in sorted(points))
            yield Figure.not_run(name, f"no crossing of full's {full_ms:.3g} ms ({seen}); computed {computed:.4f}")
            return
        unit = "missing * budget * delta"
        yield Figure(name, found, unit, "B_pcie / B_hbm", computed, found / computed)
        yield Figure(name, found, unit, "the same, weights counted", beside, found / beside)

    # ---

    def _calibrate(self, decoder: Decoder) -> float:
        """How often a step must take a new token for the wanted delta, from steps that all do and that none does."""
        wanted, steps = self._bench.settings.delta, self._bench.settings.few_steps
        decoder.fresh = 1.0
        new = decoder.run(steps)["delta"]
        decoder.fresh = 0.0
        decoder.run(1)
        old = decoder.run(steps)["delta"]
        return min(1.0, max(0.0, (wanted - old) / (new - old))) if new > old else 1.0

    @contextlib.contextmanager
    def _decoder(self, policy: str, batch: int, missing: float | None = None, **settings: Any) -> Iterator[Decoder]:
        if self._fresh is None and policy not in (OURS, FULL):
            with self._decoder(OURS, 1):
                pass  # calibrates
        bench, cell = self._bench, self._cell(policy, batch)
        bench.require(cell.device_bytes - bench.sizes.held_bytes)
        landing, free = batch * cell.geometry.slot_bytes, available_memory()
        if landing > free:
            raise NotRun(f"out of memory: windows take {landing:,} bytes of the host's, {free:,} are available")
        part = bench.settings.load.missing if missing is None else missing
        decoder = self._document.decoder(
            policy, part if PRESETS[policy].reuse == "label" else 1.0, batch, bench.settings.warm_steps, **settings
        )  # fmt: skip
        try:
            if self._fresh is None and policy == OURS:
                self._fresh = self._calibrate(decoder)
            decoder.fresh = 1.0 if self._fresh is None else self._fresh
            yield decoder
        finally:
            decoder.close()

    def _mean_ms(self, step: Step) -> float:
        device, steps = self._bench.device, self._bench.settings.steps
        device.wait()
        started = time.perf_counter()
        for _ in range(steps):
            step()
        device.wait()
        return 1000 * (time.perf_counter() - started) / steps

    def _runs(self, decoder: Decoder) -> list[Sample]:
        settings = self._bench.settings
        return [decoder.run(settings.steps) for _ in range(settings.repeats)]

    def _cell(self, policy: str, batch: int) -> Cell:
        return Cell(self._bench.sizes, policy, batch, self._context, self._bench.settings.load)

    def _named(self, what: str, name: str, batch: int) -> str:
        return f"{what}.{self._bench.settings.shape_name}.{name}.{batch}.{self.at}"

    def _figure(
        self, what: str, name: str, batch: int, values: Sequence[float], unit: str, rival: str | None = None,
        rival_values: Sequence[float] | float = (),
    ) -> Figure:  # fmt: skip
        if isinstance(rival_values, float):
            rival_values = [rival_values] * len(values)
        return Figure.of_runs(self._named(what, name, batch), values, unit, rival, rival_values)


def label(context: int) -> str:
    """A number of tokens, as it stands in the names of figures."""
    return str(context) if context % 1024 else f"{context // 1024}k"


def phases_us(decoder: Decoder, device: BenchDevice, steps: int) -> dict[str, float]:
    """Phase of a step -> its microseconds on the device, means over the steps. For an engine without graphs."""
    marks: list[tuple[str, Any]] = []

    def marked(launch: Launch) -> Launch:
        def call(*arguments: Any) -> None:
            launch.call(*arguments)
            marks.append((launch.phase, device.mark()))

        return replace(launch, call=call)

    def begin() -> None:
        device.hold()
        marks.append(("", device.mark()))

    with _lines(decoder.engine.loop, lambda line: [Launch("", 0, begin, ()), *map(marked, line)]):
        decoder.run(steps)
    device.wait()
    spent: Counter[str] = Counter()
    for (_, before), (phase, mark) in pairwise(marks):
        if phase:
            spent[phase] += device.us_between(before, mark)
    return {phase: us / steps for phase, us in spent.items()}


@contextlib.contextmanager
def _lines(loop: DecodeLoop, change: Callable[[list[Launch]], list[Launch]]) -> Iterator[None]:
    """The loop's lines of launches, changed."""
    line = loop.line
    with patch.object(loop, "line", lambda rows: change(line(rows))):
        yield
