from decode_worker.kernels.products import reference
from decode_worker.kernels.products.base import PRODUCTS, Products

__all__ = ["PRODUCTS", "Products", "reference"]
