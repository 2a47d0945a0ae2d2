"""The memory of a worker's places as the worker sees it, whatever the daemon does to fill it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from decode_worker.device import Device
from kvstore_service.client import WorkerMemory


@dataclass(frozen=True, eq=False)
class Frames:
    """The daemon's own memory, as far as a worker may read it (csrc/core/pull.h).

    lines  int32[window bytes / 64]: of a place's first 64 bytes, 0 if its record is delivered to `landing`, n if it
           lies in the arena from line n - 1 on
    arena  int32[..]
    """

    lines: torch.Tensor
    arena: torch.Tensor


class WindowError(RuntimeError):
    """A window that does not work here, and why."""


class Window(ABC):
    """All slots' places. `kind`: what the daemon must make of its end (docs/architecture.md).

    tensor    uint8, where kernels find them, on their device
    landing   uint8, where the daemon delivers; the same tensor, unless kernels fetch it from there
    frames    where else the answers to a device's tickets may say that records lie; None: nowhere
    """

    kind: ClassVar[str]
    tensor: torch.Tensor
    landing: torch.Tensor
    frames: Frames | None = None

    @classmethod
    def over(cls, memory: WorkerMemory, device: Device) -> Window:
        """What the daemon handed out; the caller closes it."""
        return cls(memory.window_fd, memory.window_bytes, device)

    @abstractmethod
    def __init__(self, fd: int, size_bytes: int, device: Device) -> None:
        """fd: what the daemon handed out for it; the caller closes it."""

    def take(self, first: int, size_bytes: int) -> None:
        """What the host's own tickets have delivered there is where kernels find it, from now on."""
        if self.landing is not self.tensor:
            part = slice(first, first + size_bytes)
            self.tensor[part] = self.landing[part]

    @abstractmethod
    def close(self) -> None:
        """Both are empty afterwards. Idempotent. What kernels do with them must have ended."""


EMPTY = torch.empty(0, dtype=torch.uint8)
