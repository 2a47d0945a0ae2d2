"""Shared memory as descriptors: sealed memfds, never names."""

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

F_ADD_SEALS = 1033
F_GET_SEALS = 1034
F_SEAL_SEAL = 0x1
F_SEAL_SHRINK = 0x2
F_SEAL_GROW = 0x4
F_SEAL_WRITE = 0x8
F_SEAL_FUTURE_WRITE = 0x10

FIXED_SIZE = F_SEAL_SHRINK | F_SEAL_GROW
CONSTANT = FIXED_SIZE | F_SEAL_WRITE


class Owned:
    """Closes its descriptor at the end of a with statement."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __enter__(self) -> "Owned":
        return self

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        os.close(self.fd)


def create(name: str, size_bytes: int) -> int:
    """A zeroed memfd whose size is final. `name` shows up in /proc only."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        add_seals(fd, FIXED_SIZE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def of_bytes(name: str, content: bytes) -> int:
    """A memfd that holds `content` and can never change."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        add_seals(fd, CONSTANT | F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def mapped(fd: int) -> Iterator[memoryview]:
    """The content of a memfd that nobody can write, without a copy; it must not be used after the block."""
    size_bytes = os.fstat(fd).st_size
    if size_bytes == 0:
        yield memoryview(b"")
        return
    with mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ) as mapping, memoryview(mapping) as content:
        yield content


def read(fd: int) -> bytes:
    """The whole content of a memfd. The kernel copies it, so that other threads of Python go on meanwhile."""
    pieces, left_bytes, done_bytes = list[bytes](), os.fstat(fd).st_size, 0
    while left_bytes > 0 and (piece := os.pread(fd, left_bytes, done_bytes)):
        pieces.append(piece)
        done_bytes += len(piece)
        left_bytes -= len(piece)
    return b"".join(pieces)


def held_bytes(fd: int) -> int:
    """The most memory that lives by this memfd: of a sparse one what reading it would take, and of one with pages
    beyond its end those too."""
    status = os.fstat(fd)
    return max(status.st_size, status.st_blocks * 512)


def add_seals(fd: int, seals: int) -> None:
    fcntl.fcntl(fd, F_ADD_SEALS, seals)


def is_constant(fd: int) -> bool:
    """Whether it is memory that can be read and never changes."""
    readable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
    return readable and seals_of(fd) & CONSTANT == CONSTANT


def seals_of(fd: int) -> int:
    """0 for a descriptor that cannot be sealed, such as a plain file."""
    try:
        return fcntl.fcntl(fd, F_GET_SEALS)
    except OSError:
        return 0
