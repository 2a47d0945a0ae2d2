"""A device that nobody computes on: torch's `meta`, apart from the CPU as a GPU is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

APART = torch.device("meta")
FILLS, MOVES = (torch.ops.aten.copy_,), (torch.ops.aten._to_copy, torch.ops.aten.to)


class Apart(TorchDispatchMode):
    """Operations on tensors of both devices are errors, but for copies; what is copied from there is zeros."""

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        options = options or {}
        if function.overloadpacket in FILLS:
            to, source, *rest = arguments
            return function(to, _readable(source, to.device), *rest)
        if function.overloadpacket in MOVES:
            source, *rest = arguments
            named = [each for each in (*rest, *options.values()) if isinstance(each, torch.device)]
            return function(_readable(source, *named), *rest, **options)
        devices = {each.device.type for each in _tensors((arguments, options))}
        assert len(devices) <= 1, f"{function} on tensors of {', '.join(sorted(devices))}"
        return function(*arguments, **options)


def _readable(source: Tensor, to: torch.device = APART) -> Tensor:
    return torch.zeros(source.shape, dtype=source.dtype) if source.device == APART and to != APART else source


def _tensors(arguments: object) -> Iterator[Tensor]:
    """A number that torch has made a tensor lies where it likes."""
    leaves: Iterable[object] = tree_leaves(arguments)
    return (each for each in leaves if isinstance(each, Tensor) and each.dim() > 0)
