"""Verification: every byte of packs and their sidecars, read past the data plane.

One thread of its own reads with io_uring and O_DIRECT into its own buffers, at a bounded rate: no frame is touched, no
pack is kept open, and a decode shares nothing with it but the disk.
"""

import logging
import os
import select
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, islice
from mmap import mmap
from pathlib import Path

import liburing
import numpy as np
from numpy.typing import NDArray

from kvstore_service import _native
from kvstore_service.daemon.directories import what_is
from kvstore_service.daemon.disk import pack_header, sidecars
from kvstore_service.daemon.disk.catalog import Catalog
from kvstore_service.daemon.disk.rows import SidecarRow
from kvstore_service.daemon.logs import event
from kvstore_service.shared.types import NO_PARENT, PackRow, StoreError

BLOCK_BYTES: int = _native.BLOCK_BYTES
CHUNK_BYTES = 64 * BLOCK_BYTES
DEPTH = 4  # chunks in flight
READ_S = 30.0
LATE_S = 1.0  # for reads that nobody wants any more
SUSPECTS_MAX = 256
_CRC = struct.Struct("<I")

log = logging.getLogger("kvstored.verifier")


class Verifier:
    """Thread-safe; packs are verified one after the other. `bytes_per_s` 0: as fast as the disk gives them."""

    def __init__(self, catalog: Catalog, bytes_per_s: int) -> None:
        self._catalog = catalog
        self._bytes_per_s = bytes_per_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verify")
        self._thread_id = self._thread.submit(threading.get_ident).result()
        self._ending = threading.Event()
        self._free_s = time.monotonic()
        self._suspects: deque[PackRow] = deque(maxlen=SUSPECTS_MAX)
        self._buffers = _Buffers()

    def close(self) -> None:
        self._ending.set()
        self._thread.shutdown(cancel_futures=True)

    def verify(self, row: PackRow) -> tuple[list[int], str]:
        """(bad blocks, error). A pack whose bytes are not what was committed is served no more; a sidecar goes."""
        if self._ending.is_set():
            return [], "the daemon is ending"
        return self._thread.submit(self._verify, row).result()

    def suspect(self, row: PackRow) -> None:
        """Damage was met in this pack: the rest of its chain is verified soon, so that one run can mend all of it."""
        if threading.get_ident() == self._thread_id or self._ending.is_set():
            return
        self._suspects.append(row)
        self._thread.submit(self._verify_chains)

    def _verify_chains(self) -> None:
        while self._suspects:
            row = self._suspects.popleft()
            line = chain(self._ancestors(row), self._catalog.descendants(row.ref.pack_id))
            for other in islice(line, SUSPECTS_MAX):
                if self._ending.is_set():
                    return
                if self._catalog.served(other.ref.pack_id) == other:
                    _, error = self._verify(other)
                    if error:
                        event(log, logging.WARNING, "pack not verified", pack_id=other.ref.pack_id.hex(), error=error)

    def _ancestors(self, row: PackRow) -> Iterator[PackRow]:
        for _ in range(SUSPECTS_MAX):
            if row.parent == NO_PARENT:
                return
            try:
                row = self._catalog.any_pack(row.parent)
            except StoreError:
                return
            yield row

    def _verify(self, row: PackRow) -> tuple[list[int], str]:
        try:
            bad_blocks, damage = self.check(self._catalog.packs_dir, row)
            reason = damage or (f"{len(bad_blocks)} bad blocks" if bad_blocks else "")
            if reason and not self._catalog.mark_damaged(row, reason):
                return [], f"pack {row.ref.pack_id.hex()} is not stored any more"
            dropped = [self._check_sidecar(sidecar) for sidecar in self._catalog.sidecars_of(row.ref.pack_id)]
        except OSError as error:
            return [], f"{row.file}: {error.strerror or error}"
        except StoreError as error:
            return [], error.message
        return bad_blocks, "; ".join(filter(None, (damage, *dropped)))

    def check(self, directory: Path, row: PackRow) -> tuple[list[int], str]:
        """(bad blocks, what else is wrong) of the pack's file in `directory`, in this thread.
        OSError if the disk fails."""
        crcs: list[NDArray[np.uint32]] = []
        zero: list[NDArray[np.bool_]] = []
        data_blocks = _checked_blocks(row.file_bytes) + 1
        head, table, block = b"", b"", 0
        try:
            for chunk in self._chunks(directory / row.file, row.file_bytes):
                head = head or bytes(chunk[:BLOCK_BYTES])
                table += bytes(chunk[max(0, (data_blocks - block) * BLOCK_BYTES) :])
                crcs.append(_native.block_crcs(row.ref.build, block, chunk))
                zero.append(np.logical_not(np.any(chunk.reshape(-1, BLOCK_BYTES), axis=1)))
                block += len(crcs[-1])
        except (FileNotFoundError, _WrongSizeError) as error:
            return [], f"{row.file} {error if isinstance(error, _WrongSizeError) else 'is gone'}"
        if fault := _fault_of_head(row, head) or _fault_of_table(row, table, data_blocks - 1):
            return [], f"{row.file}: {fault}"
        wanted = np.frombuffer(table, np.uint32, data_blocks - 1)
        bad = (np.concatenate(crcs)[1:data_blocks] != wanted) | np.concatenate(zero)[1:data_blocks]
        return [int(index) + 1 for index in np.flatnonzero(bad)], ""

    def _check_sidecar(self, row: SidecarRow) -> str:
        """What was wrong with it, if it was dropped for that."""
        try:
            chunks = self._chunks(self._catalog.sidecars_dir / row.file, row.file_bytes)
            key = sidecars.check((chunk.data for chunk in chunks), row.file_bytes)
            reason = "" if key == row.key else "it is another one's"
        except (FileNotFoundError, ValueError) as error:
            reason = str(error)
        if not reason or not self._catalog.drop_sidecar(row, reason):
            return ""
        return f"sidecar {row.key.kind!r} was damaged ({reason}) and is dropped"

    def _chunks(self, path: Path, size: int) -> Iterator[NDArray[np.uint8]]:
        """The file's bytes in order, at the bounded rate; a chunk is valid until the next. OSError if the disk fails,
        _WrongSizeError if it is no file of `size` bytes."""
        flags = os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        if not stat.S_ISREG(mode := os.lstat(path).st_mode):
            raise _WrongSizeError(f"is {what_is(mode)}")
        fd = os.open(path, flags)
        try:
            if (held := os.fstat(fd).st_size) != size:
                raise _WrongSizeError(f"has {held} B: it ends before byte {size} or goes on after it")
            with _reading(fd, size, self._buffers) as chunks:
                for chunk in chunks:
                    self._pace(len(chunk))
                    yield chunk
        finally:
            os.close(fd)

    def _pace(self, size: int) -> None:
        if self._ending.is_set():
            raise StoreError("UNAVAILABLE", "the daemon is ending")
        if self._bytes_per_s:
            now = time.monotonic()
            self._free_s = max(self._free_s, now) + size / self._bytes_per_s
            self._ending.wait(self._free_s - now)


