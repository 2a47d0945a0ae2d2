"""The bytes of one record: K[d] ‖ V[d] of one token and one KV head, in the storage dtype."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from decode_worker import _native

STORAGE_DTYPES = {
    "float32": (_native.DTYPE_FLOAT32, torch.float32),
    "bfloat16": (_native.DTYPE_BFLOAT16, torch.bfloat16),
}
RECORD_ALIGN = 64


@dataclass(frozen=True)
class RecordFormat:
    """How K and V of one token and KV head lie in a record."""

    kv_heads: int
    head_dim: int
    storage: str  # float32 | bfloat16

    @property
    def code(self) -> int:
        return STORAGE_DTYPES[self.storage][0]

    @property
    def torch_dtype(self) -> torch.dtype:
        return STORAGE_DTYPES[self.storage][1]

    @property
    def record_bytes(self) -> int:
        used = 2 * self.head_dim * self.torch_dtype.itemsize
        return -(-used // RECORD_ALIGN) * RECORD_ALIGN

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """x as the store returns it, widened to float32."""
        return x.to(self.torch_dtype).float()

    def staged_bytes(self, tokens: int) -> int:
        """Staging memory of one layer of a pack: per head the records, then the map."""
        return self.kv_heads * self._head_bytes(tokens)

    def stage(
        self,
        part: NDArray[np.uint8],
        head: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        order: NDArray[np.uint16],
    ) -> int:
        """Writes one segment (K, V: [n, d]; order: uint16[n], record -> token) into `part`;
        returns its offset there."""
        tokens = len(order)
        at = head * self._head_bytes(tokens)
        record_end = at + tokens * self.record_bytes
        records = torch.from_numpy(part[at:record_end]).view(tokens, self.record_bytes)
        half = self.head_dim * self.torch_dtype.itemsize
        index = torch.from_numpy(order.astype(np.int64))
        records[:, :half] = keys.to(self.torch_dtype)[index].view(torch.uint8)
        records[:, half : 2 * half] = values.to(self.torch_dtype)[index].view(torch.uint8)
        part[record_end : record_end + 2 * tokens] = order.view(np.uint8)
        return at

    def unpack(self, raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Records uint8 [..., record_bytes] -> K, V [..., d] in the storage dtype."""
        half = self.head_dim * self.torch_dtype.itemsize
        pair = raw[..., : 2 * half].contiguous().view(self.torch_dtype)
        return pair[..., : self.head_dim], pair[..., self.head_dim :]

    def _head_bytes(self, tokens: int) -> int:
        map_bytes = -(-2 * tokens // RECORD_ALIGN) * RECORD_ALIGN
        return tokens * self.record_bytes + map_bytes
