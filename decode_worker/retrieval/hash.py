"""`hash` (HATA): signs of 256 projections per key; the nearest in Hamming distance, summed over the query group."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from decode_worker import _native
from decode_worker.retrieval.base import RETRIEVERS, Retriever
from decode_worker.retrieval.view import View

if TYPE_CHECKING:
    from decode_worker.calibration.profile import Profile
    from decode_worker.model.config import ModelConfig

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

    @property
    def projection(self) -> NDArray[np.float32]:
        """float32[layers, H, d, 256]."""
        return self._projection

    def scores(
        self, layer: int, head: int, view: View, query: NDArray[np.float32], records: NDArray[np.intp]
    ) -> NDArray[np.float32]:
        codes = np.concatenate(view.column(layer, head)[0])[records]
        differing = codes[:, None, :] ^ self.query_codes(layer, head, query)[None]
        return -np.bitwise_count(differing).sum(axis=(1, 2), dtype=np.int64).astype(np.float32)

    def query_codes(self, layer: int, head: int, query: NDArray[np.float32]) -> NDArray[np.uint64]:
        """uint64[g, 4]; queries are not centred."""
        return _native.hash_encode(query, self._projection[layer, head], self._no_centre)


@RETRIEVERS.register("hash")
def make(config: ModelConfig, profile: Profile) -> Retriever:
    return HashRetriever(*profile.hash_parameters(config.layers, config.kv_heads, config.head_dim))


def encode_reference(
    x: NDArray[np.float32], projection: NDArray[np.float32], centre: NDArray[np.float32]
) -> NDArray[np.uint64]:
    """`_native.hash_encode` in NumPy: what the kernel is tested against."""
    bits = ((x - centre) @ projection > 0).reshape(len(x), WORDS, 64)
    weights = np.uint64(1) << np.arange(64, dtype=np.uint64)
    return np.where(bits, weights, np.uint64(0)).sum(axis=2, dtype=np.uint64)
