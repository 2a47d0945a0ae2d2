"""Where a worker's tensors live, and how memory that it shares with the daemon becomes tensors of that device."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

PORTABLE, MAPPED, READ_ONLY = 1, 2, 8  # cudaHostRegister


class Graph(Protocol):
    """What was launched once, to be launched again at once: the same kernels with the same arguments."""

    def capture(self, launch: Callable[[], None]) -> None:
        """Once, before any `replay`. `launch` has been called before, so that everything is compiled."""

    def replay(self) -> None: ...


class Device(ABC):
    """`torch_device`: its name. `windows`: those that kernels on it can work on (decode_worker/window), the best
    first. `wakes`: whether what runs on it can wake the daemon. `graphs`: whether launches can be captured."""

    torch_device: torch.device
    windows: tuple[str, ...]
    wakes: bool
    graphs: bool

    @abstractmethod
    def share(self, memory: NDArray[np.uint8], *, read_only: bool = False) -> torch.Tensor:
        """Mapped host memory as kernels see it, uint8, until `close`. read_only: it is mapped so; nothing may write."""

    @abstractmethod
    def at(self, address: int, size_bytes: int) -> torch.Tensor:
        """Memory of the device itself, uint8; the caller keeps it."""

    @abstractmethod
    def graph(self) -> Graph:
        """A new one. RuntimeError unless `graphs`."""

    @abstractmethod
    def wait(self) -> None:
        """Returns when everything that was launched has ended."""

    @abstractmethod
    def close(self) -> None:
        """Waits, and gives back what was shared. Idempotent."""


class Host(Device):
    """The CPU, for kernels in C++ and for interpreted ones."""

    torch_device = torch.device("cpu")
    windows = ("shm",)
    wakes = True
    graphs = False

    def share(self, memory: NDArray[np.uint8], *, read_only: bool = False) -> torch.Tensor:
        if not read_only:
            return torch.from_numpy(memory)
        # Which torch has no word for: nothing here writes to it.
        return torch.frombuffer((ctypes.c_uint8 * memory.nbytes).from_address(memory.ctypes.data), dtype=torch.uint8)

    def at(self, address: int, size_bytes: int) -> torch.Tensor:
        raise ValueError("window: kernels on a CPU cannot reach a GPU's memory; give --window shm or --kernels triton")

    def graph(self) -> Graph:
        raise RuntimeError("a CPU has no graphs")

    def wait(self) -> None: ...

    def close(self) -> None: ...


class Gpu(Device):
    """The first of the GPUs that this process sees."""

    torch_device = torch.device("cuda", 0)
    windows = ("gdr", "pull", "bounce")
    wakes = False
    graphs = True

    def __init__(self) -> None:
        self._registered: list[NDArray[np.uint8]] = []

    def share(self, memory: NDArray[np.uint8], *, read_only: bool = False) -> torch.Tensor:
        flags = PORTABLE | MAPPED | (READ_ONLY if read_only else 0)
        _check("cudaHostRegister", torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, flags))
        self._registered.append(memory)
        return self.at(memory.ctypes.data, memory.nbytes)

    def at(self, address: int, size_bytes: int) -> torch.Tensor:
        return torch.as_tensor(_CudaArray(address, size_bytes), device=self.torch_device)

    def graph(self) -> Graph:
        return CudaGraph()

    def wait(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def close(self) -> None:
        if self._registered:
            self.wait()
        while self._registered:
            _check("cudaHostUnregister", torch.cuda.cudart().cudaHostUnregister(self._registered.pop().ctypes.data))


class CudaGraph:
    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, launch: Callable[[], None]) -> None:
        with torch.cuda.graph(self._graph):
            launch()

    def replay(self) -> None:
        self._graph.replay()


class _CudaArray:
    """Bytes as torch takes them from others."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3
        }  # fmt: skip


def device_of(kernels: str) -> Device:
    """Where the kernel set of this name runs. ValueError if this machine has no such device."""
    if not gpus_of(kernels):
        return Host()
    if not torch.cuda.is_available():
        raise ValueError(
            "kernels='triton' needs a GPU that torch can use; set TRITON_INTERPRET=1 to interpret them, slowly"
        )
    return Gpu()


def gpus_of(kernels: str) -> int:
    """How many GPUs a worker with the kernel set of this name takes. ValueError if its kernels cannot be had."""
    return int(kernels == "triton" and not _interpreted())


def _interpreted() -> bool:
    try:
        from decode_worker.gpu.sync import INTERPRETED
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ValueError("kernels='triton' needs Triton, which is not installed: pip install 'headgate[gpu]'") from None
    return bool(INTERPRETED.value)


def _check(call: str, result: object) -> None:
    if int(result) != 0:  # type: ignore[call-overload]
        raise RuntimeError(f"{call} failed: {result}")
