"""Sidecar files: index data of a pack's build, whole or not at all. A damaged or lost one is none: it can be made anew.

magic[8] | u32 key bytes | u64 content bytes | key | content | u32 CRC-32 of everything before

The key stands in the file so that a lost catalogue can be rebuilt:
a u32 length and the bytes of pack id, build, kind and parameters.
"""

import hashlib
import os
import secrets
import stat
import struct
import zlib
from collections.abc import Iterable

from kvstore_service.daemon.directories import what_is
from kvstore_service.daemon.disk.catalog import Catalog
from kvstore_service.daemon.disk.files import remove_file, sync_directory
from kvstore_service.daemon.disk.rows import SidecarRow
from kvstore_service.shared import memory
from kvstore_service.shared.types import SidecarKey, StoreError

SIDECAR_BYTES_MAX = 1 << 30
_HEAD = struct.Struct("<8sIQ")
_LENGTH = struct.Struct("<I")
_CRC = struct.Struct("<I")
_MAGIC = b"HDGSIDE2"
_PIECE_BYTES = 1 << 20


def file_bytes(key: SidecarKey, content_bytes: int) -> int:
    return _HEAD.size + len(_encoded(key)) + content_bytes + _CRC.size


def write(catalog: Catalog, key: SidecarKey, content: bytes | memoryview, replace: bool = False) -> None:
    """Durable on return. The first content of a key stays, unless it was damaged since or is to be replaced: then
    a crash leaves the former content or this one."""
    if not replace and _is_held(catalog, key):
        return
    row = write_file(catalog, key, content)
    path = catalog.sidecars_dir / row.file
    try:
        left = catalog.commit_sidecar(row, replace)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    if left is not None:
        remove_file(catalog.sidecars_dir / left)


def write_file(catalog: Catalog, key: SidecarKey, content: bytes | memoryview) -> SidecarRow:
    """The file alone, durable on return. Whoever commits no row for it removes it."""
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
    except BaseException:
        partial.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise
    return SidecarRow(key, name, file_bytes(key, len(content)))


def read(catalog: Catalog, key: SidecarKey) -> bytes | None:
    """The content; None if there is none, or no more: one that is not what was written goes, row and file."""
    shared = share(catalog, key)
    if shared is None:
        return None
    with memory.Owned(shared):
        return memory.read(shared)


def _is_held(catalog: Catalog, key: SidecarKey) -> bool:
    """Whether the key has its content, read piece by piece; a damaged one goes, row and file."""
    row = catalog.sidecar(key)
    if row is None:
        return False
    try:
        found = key_of(os.path.join(catalog.sidecars_dir, row.file))
        reason = "" if found == key else "it is another one's"
    except (FileNotFoundError, ValueError) as error:
        reason = str(error)
    if reason:
        catalog.drop_sidecar(row, reason)
    return not reason


def share(catalog: Catalog, key: SidecarKey) -> int | None:
    """As `read`, into a constant memfd, the caller's, by the kernel alone."""
    row = catalog.sidecar(key)
    if row is None:
        return None
    try:
        return _shared(catalog, row)
    except StoreError as error:
        if error.code != "DATA_LOSS":
            raise
        catalog.drop_sidecar(row, error.message)
        return None


def content_of(catalog: Catalog, row: SidecarRow) -> bytes:
    """What the row stands for. DATA_LOSS if its file is not what was written."""
    with memory.Owned(_shared(catalog, row)) as shared:
        return memory.read(shared.fd)


def content_bytes(catalog: Catalog, key: SidecarKey) -> int:
    """NOT_FOUND."""
    row = catalog.sidecar(key)
    if row is None:
        raise StoreError(
            "NOT_FOUND", f"no sidecar {key.kind!r} of pack {key.pack_id.hex()}", reason="SIDECAR_NOT_STORED"
        )
    return row.file_bytes - file_bytes(key, 0)


def _shared(catalog: Catalog, row: SidecarRow) -> int:
    try:
        key, shared = open_file(os.path.join(catalog.sidecars_dir, row.file))
    except (FileNotFoundError, ValueError) as error:
        raise StoreError("DATA_LOSS", f"sidecar {row.file}: {error}") from None
    if key == row.key:
        return shared
    os.close(shared)
    raise StoreError("DATA_LOSS", f"sidecar {row.file}: it is another one's")


def open_file(path: str) -> tuple[SidecarKey, int]:
    """(key, content as a constant memfd). ValueError if the file is not whole, or something else stands in its place.

    It is read, not mapped: a disk's error is then an exception and no signal."""
    with memory.Owned(_open(path)) as file:
        head = os.pread(file.fd, _HEAD.size, 0)
        first, size_bytes = _content_of(head, os.fstat(file.fd).st_size)
        encoded = os.pread(file.fd, first - _HEAD.size, _HEAD.size)
        shared = memory.create("kvstore-sidecar", size_bytes)
        try:
            _copy(file.fd, shared, first, size_bytes)
            with memory.mapped(shared) as content:
                crc = zlib.crc32(content, zlib.crc32(head + encoded))
            if os.pread(file.fd, _CRC.size, first + size_bytes) != _CRC.pack(crc):
                raise ValueError("it fails its checksum")
            memory.add_seals(shared, memory.CONSTANT | memory.F_SEAL_SEAL)
        except BaseException:
            os.close(shared)
            raise
    return _decoded(encoded), shared


def _open(path: str, flags: int = os.O_RDONLY) -> int:
    mode = os.lstat(path).st_mode
    if not stat.S_ISREG(mode):
        raise ValueError(f"in its place stands {what_is(mode)}")
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def key_of(path: str) -> SidecarKey:
    """The key of a file that is whole; of its content there is little in memory at a time. ValueError if it is not."""
    with open(path, "rb", buffering=0, opener=_open) as file:
        pieces = iter(lambda: memoryview(file.read(_PIECE_BYTES)), b"")
        return check(pieces, os.fstat(file.fileno()).st_size)


def check(pieces: Iterable[memoryview], size_bytes: int) -> SidecarKey:
    """The key of a whole file that comes in pieces, the first of which holds the key. ValueError if it is not whole."""
    encoded, crc, seen, end = b"", 0, 0, b""
    for piece in pieces:
        if not seen:
            first, _ = _content_of(bytes(piece[: _HEAD.size]), size_bytes)
            encoded = bytes(piece[_HEAD.size : first])
        summed = piece[: max(0, size_bytes - _CRC.size - seen)]
        crc = zlib.crc32(summed, crc)
        end += bytes(piece[len(summed) :])
        seen += len(piece)
    if seen != size_bytes or end != _CRC.pack(crc):
        raise ValueError("it fails its checksum")
    return _decoded(encoded)


def _content_of(head: bytes, held_bytes: int) -> tuple[int, int]:
    """(offset, bytes) of the content. ValueError if the head is none, or the file's size is not what it says."""
    if len(head) < _HEAD.size:
        raise ValueError(f"{len(head)} B are no sidecar")
    magic, key_bytes, size_bytes = _HEAD.unpack(head)
    first: int = _HEAD.size + key_bytes
    if magic != _MAGIC or first + size_bytes + _CRC.size != held_bytes:
        raise ValueError("its size is not what its head says")
    return first, size_bytes


def _copy(file: int, shared: int, first: int, size_bytes: int) -> None:
    done = 0
    while done < size_bytes:
        sent = os.sendfile(shared, file, first + done, size_bytes - done)
        if sent == 0:
            raise ValueError("it was cut while it was read")
        done += sent


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