class _WrongSizeError(ValueError):
    """What stands at the path is not the file that was committed."""


class _Buffers:
    """Where reads land, of one file at a time. The binding never lets go of what a vector points to, so they are made
    once, and anew only after a read that may still land in them."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self.memory = [mmap(-1, CHUNK_BYTES) for _ in range(DEPTH)]
        self.vectors = [liburing.Iovec([memoryview(buffer)]) for buffer in self.memory]


@contextmanager
def _reading(fd: int, size: int, buffers: _Buffers) -> Iterator[Iterator[NDArray[np.uint8]]]:
    """Chunks in order, DEPTH of them in flight. The binding's own waits hold the GIL: a poll of the ring does not."""
    ring, cqe = liburing.Ring(), liburing.Cqe()
    liburing.io_uring_queue_init(DEPTH, ring)
    poll = select.poll()
    poll.register(ring.ring_fd, select.POLLIN)
    flying: set[int] = set()
    landed: dict[int, int] = {}

    def submit(number: int) -> None:
        sqe = liburing.io_uring_get_sqe(ring)
        liburing.io_uring_prep_readv(sqe, fd, buffers.vectors[number % DEPTH], number * CHUNK_BYTES)
        sqe.user_data = number
        liburing.io_uring_submit(ring)
        flying.add(number)

    def take(number: int, wait_s: float = READ_S) -> int:
        deadline = time.monotonic() + wait_s
        while number not in landed:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                raise TimeoutError(None, f"a read did not end within {wait_s:.0f} s")
            while liburing.io_uring_cq_ready(ring):
                liburing.io_uring_peek_cqe(ring, cqe)
                landed[cqe[0].user_data] = cqe[0].res
                flying.discard(cqe[0].user_data)
                liburing.io_uring_cq_advance(ring, 1)
        return landed.pop(number)

    def chunks() -> Iterator[NDArray[np.uint8]]:
        count = -(-size // CHUNK_BYTES)
        for number in range(min(DEPTH, count)):
            submit(number)
        for number in range(count):
            got, wanted = take(number), min(CHUNK_BYTES, size - number * CHUNK_BYTES)
            if got < 0:
                raise OSError(-got, os.strerror(-got))
            if got < wanted:
                raise _WrongSizeError(f"ends before byte {size}")
            yield np.frombuffer(buffers.memory[number % DEPTH], np.uint8, wanted)
            if number + DEPTH < count:
                submit(number + DEPTH)

    try:
        yield chunks()
    finally:
        try:
            for number in sorted(flying):  # the reader gave up
                take(number, LATE_S)
        except TimeoutError:
            buffers.renew()
        finally:
            liburing.io_uring_queue_exit(ring)


def _checked_blocks(file_bytes: int) -> int:
    """Blocks between header and checksum table of a pack: the table has a u32 for each and one for itself."""
    blocks = file_bytes // BLOCK_BYTES
    return blocks - -(-blocks // (BLOCK_BYTES // _CRC.size + 1)) - 1


def _fault_of_head(row: PackRow, head: bytes) -> str:
    try:
        header = pack_header.parse(head)
    except ValueError as error:
        return str(error)
    same = (header.pack_id, header.build, header.tokens) == (row.ref.pack_id, row.ref.build, row.ref.tokens)
    return "" if same else "the file is another pack's"


def _fault_of_table(row: PackRow, table: bytes, count: int) -> str:
    end = count * _CRC.size
    (stored,) = _CRC.unpack_from(table, end)
    whole = _native.crc32c(row.ref.build + table[:end]) == stored and not any(table[end + _CRC.size :])
    return "" if whole else "checksum of the checksum table"
