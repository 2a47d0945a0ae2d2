"""The one way in which this set's kernels are launched, so that what a step does can be written down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch: the kernel, the number of its programs along each axis, what it was given."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    def __call__(self) -> None:
        self.kernel[self.grid](*self.arguments, **self.options)


_listeners: list[Callable[[Launch], None]] = []


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """options: the kernel's constants, and Triton's own (num_warps)."""
    this = Launch(kernel, grid, arguments, options)
    for listener in _listeners:
        listener(this)
    this()


def multiprocessors(device: torch.device) -> int:
    """Of which a launch of programs that share their work fills each with a few. The interpreter is one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Every launch from now on, in order, until the block ends."""
    launches: list[Launch] = []
    _listeners.append(launches.append)
    try:
        yield launches
    finally:
        _listeners.remove(launches.append)
