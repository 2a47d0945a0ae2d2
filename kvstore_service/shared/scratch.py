"""A temporary directory with an owner: removed by it, or, if it was killed, by the next one of the same kind."""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Self

from kvstore_service.shared.types import StoreError

_RANDOM = re.compile(r"[a-z0-9_]{8}")


class Scratch:
    """`path` is a fresh directory `PREFIX-xxxxxxxx` under `parent`, for this user alone, until `close`.

    A lock on the directory says that its owner lives, across containers too. Making one removes those of the same
    prefix and user whose owners are dead, after `end(path)` has ended what still works in them."""

    def __init__(self, prefix: str, parent: Path, end: Callable[[Path], None] = lambda path: None) -> None:
        """StoreError FAILED_PRECONDITION if `parent` cannot be written."""
        self._end = end
        try:
            _sweep(prefix, parent, end)
            self.path, self._lock = _make(prefix, parent)
        except OSError as error:
            raise StoreError(
                "FAILED_PRECONDITION", f"no temporary directory under {parent}: {error.strerror}; make it writable"
            ) from error

    def close(self) -> None:
        """Removes the directory with all that is in it. Idempotent."""
        if self._lock >= 0:
            self._end(self.path)
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        self.close()


def disk() -> Path:
    """Where packs of a private daemon lie: TMPDIR if it is set, else /var/tmp, because /tmp is often in memory."""
    own = os.environ.get("TMPDIR") or not Path("/var/tmp").is_dir()
    return Path(tempfile.gettempdir() if own else "/var/tmp")


def for_sockets(bytes_max: int) -> Path:
    """Where temporary files lie, or /tmp if that is longer: a socket's path has at most 107 bytes."""
    parent = tempfile.gettempdir()
    return Path(parent if len(os.fsencode(parent)) <= bytes_max else "/tmp")


def _make(prefix: str, parent: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{prefix}-", dir=parent))
        try:
            lock = _open(path)
        except FileNotFoundError:  # swept before it was locked
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return path, lock
        os.close(lock)


def _sweep(prefix: str, parent: Path, end: Callable[[Path], None]) -> None:
    for path in parent.glob(f"{prefix}-*"):
        if not _RANDOM.fullmatch(path.name.removeprefix(f"{prefix}-")):
            continue
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            lock = _open(path)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    end(path)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
