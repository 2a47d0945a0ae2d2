"""Windows in a GPU's memory, which the daemon allocates and fills: how it does so is their difference."""

from __future__ import annotations

from typing import ClassVar

from decode_worker._native import ImportedWindow as Imported
from decode_worker._native import gpu_uuid
from decode_worker.device import Device
from decode_worker.window.base import EMPTY, Window, WindowError
from kvstore_service.client import WorkerMemory

CUDA_LIBRARY = "libcuda.so.1"
GPU = 0  # of those that this process sees


class ImportedWindow(Window):
    """What is imported stays valid when the daemon dies. `for_rdma`: it was allocated for GDRCopy."""

    for_rdma: ClassVar[bool]

    @classmethod
    def over(cls, memory: WorkerMemory, device: Device) -> Window:
        mine = gpu_uuid(CUDA_LIBRARY, GPU)
        if memory.gpu != mine:
            raise WindowError(
                f"the daemon's GPU is {memory.gpu}, this worker's is {mine}: set the daemon's `gpu`, or this worker's "
                "CUDA_VISIBLE_DEVICES"
            )
        return super().over(memory, device)

    def __init__(self, fd: int, size_bytes: int, device: Device) -> None:
        self._imported = Imported(fd, size_bytes, self.for_rdma, CUDA_LIBRARY, GPU)
        self.tensor = self.landing = device.at(self._imported.address, size_bytes)

    def close(self) -> None:
        self.tensor = self.landing = EMPTY
        self._imported.close()
