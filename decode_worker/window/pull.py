"""A window whose records kernels on a GPU read in the daemon's frames: nothing is copied before it takes the bus. What
does not lie there, or the daemon does not want to hold there, it delivers as for `bounce`."""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np
import torch

from decode_worker._native import pull_layout
from decode_worker.device import Device
from decode_worker.window.base import Frames, Window
from decode_worker.window.shm import ShmWindow
from kvstore_service.client import WorkerMemory


class PullWindow(ShmWindow):
    """Beside the landing its memory has the lines; the arena is mapped for reading only."""

    kind = "pull"

    @classmethod
    def over(cls, memory: WorkerMemory, device: Device) -> Window:
        return cls(memory.window_fd, memory.window_bytes, device, memory.arena_fd)

    def __init__(self, fd: int, size_bytes: int, device: Device, arena_fd: int = -1) -> None:
        first, count, memory_bytes = pull_layout(size_bytes)
        super().__init__(fd, memory_bytes, device)
        shared, self.landing = self.landing, self.landing[:size_bytes]
        self.tensor = torch.zeros(size_bytes, dtype=torch.uint8, device=device.torch_device)
        self._arena_map = mmap.mmap(arena_fd, os.fstat(arena_fd).st_size, prot=mmap.PROT_READ)
        arena = device.share(np.frombuffer(self._arena_map, np.uint8), read_only=True)
        self.frames = Frames(shared.view(torch.int32)[first // 4 : first // 4 + count], arena.view(torch.int32))

    def close(self) -> None:
        super().close()
        self.frames = None
        with contextlib.suppress(BufferError):  # a caller still holds a view; the mapping goes with it
            self._arena_map.close()
