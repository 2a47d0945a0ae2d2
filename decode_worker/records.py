"""The bytes of one record: K[d] ‖ V[d] of one token and one KV head, in the storage dtype or quantised."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from decode_worker import _native
from decode_worker.quantised import quantised, restored

STORAGE_DTYPES = {
    "float32": (_native.DTYPE_FLOAT32, torch.float32),
    "bfloat16": (_native.DTYPE_BFLOAT16, torch.bfloat16),
}
QUANTISED = {"int8": (_native.DTYPE_INT8, 8), "int4": (_native.DTYPE_INT4, 4)}
RECORD_ALIGN = 64


@dataclass(frozen=True)
class RecordFormat:
    """How K and V of one token and KV head lie in a record of a pack.

    storage: float32 | bfloat16, the dtype that they are rounded to first. kind: model, where they stay that, or one of
    QUANTISED."""

    kv_heads: int
    head_dim: int
    storage: str
    kind: str = "model"

    @property
    def own(self) -> RecordFormat:
        """Of the tokens that no pack holds yet, and of resident heads: never quantised."""
        return replace(self, kind="model")

    @property
    def quantised(self) -> bool:
        return self.kind in QUANTISED

    @property
    def name(self) -> str:
        """What it adds to the identity of KV."""
        return f"{self.storage}, {self.kind}" if self.quantised else self.storage

    @property
    def code(self) -> int:
        """enum Dtype in csrc/core/pack.h."""
        return QUANTISED[self.kind][0] if self.quantised else STORAGE_DTYPES[self.storage][0]

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of K and V before they are quantised."""
        return STORAGE_DTYPES[self.storage][1]

    @property
    def record_bytes(self) -> int:
        return -(-2 * self._half_bytes // RECORD_ALIGN) * RECORD_ALIGN

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., d] as the store returns it, widened to float32."""
        x = x.to(self.torch_dtype).float()
        return restored(quantised(x, self._bits), self._bits) if self.quantised else x

    def blocks(self, tokens: int) -> int:
        """Of a segment."""
        return -(-tokens // self.records_per_block)

    @property
    def records_per_block(self) -> int:
        return _native.BLOCK_BYTES // self.record_bytes

    def staged_bytes(self, tokens: int) -> int:
        """Staging memory of one layer of a pack: per head the records, then the map, then grades."""
        return self.kv_heads * self._head_bytes(tokens)

    def stage(
        self,
        part: NDArray[np.uint8],
        keys: torch.Tensor,
        values: torch.Tensor,
        order: NDArray[np.uint16],
        grades: NDArray[np.uint8] | None = None,
    ) -> NDArray[np.uint64]:
        """Writes one layer's segments (K, V: [n, H, d]; order: uint16[H, n], record -> token; grades: uint8[H, blocks])
        into `part`; returns their offsets there, uint64[H]."""
        tokens = order.shape[1]
        offsets = np.arange(self.kv_heads, dtype=np.uint64) * self._head_bytes(tokens)
        move = self._move_quantised if self.quantised else self._move
        move(part, keys, values, order, offsets)
        for head, (first, tokens_of) in enumerate(zip(offsets.tolist(), order, strict=True)):
            end = first + tokens * self.record_bytes
            map_end = end + 2 * tokens
            part[end:map_end] = tokens_of.view(np.uint8)
            if grades is not None:
                part[map_end : map_end + grades.shape[1]] = grades[head]
        return offsets

    def _move(
        self,
        part: NDArray[np.uint8],
        keys: torch.Tensor,
        values: torch.Tensor,
        order: NDArray[np.uint16],
        offsets: NDArray[np.uint64],
    ) -> None:
        """Each token's K and V are rounded on their way into the record's place: read once, written once."""
        heads, tokens = order.shape
        if self.record_bytes > 2 * self._half_bytes:
            for first in offsets.tolist():
                part[first : first + tokens * self.record_bytes] = 0
        place = np.full((tokens, heads), -1, dtype=np.int32)
        place[order, np.arange(heads)[:, None]] = np.arange(tokens)
        base = np.broadcast_to(offsets, place.shape).copy()
        key, value = (x.float().contiguous().numpy() for x in (keys, values))
        _native.store_token(part, base, place, key, value, self.code, self.record_bytes)

    def _move_quantised(
        self,
        part: NDArray[np.uint8],
        keys: torch.Tensor,
        values: torch.Tensor,
        order: NDArray[np.uint16],
        offsets: NDArray[np.uint64],
    ) -> None:
        heads, tokens = order.shape
        # Converted where they lie and moved as whole records: a third of what it takes to move K and V first.
        records = torch.zeros((heads, tokens, self.record_bytes), dtype=torch.uint8)
        self.pack(keys.transpose(0, 1), values.transpose(0, 1), records)
        for head, first in enumerate(offsets.tolist()):
            segment = part[first : first + tokens * self.record_bytes].reshape(tokens, self.record_bytes)
            np.take(records[head].numpy(), order[head], axis=0, out=segment, mode="clip")

    def pack(self, keys: torch.Tensor, values: torch.Tensor, records: torch.Tensor) -> None:
        """K, V [..., d] -> `records`, uint8 [..., record_bytes]; what lies behind V stays as it is."""
        half = self._half_bytes
        if self.quantised:
            records[..., :half] = quantised(keys.to(self.torch_dtype), self._bits)
            records[..., half : 2 * half] = quantised(values.to(self.torch_dtype), self._bits)
        else:
            pair = records.view(self.torch_dtype)
            pair[..., : self.head_dim] = keys
            pair[..., self.head_dim : 2 * self.head_dim] = values

    def unpack(self, raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Records uint8 [..., record_bytes] -> K, V [..., d] in the storage dtype; float32 of what was quantised."""
        half = self._half_bytes
        if self.quantised:
            return restored(raw[..., :half], self._bits), restored(raw[..., half : 2 * half], self._bits)
        pair = raw[..., : 2 * half].contiguous().view(self.torch_dtype)
        return pair[..., : self.head_dim], pair[..., self.head_dim :]

    @property
    def _bits(self) -> int:
        return QUANTISED[self.kind][1] if self.quantised else 8 * self.torch_dtype.itemsize

    @property
    def _half_bytes(self) -> int:
        return self.head_dim * self._bits // 8

    def _head_bytes(self, tokens: int) -> int:
        behind = 2 * tokens + self.blocks(tokens)
        return tokens * self.record_bytes + -(-behind // RECORD_ALIGN) * RECORD_ALIGN
