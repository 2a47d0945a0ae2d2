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
from kvstore_service.shared import memory
from kvstore_service.shared.types import SidecarKey, StoreError

SIDECAR_BYTES_MAX = 1 << 30
_HEAD = struct.Struct("<8s32sQ")
_TAIL = struct.Struct("<I")
_MAGIC = b"HDGSIDE1"


def file_bytes(content_bytes: int) -> int:
    return _HEAD.size + content_bytes + _TAIL.size


def write(catalog: Catalog, key: SidecarKey, content: bytes | memoryview) -> None:
    """Durable on return. The first content of a key stays, unless it was damaged since."""
    if catalog.sidecar(key) is not None:
        try:
            os.close(share(catalog, key))
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
    with memory.Owned(share(catalog, key)) as shared:
        return memory.read(shared.fd)


def share(catalog: Catalog, key: SidecarKey) -> int:
    """The content as a constant memfd, the caller's, copied by the kernel alone. NOT_FOUND, or DATA_LOSS if the file is
    not what was written."""
    row = catalog.sidecar(key)
    if row is None:
        raise StoreError(
            "NOT_FOUND", f"no sidecar {key.kind!r} of pack {key.pack_id.hex()}", reason="SIDECAR_NOT_STORED"
        )
    try:
        file = os.open(catalog.sidecars_dir / row.file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise StoreError("DATA_LOSS", f"sidecar {row.file} is missing") from None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise StoreError("DATA_LOSS", f"sidecar {row.file} is a symbolic link") from None
    with memory.Owned(file):
        held_bytes = os.fstat(file).st_size
        if held_bytes != row.file_bytes or held_bytes < file_bytes(0):
            raise StoreError("DATA_LOSS", f"sidecar {row.file} has {held_bytes} B, not {row.file_bytes}")
        shared = memory.create("kvstore-sidecar", held_bytes - file_bytes(0))
        try:
            if not _copied(file, shared, key, held_bytes - file_bytes(0)):
                raise StoreError("DATA_LOSS", f"sidecar {row.file} fails its checksum")
            memory.add_seals(shared, memory.CONSTANT | memory.F_SEAL_SEAL)
        except BaseException:
            os.close(shared)
            raise
    return shared


def _copied(file: int, shared: int, key: SidecarKey, size_bytes: int) -> bool:
    """Copies the content, and says whether head, content and tail are what was written for the key."""
    offset = 0
    while offset < size_bytes:
        sent = os.sendfile(shared, file, _HEAD.size + offset, size_bytes - offset)
        if sent == 0:
            return False
        offset += sent
    head = os.pread(file, _HEAD.size, 0)
    (crc,) = _TAIL.unpack(os.pread(file, _TAIL.size, _HEAD.size + size_bytes))
    with memory.mapped(shared) as content:
        whole = crc == zlib.crc32(content, zlib.crc32(head))
    return whole and _HEAD.unpack(head) == (_MAGIC, _digest(key), size_bytes)


def content_bytes(catalog: Catalog, key: SidecarKey) -> int:
    """NOT_FOUND."""
    row = catalog.sidecar(key)
    if row is None:
        raise StoreError(
            "NOT_FOUND", f"no sidecar {key.kind!r} of pack {key.pack_id.hex()}", reason="SIDECAR_NOT_STORED"
        )
    return row.file_bytes - file_bytes(0)


def _digest(key: SidecarKey) -> bytes:
    parts = (key.pack_id, key.build, key.kind.encode(), key.parameters)
    return hashlib.sha256(b"".join(struct.pack("<I", len(part)) + part for part in parts)).digest()
