"""Sidecar files: index data of a pack's build, whole or not at all. A damaged or lost one is none: it can be made anew.

magic[8] | u32 key bytes | u64 content bytes | key | content | u32 CRC-32 of everything before

The key stands in the file so that a lost catalogue can be rebuilt: a u32 length and the bytes of pack id, build, kind
and parameters.
"""

import hashlib
import os
import secrets
import stat
import struct
import zlib

from kvstore_service.daemon.directories import what_is
from kvstore_service.daemon.disk.catalog import Catalog, SidecarRow
from kvstore_service.daemon.disk.files import sync_directory
from kvstore_service.shared.types import SidecarKey, StoreError

SIDECAR_BYTES_MAX = 1 << 30
_HEAD = struct.Struct("<8sIQ")
_LENGTH = struct.Struct("<I")
_CRC = struct.Struct("<I")
_MAGIC = b"HDGSIDE2"


def file_bytes(key: SidecarKey, content_bytes: int) -> int:
    return _HEAD.size + len(_encoded(key)) + content_bytes + _CRC.size


def write(catalog: Catalog, key: SidecarKey, content: bytes) -> None:
    """Durable on return. The first content of a key stays, unless it was damaged since."""
    if read(catalog, key) is not None:
        return
    encoded = _encoded(key)
    head = _HEAD.pack(_MAGIC, len(encoded), len(content)) + encoded
    tail = _CRC.pack(zlib.crc32(content, zlib.crc32(head)))
    name = f"{hashlib.sha256(encoded).hexdigest()}-{secrets.token_hex(8)}.sidecar"
    path = catalog.sidecars_dir / name
    partial = path.with_suffix(".partial")
    try:
        with partial.open("xb") as file:
            file.writelines((head, content, tail))
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        sync_directory(catalog.sidecars_dir)
        held = catalog.commit_sidecar(SidecarRow(key, name, file_bytes(key, len(content))))
    except BaseException:
        partial.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise
    if held.file != name:
        path.unlink()


def read(catalog: Catalog, key: SidecarKey) -> bytes | None:
    """The content; None if there is none, or no more: one that is not what was written goes, row and file."""
    row = catalog.sidecar(key)
    if row is None:
        return None
    try:
        return content_of(catalog, row)
    except StoreError as error:
        if error.code != "DATA_LOSS":
            raise
        catalog.drop_sidecar(row, error.message)
        return None


def content_of(catalog: Catalog, row: SidecarRow) -> bytes:
    """What the row stands for. DATA_LOSS if its file is not what was written."""
    try:
        key, content = parse(_read_file(os.path.join(catalog.sidecars_dir, row.file)))
    except (FileNotFoundError, ValueError) as error:
        raise StoreError("DATA_LOSS", f"sidecar {row.file}: {error}") from None
    if key != row.key:
        raise StoreError("DATA_LOSS", f"sidecar {row.file}: it is another one's")
    return content


def _read_file(path: str) -> bytes:
    """ValueError if something else stands in the file's place."""
    mode = os.lstat(path).st_mode
    if not stat.S_ISREG(mode):
        raise ValueError(f"in its place stands {what_is(mode)}")
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        return file.read()


def parse(blob: bytes) -> tuple[SidecarKey, bytes]:
    """(key, content) of a file. ValueError if it is not whole."""
    if len(blob) < _HEAD.size + _CRC.size:
        raise ValueError(f"{len(blob)} B are no sidecar")
    magic, key_bytes, content_bytes = _HEAD.unpack_from(blob)
    if magic != _MAGIC or _HEAD.size + key_bytes + content_bytes + _CRC.size != len(blob):
        raise ValueError("its size is not what its head says")
    (crc,) = _CRC.unpack_from(blob, len(blob) - _CRC.size)
    if crc != zlib.crc32(memoryview(blob)[: -_CRC.size]):
        raise ValueError("it fails its checksum")
    first = _HEAD.size + key_bytes
    return _decoded(blob[_HEAD.size : first]), blob[first : -_CRC.size]


def _encoded(key: SidecarKey) -> bytes:
    parts = (key.pack_id, key.build, key.kind.encode(), key.parameters)
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def _decoded(encoded: bytes) -> SidecarKey:
    parts, at = list[bytes](), 0
    while at < len(encoded):
        (length,) = _LENGTH.unpack_from(encoded, at)
        parts.append(encoded[at + _LENGTH.size : at + _LENGTH.size + length])
        at += _LENGTH.size + length
    pack_id, build, kind, parameters = parts
    return SidecarKey(pack_id, build, kind.decode(), parameters)
