"""A window in shared memory that kernels on a GPU copy from: what arrives takes the bus once more, and needs nothing
of the daemon or the driver. What the other windows of a GPU are compared with."""

import torch

from decode_worker.device import Device
from decode_worker.window.base import EMPTY
from decode_worker.window.shm import ShmWindow


class BounceWindow(ShmWindow):
    def __init__(self, fd: int, size_bytes: int, device: Device) -> None:
        super().__init__(fd, size_bytes, device)
        self.tensor = torch.zeros(size_bytes, dtype=torch.uint8, device=device.torch_device)

    def close(self) -> None:
        super().close()
        self.tensor = EMPTY
