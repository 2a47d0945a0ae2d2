"""What a decode step computes outside attention and selection: the contract, and its sets by name."""

from decode_worker.kernels.products import cpu, reference
from decode_worker.kernels.products.base import PRODUCTS, Products

__all__ = ["PRODUCTS", "Products", "cpu", "reference"]
