"""A window in a GPU's memory, which the daemon allocates and stores to through GDRCopy."""

import numpy as np

from decode_worker._native import WINDOW_PROBE, ImportedWindow
from decode_worker.device import Device
from decode_worker.window.base import EMPTY, Window

CUDA_LIBRARY = "libcuda.so.1"
GPU = 0  # of those that this process sees


class GdrWindow(Window):
    """What is imported stays valid when the daemon dies."""

    kind = "gdr"

    def __init__(self, fd: int, size_bytes: int, device: Device) -> None:
        self._size_bytes = size_bytes
        self._imported = ImportedWindow(fd, size_bytes, CUDA_LIBRARY, GPU)
        self.tensor = self.landing = device.at(self._imported.address, size_bytes)

    def self_test(self) -> None:
        """The daemon has stored the probe into the first and the last line."""
        last = (self._size_bytes // len(WINDOW_PROBE) - 1) * len(WINDOW_PROBE)
        for at in (0, last):
            if self._imported.read(at, len(WINDOW_PROBE)) != WINDOW_PROBE:
                raise RuntimeError(
                    f"window: byte {at} as the daemon stored it is not what the GPU holds; "
                    "start the daemon with --window=shm"
                )
        for at in (0, last):
            self._imported.write(at, np.zeros(len(WINDOW_PROBE), np.uint8))

    def close(self) -> None:
        self.tensor = self.landing = EMPTY
        self._imported.close()
