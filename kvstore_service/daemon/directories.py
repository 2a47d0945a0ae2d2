"""Directories of the daemon: they can hold packs, and no other user can put anything in the place of ours."""

import errno
import fcntl
import mmap
import os
import stat
import tempfile
from pathlib import Path

from kvstore_service.daemon.disk.files import sync_directory
from kvstore_service.shared.types import StoreError, format_size

# An empty catalogue with its log.
ROOM_BYTES = 1 << 20
_FIXES = {
    errno.ENOSPC: f"free at least {format_size(ROOM_BYTES)} there or set data_dir to another disk",
    errno.EDQUOT: "raise this user's disk quota or set data_dir to another disk",
    errno.EROFS: "mount it for writing or set data_dir to another directory",
    errno.EEXIST: "set data_dir to a directory",
    errno.EINVAL: "this file system has no O_DIRECT; set data_dir to a directory on ext4 or xfs",
}


def prepare(data_dir: Path) -> None:
    """Creates what is missing of the path and tries a nameless file in it: it can be written, takes O_DIRECT and, if
    nothing is stored there yet, has room. FAILED_PRECONDITION, with nothing created, if packs cannot be kept there."""
    created: list[Path] = []
    try:
        for directory in (*reversed(data_dir.parents), data_dir):
            if not directory.is_dir():
                directory.mkdir(mode=0o700)
                created.append(directory)
        with tempfile.TemporaryFile(dir=data_dir, buffering=0) as probe, mmap.mmap(-1, mmap.PAGESIZE) as page:
            fcntl.fcntl(probe, fcntl.F_SETFL, os.O_DIRECT)
            if not (data_dir / "catalog.sqlite").exists():
                os.posix_fallocate(probe.fileno(), 0, ROOM_BYTES)
                os.pwrite(probe.fileno(), page, 0)
        for directory in created:  # or all that is stored below could go with the name
            sync_directory(directory.parent)
    except OSError as error:
        for directory in reversed(created):
            directory.rmdir()
        fix = _FIXES.get(error.errno or 0, f"let user id {os.getuid()} write there or set another data_dir")
        raise StoreError("FAILED_PRECONDITION", f"data_dir={data_dir}: {error.strerror}; {fix}") from error


def require_own(directory: Path, sticky: bool = False) -> None:
    """FAILED_PRECONDITION if another user could rename, replace or plant a file there, such as a symbolic link.

    `sticky`: a shared directory with that bit, such as /tmp, is good enough, where names are created exclusively."""
    held = directory.stat()
    if held.st_uid not in (0, os.getuid()):
        raise StoreError(
            "FAILED_PRECONDITION",
            f"{directory} belongs to user id {held.st_uid}; use a directory of user id {os.getuid()}",
        )
    if held.st_mode & stat.S_IWOTH and not (sticky and held.st_mode & stat.S_ISVTX):
        raise StoreError("FAILED_PRECONDITION", f"{directory} can be written by every user; chmod o-w it")


def require_plain(path: Path) -> None:
    """FAILED_PRECONDITION if something other than a file stands at `path`: a link may point to anybody's, a FIFO blocks
    whoever opens it."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise StoreError("FAILED_PRECONDITION", f"{path} is {what_is(mode)}; remove it")


def what_is(mode: int) -> str:
    """What a file mode other than a regular file's stands for."""
    return "a symbolic link" if stat.S_ISLNK(mode) else "a directory" if stat.S_ISDIR(mode) else "no regular file"
