"""`exact`: attention mass over all stored keys. The others' yardstick, as slow as attention."""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from decode_worker.retrieval.base import RETRIEVERS, Retriever
from decode_worker.retrieval.view import View

if TYPE_CHECKING:
    from decode_worker.calibration.profile import Profile
    from decode_worker.model.config import ModelConfig


class ExactRetriever(Retriever):
    """Its index is the keys themselves, float32 in record order."""

    name: ClassVar[str] = "exact"

    def __init__(self, scale: float) -> None:
        self._scale = np.float32(scale)
        self.parameters = hashlib.sha256(b"exact" + struct.pack("<f", scale)).digest()

    def build(self, layer: int, keys: NDArray[np.float32], order: NDArray[np.uint16]) -> NDArray[np.float32]:
        return np.stack([keys[order[head], head] for head in range(keys.shape[1])])

    def scores(
        self, layer: int, head: int, view: View, query: NDArray[np.float32], records: NDArray[np.intp]
    ) -> NDArray[np.float32]:
        data, _ = view.column(layer, head)
        return attention_mass(query, np.concatenate(data)[records], self._scale)


@RETRIEVERS.register("exact")
def make(config: ModelConfig, profile: Profile) -> Retriever:
    return ExactRetriever(config.head_dim**-0.5)


def attention_mass(query: NDArray[np.float32], keys: NDArray[np.float32], scale: np.float32) -> NDArray[np.float32]:
    """logsumexp over the group of each head's log attention weight, float32[n]. query: [g, d]; keys: [n, d]."""
    # Equal keys must score the same bits, or ties are none: a BLAS adds the last rows of a product in another order.
    s = scale * np.einsum("gd,nd->gn", query, keys)
    return _logsumexp(s - _logsumexp(s, axis=1)[:, None], axis=0)


def _logsumexp(x: NDArray[np.float32], axis: int) -> NDArray[np.float32]:
    top = x.max(axis=axis, keepdims=True)
    return (np.log(np.exp(x - top).sum(axis=axis, keepdims=True)) + top).squeeze(axis)
