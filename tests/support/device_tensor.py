"""Tensors that are not on the CPU, as torch sees them: a GPU's, over host memory.

Whoever mixes them with the CPU's is told so, as by a real device; what a CPU forgives would be found only there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.library import Library
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretended"
DEVICE = torch.device("cpu")  # until it is set up below
CPU = torch.device("cpu")
COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default, torch.ops.aten._copy_from.default)


class DeviceTensor(torch.Tensor):
    """`host`: its elements, a tensor of the CPU's that shares their memory."""

    host: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> DeviceTensor:
        with torch.inference_mode(False):  # a view made in that mode may be one of a tensor that was not
            made: DeviceTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls, host.size(), strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype,
                device=DEVICE,
            )  # fmt: skip
        made.host = host
        return made

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def numpy(self, **_: object) -> NDArray[np.generic]:
        raise TypeError(f"can't convert {DEVICE} device type tensor to numpy. Use Tensor.cpu() first")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __array__(self, *_: object) -> NDArray[np.generic]:
        return self.numpy()

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        options = options or {}
        tensors = [each for each in tree_flatten((arguments, options))[0] if isinstance(each, torch.Tensor)]
        apart = [each for each in tensors if not isinstance(each, DeviceTensor) and each.dim() > 0]
        if apart and function not in COPIES:
            raise RuntimeError(f"{function}: expected all tensors on one device, found cpu and {DEVICE}")
        made = function(*tree_map(on_host, arguments), **tree_map(on_host, options))
        if options.get("device", DEVICE).type == "cpu":
            return made
        return return_and_correct_aliasing(function, arguments, options, tree_map(on_device, made))


def on_host(value: Any) -> Any:
    """What stands for it among the CPU's: the elements of a device's tensor, the CPU for a device."""
    if isinstance(value, DeviceTensor):
        return value.host
    return CPU if isinstance(value, torch.device) else value


def on_device(value: Any) -> Any:
    if isinstance(value, DeviceTensor) or not isinstance(value, torch.Tensor):
        return value
    return DeviceTensor(value)


def _empty(size: Any, **options: Any) -> DeviceTensor:
    return DeviceTensor(torch.empty(size, dtype=options.get("dtype")))


def _empty_strided(size: Any, stride: Any, **options: Any) -> DeviceTensor:
    return DeviceTensor(torch.empty_strided(size, stride, dtype=options.get("dtype")))


def _arange(start: Any, end: Any, step: Any = 1, **options: Any) -> DeviceTensor:
    return DeviceTensor(torch.arange(start, end, step, dtype=options.get("dtype")))


def _copy_from(source: torch.Tensor, to: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    on_host(to).copy_(on_host(source))
    return to


_setup_privateuseone_for_python_backend(NAME)
DEVICE = torch.device(NAME, 0)
_OPERATIONS = Library("aten", "IMPL")
_OPERATIONS.impl("empty.memory_format", _empty, "PrivateUse1")
_OPERATIONS.impl("empty_strided", _empty_strided, "PrivateUse1")
_OPERATIONS.impl("arange", partial(_arange, 0), "PrivateUse1")
_OPERATIONS.impl("arange.start", _arange, "PrivateUse1")
_OPERATIONS.impl("arange.start_step", _arange, "PrivateUse1")
_OPERATIONS.impl("_copy_from", _copy_from, "PrivateUse1")
