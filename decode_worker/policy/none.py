"""`none` (InfiniGen-like): every head selects anew at every step; only what it does not hold travels."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from decode_worker.policy.plan import QueryKind
from decode_worker.policy.qsac import QsacPolicy


class NonePolicy(QsacPolicy):
    name: ClassVar[str] = "none"

    def _similar(self, layer: int, query: NDArray[np.float32], kind: QueryKind) -> NDArray[np.bool_]:
        return np.zeros(query.shape[:2], bool)
