"""A window in shared memory: a memfd that worker and daemon map."""

import contextlib
import mmap
import os

import numpy as np

from decode_worker.device import Device
from decode_worker.window.base import EMPTY, Window


class ShmWindow(Window):
    kind = "shm"

    def __init__(self, fd: int, size_bytes: int, device: Device) -> None:
        self._map = mmap.mmap(fd, size_bytes)
        self._fd = os.dup(fd)
        self.landing = device.share(np.frombuffer(self._map, np.uint8))
        self.tensor = self.landing

    def self_test(self) -> None:
        for at in (0, len(self.landing) - 1):
            before = int(self.landing[at])
            self.landing[at] = before ^ 0xFF
            seen = os.pread(self._fd, 1, at)
            self.landing[at] = before
            if seen != bytes([before ^ 0xFF]):
                raise RuntimeError(f"window: byte {at} as written is not what the daemon reads; restart the worker")

    def close(self) -> None:
        self.tensor = self.landing = EMPTY
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        with contextlib.suppress(BufferError):  # a caller still holds a view; the mapping goes with it
            self._map.close()
