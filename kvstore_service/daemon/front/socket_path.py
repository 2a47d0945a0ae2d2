"""Paths of sockets: one daemon has one, from before it listens there until its sockets are gone."""

import fcntl
import os
import socket
import stat
from pathlib import Path

from kvstore_service.daemon import directories
from kvstore_service.shared.types import StoreError


class SocketPath:
    """Free for a listener of ours, and nobody else's, until it is closed. A lock file beside it says so: whether
    somebody listens there does not say who is about to, or has just ended."""

    def __init__(self, path: Path) -> None:
        """A socket that a dead daemon left is removed. FAILED_PRECONDITION if another daemon has the path, or if it is
        another kind of file."""
        self._path = path
        self._lock_path = path.with_name(f"{path.name}.lock")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directories.require_own(path.parent, sticky=True)
        self._lock = self._hold()
        try:
            _clear(path)
        except BaseException:
            self._let_go()
            raise

    def close(self) -> None:
        """Removes the socket."""
        self._path.unlink(missing_ok=True)
        self._let_go()

    def _hold(self) -> int:
        while True:
            fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                raise StoreError(
                    "FAILED_PRECONDITION", f"another daemon has {self._path}; stop it or use another path"
                ) from None
            if os.fstat(fd).st_nlink:
                return fd
            os.close(fd)  # its holder has just removed it

    def _let_go(self) -> None:
        self._lock_path.unlink(missing_ok=True)
        os.close(self._lock)


def _clear(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise StoreError("FAILED_PRECONDITION", f"{path} exists and is no socket; remove it or use another path")
    except FileNotFoundError:
        return
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(path))
            except FileNotFoundError:
                return
            except OSError as error:
                if not isinstance(error, ConnectionRefusedError) and "wrong type" not in str(error):
                    raise StoreError("FAILED_PRECONDITION", f"{path} cannot be probed: {error}") from error
                continue
        raise StoreError("FAILED_PRECONDITION", f"another daemon is listening on {path}; stop it or use another path")
    path.unlink(missing_ok=True)


def open_to(path: Path, group: int | None) -> None:
    """Lets the group's members connect, or nobody but the owner (and root)."""
    os.chmod(path, 0o600)
    if group is not None:
        os.chown(path, -1, group)
        os.chmod(path, 0o660)
