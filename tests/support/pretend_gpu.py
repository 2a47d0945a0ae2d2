"""A GPU for machines that have none: host memory that is not the CPU's, interpreted kernels, and a graph that is a
record of calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from decode_worker.device import Gpu, Host
from decode_worker.engine import engine as engine_module
from decode_worker.gpu.launch import Launch
from tests.support.device_tensor import DEVICE, DeviceTensor, on_host


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
            for value in tree_flatten((arguments, options, result))[0]:
                on_the_cpu = isinstance(value, torch.Tensor) and not isinstance(value, DeviceTensor)
                assert not on_the_cpu, f"{function} waits for the host"
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
        if before is not now and before.data_ptr() != now.data_ptr():
            before.copy_(now)


class PretendGpu(Host):
    torch_device = DEVICE
    windows = Gpu.windows
    wakes = False
    graphs = True

    def __init__(self) -> None:
        self.made: list[RecordedGraph] = []

    def share(self, memory: NDArray[np.uint8], *, read_only: bool = False) -> torch.Tensor:
        return DeviceTensor(super().share(memory, read_only=read_only))

    def at(self, address: int, size_bytes: int) -> torch.Tensor:
        return DeviceTensor(torch.frombuffer((ctypes.c_uint8 * size_bytes).from_address(address), dtype=torch.uint8))

    def graph(self) -> RecordedGraph:
        self.made.append(RecordedGraph())
        return self.made[-1]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PretendGpu:
    """What kernels=triton runs on."""
    gpu = PretendGpu()
    runs_on(gpu, monkeypatch)
    return gpu


def runs_on(gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels=triton does, from here on."""
    device_of = engine_module.device_of
    monkeypatch.setattr(engine_module, "device_of", lambda kernels: gpu if kernels == "triton" else device_of(kernels))


def launched(launch: Launch) -> None:
    """Interpreted kernels take host memory; what one of a device is given lies there, all of it."""
    tensors = [argument for argument in launch.arguments if isinstance(argument, torch.Tensor)]
    on_device = [isinstance(tensor, DeviceTensor) for tensor in tensors]
    assert all(on_device) or not any(on_device), f"{launch.name} is given tensors of the device and of the CPU"
    launch.kernel[launch.grid](*map(on_host, launch.arguments), **launch.options)


Launch.__call__ = launched  # type: ignore[method-assign]
