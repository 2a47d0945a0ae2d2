"""A slot's list of packs, as selection reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from decode_worker.retrieval.index import PackIndex


class StoredPack(Protocol):
    """A pack of a session: tokens [first_token, first_token + tokens), one record each.

    `order`: uint16[layers, H, tokens], record -> token within the pack. A record's id is first_token + its index.
    """

    @property
    def first_token(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def order(self) -> NDArray[np.uint16]: ...
    @property
    def index(self) -> PackIndex: ...


class View:
    """The packs of one bound slot, without gaps from token 0. Per (layer, head) columns are sliced once and kept."""

    def __init__(self, packs: Sequence[StoredPack] = ()) -> None:
        self.packs: list[StoredPack] = []
        self.firsts: list[int] = []
        self.stored = 0
        self._columns: dict[tuple[int, int], tuple[list[NDArray[Any]], list[NDArray[np.uint16]]]] = {}
        for pack in packs:
            self.extend(pack)

    def extend(self, pack: StoredPack) -> None:
        """Appends a pack (a sealed tail)."""
        if pack.first_token != self.stored:
            raise ValueError(f"pack starts at token {pack.first_token}, the session holds {self.stored}")
        if pack.order.shape[2] != pack.tokens or pack.index.tokens != pack.tokens:
            raise ValueError(f"map or index of the pack at token {pack.first_token} has another length")
        self.packs.append(pack)
        self.firsts.append(pack.first_token)
        self.stored += pack.tokens
        for (layer, head), (data, orders) in self._columns.items():
            data.append(pack.index.data[layer, head])
            orders.append(pack.order[layer, head])

    def column(self, layer: int, head: int) -> tuple[list[NDArray[Any]], list[NDArray[np.uint16]]]:
        """Index data and record -> token map of each pack, for one layer and head."""
        found = self._columns.get((layer, head))
        if found is None:
            found = (
                [pack.index.data[layer, head] for pack in self.packs],
                [pack.order[layer, head] for pack in self.packs],
            )
            self._columns[layer, head] = found
        return found

    def tokens_of(self, layer: int, head: int) -> NDArray[np.int32]:
        """Record id -> token of everything stored, int32[stored]."""
        _, orders = self.column(layer, head)
        if not orders:
            return np.empty(0, np.int32)
        return np.concatenate(
            [order.astype(np.int32) + first for order, first in zip(orders, self.firsts, strict=True)]
        )

    def records_of(self, layer: int, head: int, low: int, high: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Records of the tokens [low, high), sorted by record id, and the token of each."""
        _, orders = self.column(layer, head)
        records, tokens = [np.empty(0, np.int32)], [np.empty(0, np.int32)]
        for pack, order in zip(self.packs, orders, strict=True):
            if pack.first_token >= high or pack.first_token + pack.tokens <= low:
                continue
            token = order.astype(np.int32) + pack.first_token
            inside = np.flatnonzero((token >= low) & (token < high)).astype(np.int32)
            records.append(inside + pack.first_token)
            tokens.append(token[inside])
        return np.concatenate(records), np.concatenate(tokens)
