"""Ballast: a file that only takes up space, so that a full disk still has some for the catalogue."""

import errno
import os
import sqlite3
from collections.abc import Callable
from logging import WARNING, getLogger
from pathlib import Path
from threading import Lock
from typing import TypeVar

from kvstore_service.daemon.logs import event

BALLAST_BYTES = 1 << 20  # many transactions of the catalogue
_SPARE_BYTES = 2 * BALLAST_BYTES  # that the disk has left when the ballast is taken on
_T = TypeVar("_T")

log = getLogger("kvstored.disk")


class Ballast:
    """Thread-safe. On a disk that is too full for it there is none, and at a start there is none until `take_on`."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / "ballast"
        self._lock = Lock()
        self._path.unlink(missing_ok=True)
        self._aboard = False

    def take_on(self) -> None:
        """If there is room for it."""
        with self._lock:
            if self._aboard or free_bytes(self._path.parent) < _SPARE_BYTES:
                return
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, BALLAST_BYTES)
                self._aboard = True
            except OSError as error:
                self._path.unlink()
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
            finally:
                os.close(fd)

    def owed_bytes(self) -> int:
        """What should stay free while there is no ballast."""
        with self._lock:
            return 0 if self._aboard else BALLAST_BYTES

    def drop(self) -> bool:
        """Gives its space to whoever writes next. False if it is gone already."""
        with self._lock:
            dropped, self._aboard = self._aboard, False
            self._path.unlink(missing_ok=True)
        if dropped:
            event(log, WARNING, "disk full: ballast dropped", bytes=BALLAST_BYTES)
        return dropped

    def behind(self, act: Callable[[], _T]) -> _T:
        """`act` on the catalogue; if the disk has no room for it, once more without the ballast."""
        try:
            return act()
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_FULL or not self.drop():
                raise
        return act()


def free_bytes(directory: Path) -> int:
    """Of the file system, for this user."""
    disk = os.statvfs(directory)
    return disk.f_bavail * disk.f_frsize
