"""Retrievers: what they index of a pack, and which stored records they select for a query."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from decode_worker.kernels.registry import Registry
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
    def scores(
        self, layer: int, head: int, view: View, query: NDArray[np.float32], records: NDArray[np.intp]
    ) -> NDArray[np.float32]:
        """How near these records of one head are to query [g, d]: float32[n], higher is better."""

    def select(
        self,
        layer: int,
        head: int,
        view: View,
        query: NDArray[np.float32],
        low: int,
        high: int,
        k: int,
        unit: int = 1,
    ) -> NDArray[np.int32]:
        """Ids of the k best units for query [g, d], ascending; fewer where there are fewer.

        A unit is `unit` records in a row, as good as the best of those whose token lies in [low, high). Ties go to the
        lower token, which does not depend on a pack's build; of larger units to the lower id."""
        tokens = view.tokens_of(layer, head)
        records = np.flatnonzero((tokens >= low) & (tokens < high))
        if not len(records):
            return np.empty(0, np.int32)
        records = records[np.argsort(tokens[records])]  # a score's last bits may depend on its neighbours
        scores = self.scores(layer, head, view, query, records)
        if unit == 1:
            return np.sort(records[top_k(scores, k)]).astype(np.int32)
        best = np.full(-(-view.stored // unit), -np.inf, np.float32)
        np.maximum.at(best, records // unit, np.where(np.isnan(scores), -np.inf, scores))
        units = np.unique(records // unit)
        return units[top_k(best[units], k)].astype(np.int32)


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


RETRIEVERS: Registry[Callable[[ModelConfig, Profile], Retriever]] = Registry("retriever")


def make_retriever(name: str, config: ModelConfig, profile: Profile) -> Retriever:
    """The retriever of this name for a model; KeyError names the known ones."""
    return RETRIEVERS[name](config, profile)
