"""What a benchmark of the GPU path asks of the device beside launching on it: time, memory, rates, a trace."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from bench.decoder import available_memory
from bench.floors import Rates
from decode_worker.figures import machine

HOLD_CYCLES = 120_000_000  # 60 ms at 2 GHz: the host launches a whole step meanwhile
REPEATS = 7
Step = Callable[[], object]


@dataclass(frozen=True)
class Span:
    """A kernel or copy that ran, microseconds of the device's clock."""

    name: str
    start_us: float
    end_us: float


class BenchDevice(ABC):
    """`name` stands in every report. `out_of_memory`: what it raises then. `copy_bytes`, `launches`: of one copy and
    one graph that `rates` times."""

    name: str
    torch_device: torch.device
    out_of_memory: type[BaseException]
    copy_bytes: int
    launches = 500

    @abstractmethod
    def free_bytes(self) -> int: ...

    @abstractmethod
    def wait(self) -> None:
        """Until all that was launched has ended."""

    @abstractmethod
    def hold(self) -> None:
        """What is launched next starts a while later, so that the host is ahead of it."""

    @abstractmethod
    def mark(self) -> Any:
        """A point in the order of launches."""

    @abstractmethod
    def us_between(self, first: Any, second: Any) -> float:
        """Of two marks that were reached."""

    @abstractmethod
    def graphed(self, step: Step) -> Step:
        """The same launches as one graph."""

    @abstractmethod
    def pinned(self, size_bytes: int) -> torch.Tensor:
        """Host memory, uint8, from which copies are fastest."""

    @abstractmethod
    def trace(self, run: Step) -> list[Span]:
        """What the device did during `run`, in order; empty where it cannot be traced."""

    def seconds(self, launch: Step) -> float:
        """Median of one call, waited for."""
        launch()
        samples = []
        for _ in range(REPEATS):
            self.wait()
            started = time.perf_counter()
            launch()
            self.wait()
            samples.append(time.perf_counter() - started)
        return statistics.median(samples)

    def rates(self) -> Rates:
        """Measured now. A copy within the device's memory reads and writes; both count."""
        size = self.copy_bytes
        source, target = (torch.zeros(size, dtype=torch.uint8, device=self.torch_device) for _ in range(2))
        memory = 2 * size / self.seconds(lambda: target.copy_(source)) / 1e9
        host = self.pinned(size)
        bus = size / self.seconds(lambda: target.copy_(host, non_blocking=True)) / 1e9
        number = torch.zeros(1, device=self.torch_device)

        def launches() -> None:
            for _ in range(self.launches):
                number.add_(1)

        launches()
        launch_us = self.seconds(self.graphed(launches)) / self.launches * 1e6
        return Rates(memory, bus, launch_us, f"measured in this run on {self.name}")


class Cuda(BenchDevice):
    """The first GPU that torch sees."""

    torch_device = torch.device("cuda", 0)
    out_of_memory = torch.OutOfMemoryError
    copy_bytes = 1 << 30

    def __init__(self) -> None:
        self.name = f"{torch.cuda.get_device_name(0)}, beside {machine()}"

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(0)[0])

    def wait(self) -> None:
        torch.cuda.synchronize(0)

    def hold(self) -> None:
        torch.cuda._sleep(HOLD_CYCLES)

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def us_between(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second)) * 1000

    def graphed(self, step: Step) -> Step:
        graph = torch.cuda.CUDAGraph()
        self.wait()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    def pinned(self, size_bytes: int) -> torch.Tensor:
        return torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=True)

    def trace(self, run: Step) -> list[Span]:
        with tempfile.TemporaryDirectory(prefix="headgate-trace-") as directory:
            path = Path(directory) / "trace.json"
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                run()
                self.wait()
            profile.export_chrome_trace(str(path))
            return spans_of(json.loads(path.read_text()))


class Processor(BenchDevice):
    """No device at all: a benchmark is tried here, and no figure of it means anything."""

    torch_device = torch.device("cpu")
    out_of_memory = MemoryError
    copy_bytes = 1 << 24

    def __init__(self) -> None:
        self.name = f"none: the program is tried on {machine()}, no figure means anything"

    def free_bytes(self) -> int:
        return available_memory()

    def wait(self) -> None: ...

    def hold(self) -> None: ...

    def mark(self) -> Any:
        return time.perf_counter_ns()

    def us_between(self, first: Any, second: Any) -> float:
        return float(second - first) / 1000

    def graphed(self, step: Step) -> Step:
        return step

    def pinned(self, size_bytes: int) -> torch.Tensor:
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def trace(self, run: Step) -> list[Span]:
        run()
        return []


# --- traces ---

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def spans_of(trace: dict[str, Any]) -> list[Span]:
    """Of a Chrome trace as torch's profiler writes it: what ran on the device, by its start."""
    events = (event for event in trace["traceEvents"] if event.get("cat") in _ON_DEVICE)
    spans = (Span(str(event["name"]), float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in events)
    return sorted(spans, key=lambda span: span.start_us)


def busy_us(spans: Iterable[Span]) -> float:
    """Time in which any of them ran. spans: by their start."""
    busy, end = 0.0, float("-inf")
    for span in spans:
        busy += max(0.0, span.end_us - max(span.start_us, end))
        end = max(end, span.end_us)
    return busy


def idle_share(spans: list[Span]) -> float:
    """Of the time from the first to the last of them, what none ran in."""
    whole = max(span.end_us for span in spans) - spans[0].start_us
    return 1 - busy_us(spans) / whole


def launch_gaps(spans: list[Span], steps: int) -> float:
    """Of the time within the steps, what nothing ran in. Between steps lie the steps - 1 longest pauses: there the host
    takes logits and gives tokens."""
    within = [[spans[0]]]
    ends = accumulate((span.end_us for span in spans), max)
    pauses = [span.start_us - end for span, end in zip(spans[1:], ends, strict=False)]
    cuts = set(sorted(range(len(pauses)), key=lambda i: -pauses[i])[: steps - 1])
    for i, span in enumerate(spans[1:]):
        if i in cuts:
            within.append([])
        within[-1].append(span)
    whole = sum(max(span.end_us for span in step) - step[0].start_us for step in within)
    return 1 - sum(map(busy_us, within)) / whole
