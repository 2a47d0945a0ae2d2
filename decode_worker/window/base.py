"""The memory of a worker's places as the worker sees it, whatever the daemon does to fill it."""

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from decode_worker.kernels.registry import Registry


class Window(ABC):
    """`bytes`: a uint8 array over all slots' places, valid until `close`; empty where no CPU reaches them.
    The daemon names the kind."""

    bytes: NDArray[np.uint8]

    @abstractmethod
    def __init__(self, fd: int, size_bytes: int) -> None:
        """fd: what the daemon handed out for it; the caller closes it."""

    @abstractmethod
    def self_test(self) -> None:
        """Before anything is delivered: RuntimeError unless what is written at one end is seen at the other."""

    @abstractmethod
    def close(self) -> None:
        """`bytes` is empty afterwards. Idempotent."""


WINDOWS: Registry[type[Window]] = Registry("window")
