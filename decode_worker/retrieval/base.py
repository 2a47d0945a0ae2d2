"""Retrievers: what they index of a pack, and which stored records they select for a query."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from decode_worker.retrieval.index import PackIndex
from decode_worker.retrieval.view import View

if TYPE_CHECKING:
    from decode_worker.calibration.profile import Profile
    from decode_worker.model.config import ModelConfig


class Retriever(ABC):
    """One method of selection. Stateless: what it knows of a pack is in the pack's index.

    `parameters` is a 32-byte digest of all that an index depends on; equal digests mean exchangeable indexes.
    """

    name: ClassVar[str]
    parameters: bytes

    @abstractmethod
    def build(self, layer: int, keys: NDArray[np.float32], order: NDArray[np.uint16]) -> NDArray[Any]:
        """One layer of a pack's index. keys: [n, H, d] by token, as stored; order: [H, n], record -> token."""

    def assemble(self, layers: Sequence[NDArray[Any]]) -> PackIndex:
        """The pack's index from what `build` made of each layer, in layer order."""
        return PackIndex(self.parameters, np.stack(layers))

    def load(self, blob: bytes) -> PackIndex:
        """A pack's index from its sidecar; IndexFormatError if it is not one of this retriever's."""
        return PackIndex.load(blob, self.parameters)

    @abstractmethod
    def select(
        self,
        layer: int,
        view: View,
        query: NDArray[np.float32],
        limit: int,
        sink: int,
        k: int,
        heads: Sequence[int],
    ) -> list[NDArray[np.int32]]:
        """For each of `heads` the k best records whose token lies in [sink, limit), ties to the lower id; sorted by id.

        query: [H, g, d] of all heads. Fewer than k where there are fewer.
        """

    def select_padded(
        self, layer: int, view: View, query: NDArray[np.float32], limit: int, sink: int, k: int
    ) -> NDArray[np.int32]:
        """All heads at once as int32[H, k], padded with -1."""
        found = self.select(layer, view, query, limit, sink, k, range(len(query)))
        out = np.full((len(query), k), -1, np.int32)
        for row, records in zip(out, found, strict=True):
            row[: len(records)] = records
        return out


def top_k(scores: NDArray[np.float32], k: int) -> NDArray[np.intp]:
    """Indices of the k highest scores, ties to the lower index; sorted. A NaN counts as the lowest score."""
    if k >= len(scores):
        return np.arange(len(scores))
    if k <= 0:
        return np.empty(0, np.intp)
    ordered = np.where(np.isnan(scores), -np.inf, scores)
    least = np.partition(ordered, len(ordered) - k)[len(ordered) - k]
    above = np.flatnonzero(ordered > least)
    tied = np.flatnonzero(ordered == least)[: k - len(above)]
    return np.sort(np.concatenate([above, tied]))


def make_retriever(name: str, config: ModelConfig, profile: Profile) -> Retriever:
    """The retriever of this name for a model; KeyError names the known ones."""
    from decode_worker.retrieval.exact import ExactRetriever
    from decode_worker.retrieval.hash import HashRetriever

    if name == ExactRetriever.name:
        return ExactRetriever(config.head_dim**-0.5)
    if name == HashRetriever.name:
        return HashRetriever(*profile.hash_parameters(config.layers, config.kv_heads, config.head_dim))
    raise KeyError(f"retriever={name!r}: known are {ExactRetriever.name}, {HashRetriever.name}")
