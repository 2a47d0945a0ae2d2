"""Reads packs of a bound slot back through its window: to index them anew, to prefill behind them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from decode_worker import _native
from decode_worker.policy.plan import NO_PAIRS, RUN_DTYPE, Ticket
from decode_worker.records import RecordFormat
from decode_worker.retrieval.base import PackIndex, Retriever
from decode_worker.transport import Transport
from decode_worker.window.geometry import WindowGeometry
from decode_worker.work import Pieces
from kvstore_service.client import PackRef


class PackReader:
    """Overwrites whatever lies in the slot's window. `offset`: byte offset of the slot's part of it."""

    def __init__(
        self,
        transport: Transport,
        records: RecordFormat,
        geometry: WindowGeometry,
        slot: int,
        epoch: int,
        offset: int,
    ) -> None:
        self._transport = transport
        self._records = records
        self._geometry = geometry
        self._slot = slot
        self._epoch = epoch
        self._windows = geometry.windows(offset)
        self._portion = int(geometry.places.min())

    def read(self, layer: int, ref: PackRef, order: NDArray[np.uint16]) -> Pieces[tuple[torch.Tensor, torch.Tensor]]:
        """K, V [n, H, d] of a pack's layer in token order, in the storage dtype. order: its map.

        StoreError (DATA_LOSS) if they cannot be read."""
        portions = []
        for first, count in self._portions(ref):
            yield from self._transport.room()
            posted = self._transport.post(self._ticket(layer, first, count))
            yield posted
            posted.check()
            portions.append(self._held(layer, count))
        keys, values = (torch.cat(parts) for parts in zip(*portions, strict=True))
        record_of_token = torch.from_numpy(order[layer].astype(np.int64).argsort(axis=1))
        at = record_of_token.T[..., None].expand_as(keys)
        return keys.gather(0, at), values.gather(0, at)

    def index(self, ref: PackRef, order: NDArray[np.uint16], retriever: Retriever) -> Pieces[PackIndex]:
        """The pack's index from its stored keys. order: its map. StoreError (DATA_LOSS) if they cannot be read."""
        layers = []
        for layer in range(self._geometry.layers):
            keys, _ = yield from self.read(layer, ref, order)
            layers.append(retriever.build(layer, keys.float().numpy(), order[layer]))
        return retriever.assemble(layers)

    def _portions(self, ref: PackRef) -> list[tuple[int, int]]:
        """(first record, records), each of which fits a lane."""
        end = ref.first_token + ref.tokens
        return [(first, min(self._portion, end - first)) for first in range(ref.first_token, end, self._portion)]

    def _ticket(self, layer: int, first: int, count: int) -> Ticket:
        """Records [first, first + count) of every head to the front of its lane."""
        runs = np.zeros(self._geometry.kv_heads, RUN_DTYPE)
        runs["slot"], runs["slot_epoch"] = self._slot, self._epoch
        runs["lane"] = range(self._geometry.kv_heads)
        runs["first_pair"], runs["pair_count"] = first, count
        return Ticket(_native.OP_RANGE, layer, runs, NO_PAIRS)

    def _held(self, layer: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K, V [count, H, d] at the front of the layer's lanes."""
        raw = torch.empty((count, self._geometry.kv_heads, self._records.record_bytes), dtype=torch.uint8)
        for head in range(self._geometry.kv_heads):
            at = int(self._windows[layer, head, 0])
            lane = self._transport.window.landing[at : at + count * self._records.record_bytes]
            raw[:, head] = lane.view(count, -1)
        return self._records.unpack(raw)
