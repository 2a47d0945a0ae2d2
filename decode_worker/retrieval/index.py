"""The index of one pack: immutable, shared by every slot and session that reads the pack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore_service.shared import index_file
from kvstore_service.shared.index_file import IndexFormatError as IndexFormatError


@dataclass(frozen=True, eq=False)
class PackIndex:
    """`data`: [layers, H, tokens, ...] in record order. `parameters`: 32-byte digest of what it was computed with."""

    parameters: bytes
    data: NDArray[Any]

    def __post_init__(self) -> None:
        self.data.flags.writeable = False

    @property
    def tokens(self) -> int:
        return int(self.data.shape[2])

    @property
    def index_bytes(self) -> int:
        return self.data.nbytes

    def reordered(self, records: NDArray[np.integer[Any]]) -> PackIndex:
        """The same index with record i taken from records[layer, head, i]."""
        return PackIndex(self.parameters, index_file.reordered(self.data, records))

    def save(self) -> bytes:
        """The sidecar."""
        return index_file.save(self.parameters, self.data)

    @staticmethod
    def load(blob: bytes, parameters: bytes) -> PackIndex:
        """Raises IndexFormatError if the blob is damaged or belongs to other parameters or another version."""
        stored, data = index_file.load(blob)
        if stored != parameters:
            raise IndexFormatError("the index sidecar was made with other retriever parameters")
        return PackIndex(parameters, data)
