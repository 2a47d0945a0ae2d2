"""Numbers whose sums are exact in float32, in any order: what is computed of them has no last bit to differ in."""

import numpy as np
from numpy.typing import ArrayLike, NDArray


def multiples(values: ArrayLike, parts: int) -> NDArray[np.float32]:
    """Rounded to multiples of 1 / parts, a power of two."""
    return (np.round(np.asarray(values) * parts) / parts).astype(np.float32)
