"""A window in shared memory: a memfd that worker and daemon map."""

import contextlib
import mmap

import numpy as np

from decode_worker.device import Device
from decode_worker.window.base import EMPTY, Window


class ShmWindow(Window):
    kind = "shm"

    def __init__(self, fd: int, size_bytes: int, device: Device) -> None:
        self._map = mmap.mmap(fd, size_bytes)
        self.landing = device.share(np.frombuffer(self._map, np.uint8))
        self.tensor = self.landing

    def close(self) -> None:
        self.tensor = self.landing = EMPTY
        with contextlib.suppress(BufferError):  # a caller still holds a view; the mapping goes with it
            self._map.close()
