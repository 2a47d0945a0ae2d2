"""Sidecar files: index data of a pack's build, whole or not at all.

magic[8] | SHA-256 of the key | u64 content bytes | content | u32 CRC-32 of everything before
"""

import errno
import hashlib
import os
import secrets
import struct
import zlib

from kvstore_service.daemon.disk.catalog import Catalog, SidecarRow, sync_directory
from kvstore_service.shared.types import SidecarKey, StoreError

SIDECAR_BYTES_MAX = 1 << 30
_HEAD = struct.Struct("<8s32sQ")
_TAIL = struct.Struct("<I")
_MAGIC = b"HDGSIDE1"


def file_bytes(content_bytes: int) -> int:
    return _HEAD.size + content_bytes + _TAIL.size


def write(catalog: Catalog, key: SidecarKey, content: bytes) -> None:
    """Durable on return. The first content of a key stays, unless it was damaged since."""
    if catalog.sidecar(key) is not None:
        try:
            read(catalog, key)
        except StoreError:
            catalog.drop_sidecar(key)
        else:
            return
    head = _HEAD.pack(_MAGIC, _digest(key), len(content))
    tail = _TAIL.pack(zlib.crc32(content, zlib.crc32(head)))
    name = f"{_digest(key).hex()}-{secrets.token_hex(8)}.sidecar"
    path = catalog.sidecars_dir / name
    partial = path.with_suffix(".partial")
    try:
        with partial.open("xb") as file:
            file.writelines((head, content, tail))
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        sync_directory(catalog.sidecars_dir)
        held = catalog.commit_sidecar(SidecarRow(key, name, file_bytes(len(content))))
    except BaseException:
        partial.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise
    if held.file != name:
        path.unlink()


def read(catalog: Catalog, key: SidecarKey) -> bytes:
    """The content. NOT_FOUND, or DATA_LOSS if the file is not what was written."""
    row = catalog.sidecar(key)
    if row is None:
        raise StoreError("NOT_FOUND", f"no sidecar {key.kind!r} of pack {key.pack_id.hex()}")
    try:
        with open(os.open(catalog.sidecars_dir / row.file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
            blob = file.read()
    except FileNotFoundError:
        blob = b""
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise StoreError("DATA_LOSS", f"sidecar {row.file} is a symbolic link") from None
    if len(blob) != row.file_bytes or len(blob) < file_bytes(0):
        raise StoreError("DATA_LOSS", f"sidecar {row.file} has {len(blob)} B, not {row.file_bytes}")
    magic, digest, content_bytes = _HEAD.unpack_from(blob)
    (crc,) = _TAIL.unpack_from(blob, len(blob) - _TAIL.size)
    good = (magic, digest, file_bytes(content_bytes)) == (_MAGIC, _digest(key), len(blob))
    if not good or crc != zlib.crc32(memoryview(blob)[: -_TAIL.size]):
        raise StoreError("DATA_LOSS", f"sidecar {row.file} fails its checksum")
    return blob[_HEAD.size : -_TAIL.size]


def _digest(key: SidecarKey) -> bytes:
    parts = (key.pack_id, key.build, key.kind.encode(), key.parameters)
    return hashlib.sha256(b"".join(struct.pack("<I", len(part)) + part for part in parts)).digest()
