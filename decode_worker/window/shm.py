"""A window in shared memory: a memfd that worker and daemon map."""

import contextlib
import mmap
import os

import numpy as np

from decode_worker.window.base import WINDOWS, Window


@WINDOWS.register("shm")
class ShmWindow(Window):
    def __init__(self, fd: int, size_bytes: int) -> None:
        self._map = mmap.mmap(fd, size_bytes)
        self._fd = os.dup(fd)
        self.bytes = np.frombuffer(self._map, np.uint8)

    def self_test(self) -> None:
        for at in (0, len(self.bytes) - 1):
            before = self.bytes[at]
            self.bytes[at] = ~before
            seen = os.pread(self._fd, 1, at)
            self.bytes[at] = before
            if seen != bytes([~before]):
                raise RuntimeError(f"window: byte {at} as written is not what the daemon reads; restart the worker")

    def close(self) -> None:
        self.bytes = np.empty(0, np.uint8)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        with contextlib.suppress(BufferError):  # a caller still holds a view; the mapping goes with it
            self._map.close()
