"""`hash` (HATA): signs of 256 projections per key; the nearest in Hamming distance, summed over the query group."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from decode_worker import _native
from decode_worker.retrieval.base import Retriever, top_k
from decode_worker.retrieval.view import View

BITS = 256
WORDS = BITS // 64


class HashRetriever(Retriever):
    """Its index is 32 bytes per record. projection: float32[layers, H, d, 256]; centre: float32[layers, H, d]."""

    name: ClassVar[str] = "hash"

    def __init__(self, projection: NDArray[np.float32], centre: NDArray[np.float32]) -> None:
        if projection.shape[:3] != centre.shape or projection.shape[3] != BITS:
            raise ValueError(f"hash: projection {projection.shape} and centre {centre.shape} do not match")
        self._projection = np.ascontiguousarray(projection, dtype=np.float32)
        self._centre = np.ascontiguousarray(centre, dtype=np.float32)
        self._no_centre = np.zeros(centre.shape[2], np.float32)
        digest = hashlib.sha256(b"hash")
        digest.update(repr(projection.shape).encode())
        digest.update(self._projection.tobytes())
        digest.update(self._centre.tobytes())
        self.parameters = digest.digest()

    def build(self, layer: int, keys: NDArray[np.float32], order: NDArray[np.uint16]) -> NDArray[np.uint64]:
        return np.stack(
            [
                _native.hash_encode(keys[order[head], head], self._projection[layer, head], self._centre[layer, head])
                for head in range(keys.shape[1])
            ]
        )

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
        return [
            _native.hash_select(
                self.query_codes(layer, head, query[head]), *view.column(layer, head), view.firsts, sink, limit, k
            )
            for head in heads
        ]

    def query_codes(self, layer: int, head: int, query: NDArray[np.float32]) -> NDArray[np.uint64]:
        """uint64[g, 4]; queries are not centred."""
        return _native.hash_encode(query, self._projection[layer, head], self._no_centre)


# --- the same in NumPy: what the kernels are tested against ---


def encode_reference(
    x: NDArray[np.float32], projection: NDArray[np.float32], centre: NDArray[np.float32]
) -> NDArray[np.uint64]:
    """hash_encode."""
    bits = ((x - centre) @ projection > 0).reshape(len(x), WORDS, 64)
    weights = np.uint64(1) << np.arange(64, dtype=np.uint64)
    return np.where(bits, weights, np.uint64(0)).sum(axis=2, dtype=np.uint64)


def select_reference(
    query_codes: NDArray[np.uint64],
    codes: Sequence[NDArray[np.uint64]],
    maps: Sequence[NDArray[np.uint16]],
    first: Sequence[int],
    low: int,
    high: int,
    k: int,
) -> NDArray[np.int32]:
    """hash_select."""
    if not codes:
        return np.empty(0, np.int32)
    records = np.concatenate([np.arange(len(m)) + f for m, f in zip(maps, first, strict=True)])
    tokens = np.concatenate([m.astype(np.int64) + f for m, f in zip(maps, first, strict=True)])
    differing = np.concatenate(codes)[:, None, :] ^ query_codes[None]
    distance = np.bitwise_count(differing).sum(axis=(1, 2), dtype=np.int64)
    inside = (tokens >= low) & (tokens < high)
    return records[inside][top_k(-distance[inside].astype(np.float32), k)].astype(np.int32)
