"""The rows of a step, as its kernels find them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(eq=False)
class DeviceRows:
    """slots (-1: padding), positions: int32[slots], of which the first `count` take part; step: int32[1]."""

    slots: torch.Tensor
    positions: torch.Tensor
    step: torch.Tensor
    count: int = 0

    @classmethod
    def none(cls, slots: int, device: torch.device) -> DeviceRows:
        with torch.device(device):
            return cls(
                torch.full((slots,), -1, dtype=torch.int32),
                torch.zeros(slots, dtype=torch.int32),
                torch.zeros(1, dtype=torch.int32),
            )
