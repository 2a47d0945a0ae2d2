"""The kernel sets, by name in `base.KERNELS`."""

from decode_worker.kernels import cpu, reference
from decode_worker.kernels.base import KERNELS

__all__ = ["KERNELS", "cpu", "reference"]
