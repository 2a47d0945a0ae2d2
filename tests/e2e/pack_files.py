"""Pack files as csrc/core/pack.h lays them out, read with NumPy alone: what the store must serve, byte for byte."""

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 4096
KINDS_OFF = 152
_MAGIC = b"HDGPACK1"


@dataclass(frozen=True)
class PackFile:
    """One pack with one kind of record. Block numbers count from the start of the file."""

    path: Path
    pack_id: bytes
    layers: int
    lanes: int
    tokens: int
    record_bytes: int
    data_off: int
    segment_bytes: int
    map_off: int

    @classmethod
    def read(cls, path: Path) -> "PackFile":
        with path.open("rb") as file:
            header = file.read(BLOCK_BYTES)
        assert header[:8] == _MAGIC, f"{path} is no pack"
        layers, kinds, tokens, _ = struct.unpack_from("<4I", header, 128)
        assert kinds == 1
        lanes, _, _, record_bytes, data_off, segment_bytes = struct.unpack_from("<4I2Q", header, KINDS_OFF)
        (map_off,) = struct.unpack_from("<Q", header, KINDS_OFF + 4 * 32)
        return cls(path, header[16:48], layers, lanes, tokens, record_bytes, data_off, segment_bytes, map_off)

    def offset(self, layer: int, lane: int, record: int) -> int:
        """Where a record begins in the file; no record straddles a block."""
        block, index = divmod(record, BLOCK_BYTES // self.record_bytes)
        segment = self.data_off + (layer * self.lanes + lane) * self.segment_bytes
        return segment + block * BLOCK_BYTES + index * self.record_bytes

    def records(self) -> NDArray[np.uint8]:
        """uint8[layers, lanes, tokens, record_bytes] in record order."""
        raw = np.fromfile(self.path, np.uint8, self.layers * self.lanes * self.segment_bytes, offset=self.data_off)
        per_block = BLOCK_BYTES // self.record_bytes
        blocks = raw.reshape(self.layers, self.lanes, -1, BLOCK_BYTES)[..., : per_block * self.record_bytes]
        return blocks.reshape(self.layers, self.lanes, -1, self.record_bytes)[:, :, : self.tokens]

    def order(self) -> NDArray[np.uint16]:
        """Record -> token within the pack, uint16[layers, lanes, tokens]."""
        padded = -(-2 * self.tokens // BLOCK_BYTES) * BLOCK_BYTES // 2
        flat = np.fromfile(self.path, np.uint16, self.layers * self.lanes * padded, offset=self.map_off)
        return flat.reshape(self.layers, self.lanes, padded)[..., : self.tokens]

    def flip(self, offset: int) -> None:
        """Changes one bit on disk, durably."""
        fd = os.open(self.path, os.O_RDWR)
        try:
            (byte,) = os.pread(fd, 1, offset)
            os.pwrite(fd, bytes([byte ^ 0x10]), offset)
            os.fsync(fd)
        finally:
            os.close(fd)


def packs_by_id(data_dir: Path) -> dict[bytes, PackFile]:
    packs = [PackFile.read(path) for path in (data_dir / "packs").iterdir()]
    return {pack.pack_id: pack for pack in packs}
