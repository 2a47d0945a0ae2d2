"""The index of one pack: immutable, shared by every slot and session that reads the pack."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"HDGINDEX"
VERSION = 1
_HEADER = struct.Struct("<8sI32s")
_CRC = struct.Struct("<I")


class IndexFormatError(ValueError):
    """A sidecar is damaged, or was made with other parameters."""


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
        layers, heads = np.ogrid[: records.shape[0], : records.shape[1]]
        return PackIndex(self.parameters, self.data[layers[..., None], heads[..., None], records])

    def save(self) -> bytes:
        """The sidecar: header, the array in NumPy's format, CRC-32 of both."""
        body = io.BytesIO()
        body.write(_HEADER.pack(MAGIC, VERSION, self.parameters))
        np.save(body, self.data, allow_pickle=False)
        content = body.getvalue()
        return content + _CRC.pack(zlib.crc32(content))

    @staticmethod
    def load(blob: bytes, parameters: bytes) -> PackIndex:
        """Raises IndexFormatError if the blob is damaged or belongs to other parameters or another version."""
        content, end = blob[: -_CRC.size], blob[-_CRC.size :]
        if len(blob) < _HEADER.size + _CRC.size or _CRC.unpack(end)[0] != zlib.crc32(content):
            raise IndexFormatError("the index sidecar is damaged: its checksum is wrong")
        magic, version, stored = _HEADER.unpack_from(content)
        if magic != MAGIC or version != VERSION:
            raise IndexFormatError(f"the index sidecar has format version {version}, expected {VERSION}")
        if stored != parameters:
            raise IndexFormatError("the index sidecar was made with other retriever parameters")
        return PackIndex(parameters, np.load(io.BytesIO(content[_HEADER.size :]), allow_pickle=False))
