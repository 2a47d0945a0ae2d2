"""Where a worker's tensors live, and how memory that it shares with the daemon becomes tensors of that device."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from decode_worker.closing import close_all
from decode_worker.gpu import flash_choice
from decode_worker.model.config import ModelConfig
from decode_worker.model.operations import Operations, torch_operations

PORTABLE, MAPPED, READ_ONLY = 1, 2, 8  # cudaHostRegister
INVALID, NOT_SUPPORTED = 1, 801  # what it answers to READ_ONLY where it does not know it, or the device cannot


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
        """Mapped host memory as kernels see it, uint8, until `close`; the same again, as often as it is asked for.
        read_only: it is mapped so; nothing may write."""

    @abstractmethod
    def at(self, address: int, size_bytes: int) -> torch.Tensor:
        """Memory of the device itself, uint8; the caller keeps it."""

    @abstractmethod
    def operations(self, config: ModelConfig, declared_max: int, dtype: torch.dtype) -> Operations:
        """The fastest that can be had here for contexts of up to declared_max tokens."""

    @abstractmethod
    def graph(self) -> Graph:
        """A new one. RuntimeError unless `graphs`."""

    @abstractmethod
    def wait(self) -> None:
        """Returns when everything that was launched has ended."""

    @abstractmethod
    def idle(self) -> bool:
        """Whether it has, without a wait. RuntimeError once a kernel has failed."""

    @abstractmethod
    def close(self) -> None:
        """Waits, and gives back what was shared, all of it: also of a device that has failed (RuntimeError).
        Idempotent."""


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

    def operations(self, config: ModelConfig, declared_max: int, dtype: torch.dtype) -> Operations:
        return torch_operations(config, declared_max, dtype, self.torch_device)

    def graph(self) -> Graph:
        raise RuntimeError("a CPU has no graphs")

    def wait(self) -> None: ...

    def idle(self) -> bool:
        return True

    def close(self) -> None: ...


class Gpu(Device):
    """The first of the GPUs that this process sees."""

    torch_device = torch.device("cuda", 0)
    windows = ("gdr", "pull", "staged", "bounce")
    wakes = False
    graphs = True

    def __init__(self) -> None:
        self._registered: dict[int, NDArray[np.uint8]] = {}  # by address

    def share(self, memory: NDArray[np.uint8], *, read_only: bool = False) -> torch.Tensor:
        address = memory.ctypes.data
        if address not in self._registered:
            flags = PORTABLE | MAPPED | (READ_ONLY if read_only else 0)
            result = torch.cuda.cudart().cudaHostRegister(address, memory.nbytes, flags)
            if read_only and int(result) in (INVALID, NOT_SUPPORTED):
                raise RuntimeError(
                    "this driver registers no memory that is mapped for reading only, as rings and a pull window's "
                    f"arena are (attribute 113 of the device; cudaHostRegister: {result}): give --kernels cpu, or "
                    "another driver or GPU"
                )
            _check("cudaHostRegister", result)
            self._registered[address] = memory
        return self.at(address, memory.nbytes)

    def at(self, address: int, size_bytes: int) -> torch.Tensor:
        return torch.as_tensor(_CudaArray(address, size_bytes), device=self.torch_device)

    def operations(self, config: ModelConfig, declared_max: int, dtype: torch.dtype) -> Operations:
        return flash_choice.operations(config, declared_max, dtype, self.torch_device)

    def graph(self) -> Graph:
        return CudaGraph()

    def wait(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def idle(self) -> bool:
        return bool(torch.cuda.current_stream(self.torch_device).query())

    def close(self) -> None:
        registered, self._registered = self._registered, {}
        if registered:
            close_all(self.wait, *(partial(_unregister, address) for address in registered))


class CudaGraph:
    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, launch: Callable[[], None]) -> None:
        torch.cuda.current_blas_handle()  # each thread has its own, and none can be made within a capture
        usual = torch.cuda.stream(torch.cuda.current_stream())  # a capture that fails would leave its own the current
        with usual, torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
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


def _unregister(address: int) -> None:
    _check("cudaHostUnregister", torch.cuda.cudart().cudaHostUnregister(address))


def _check(call: str, result: object) -> None:
    if int(result) != 0:  # type: ignore[call-overload]
        raise RuntimeError(f"{call} failed: {result}")
