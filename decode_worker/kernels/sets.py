"""The kernel sets, by name. A set is imported when it is chosen: not every machine can run every one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from decode_worker.kernels.registry import Registry

if TYPE_CHECKING:
    from decode_worker.kernels.base import Kernels, StepContext

KERNELS: Registry[Callable[[StepContext], Kernels]] = Registry("kernels")


@KERNELS.register("cpu")
def _cpu(context: StepContext) -> Kernels:
    from decode_worker.kernels.cpu import CpuKernels

    return CpuKernels(context)


@KERNELS.register("reference")
def _reference(context: StepContext) -> Kernels:
    from decode_worker.kernels.reference import ReferenceKernels

    return ReferenceKernels(context)


@KERNELS.register("triton")
def _triton(context: StepContext) -> Kernels:
    from decode_worker.gpu.set import TritonKernels

    return TritonKernels(context)
