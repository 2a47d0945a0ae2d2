"""A window in a GPU's memory, which the daemon allocates and stores to through GDRCopy."""

import numpy as np

from decode_worker._native import WINDOW_PROBE, ImportedWindow
from decode_worker.window.base import WINDOWS, Window

CUDA_LIBRARY = "libcuda.so.1"
GPU = 0  # of those that this process sees


@WINDOWS.register("gdr")
class GdrWindow(Window):
    """`torch.as_tensor(window, device="cuda")` is the window as a tensor; `bytes` is empty, as no CPU reaches it.

    What is imported stays valid when the daemon dies."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._imported = ImportedWindow(fd, size_bytes, CUDA_LIBRARY, GPU)
        self.bytes = np.empty(0, np.uint8)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "shape": (self._size_bytes,),
            "typestr": "|u1",
            "data": (self._imported.address, False),
            "strides": None,
            "version": 3,
        }

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
        self._imported.close()
