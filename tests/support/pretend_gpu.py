"""A GPU for machines that have none: host memory, interpreted kernels, and a graph that is a record of calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from decode_worker.device import Host
from decode_worker.gpu.launch import Launch


class RecordedGraph(TorchDispatchMode):
    """Operations of torch and launches, called again in their order on the same tensors.

    A real capture launches nothing; this one must compute to have something to record, so the first replay is none."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Callable[[], object]] = []
        self._within = False
        self.replays = -1

    def capture(self, launch: Callable[[], None]) -> None:
        run = Launch.__call__

        def launched(this: Launch) -> None:
            self._calls.append(lambda: run(this))
            self._within = True  # what the interpreter does with torch is no part of the graph
            try:
                run(this)
            finally:
                self._within = False

        Launch.__call__ = launched  # type: ignore[method-assign]
        try:
            with self:
                launch()
        finally:
            Launch.__call__ = run  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        options = options or {}
        result = function(*arguments, **options)
        if not self._within:
            assert torch.Tag.data_dependent_output not in function.tags, f"{function} looks at data"
            self._calls.append(lambda: _again(function, arguments, options, result))
        return result

    def replay(self) -> None:
        self.replays += 1
        if self.replays:
            with torch.inference_mode():
                for call in self._calls:
                    call()


def _again(function: Any, arguments: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
    made = function(*arguments, **options)
    for before, now in zip(*(x if isinstance(x, tuple | list) else (x,) for x in (result, made)), strict=True):
        if before.data_ptr() != now.data_ptr():
            before.copy_(now)


class PretendGpu(Host):
    windows = ("gdr", "pull", "bounce")
    wakes = False
    graphs = True

    def __init__(self) -> None:
        self.made: list[RecordedGraph] = []

    def at(self, address: int, size_bytes: int) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_uint8 * size_bytes).from_address(address), dtype=torch.uint8)

    def graph(self) -> RecordedGraph:
        self.made.append(RecordedGraph())
        return self.made[-1]
