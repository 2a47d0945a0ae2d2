"""The header of a pack's file (`PackHeader` in csrc/core/pack.h), for those who have no data plane."""

import struct
from dataclasses import dataclass

from kvstore_service import _native
from kvstore_service.shared.types import KindSpec, Layout

_HEAD = struct.Struct("<8sII32s16s32s32sIIIIII")
_KIND = struct.Struct("<IIIIQQ")
_KINDS_MAX = 4
_PLACES = struct.Struct("<QQQQ")
_CRC = struct.Struct("<I")
_CRC_AT = 12
_MAGIC = b"HDGPACK1"


@dataclass(frozen=True)
class PackHeader:
    pack_id: bytes
    build: bytes
    parent: bytes
    layout: Layout
    tokens: int
    extent_blocks: int
    record_order: int
    file_bytes: int


def parse(block: bytes) -> PackHeader:
    """From the file's first 4 KiB. ValueError if they are no header that this version reads."""
    if len(block) != _native.BLOCK_BYTES:
        raise ValueError("no header")
    magic, version, crc, pack_id, build, parent, fingerprint, layers, kind_count, tokens, *rest = _HEAD.unpack_from(
        block
    )
    extent_blocks, record_order, _ = rest
    if magic != _MAGIC:
        raise ValueError("not a pack (magic)")
    if _native.crc32c(block[:_CRC_AT] + bytes(_CRC.size) + block[_CRC_AT + _CRC.size :]) != crc:
        raise ValueError("header checksum")
    if version != _native.PACK_VERSION:
        raise ValueError(f"pack version {version}; this build reads {_native.PACK_VERSION}")
    kinds = [_KIND.unpack_from(block, _HEAD.size + index * _KIND.size) for index in range(kind_count)]
    *_, file_bytes = _PLACES.unpack_from(block, _HEAD.size + _KINDS_MAX * _KIND.size)
    layout = Layout(fingerprint, layers, tuple(KindSpec(*kind[:4]) for kind in kinds))
    return PackHeader(pack_id, build, parent, layout, tokens, extent_blocks, record_order, file_bytes)
