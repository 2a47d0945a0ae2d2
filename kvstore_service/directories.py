"""Directories in which no other user can put anything in the place of ours."""

import os
import stat
from pathlib import Path

from kvstore_service.types import StoreError


def require_own(directory: Path) -> None:
    """FAILED_PRECONDITION if another user could rename, replace or plant a file there, such as a symbolic link.

    A shared directory with the sticky bit, such as /tmp, is good enough for names that are created exclusively."""
    held = directory.stat()
    if held.st_uid not in (0, os.getuid()):
        raise StoreError(
            "FAILED_PRECONDITION",
            f"{directory} belongs to user id {held.st_uid}; use a directory of user id {os.getuid()}",
        )
    if held.st_mode & stat.S_IWOTH and not held.st_mode & stat.S_ISVTX:
        raise StoreError("FAILED_PRECONDITION", f"{directory} can be written by every user; chmod o-w it")


def require_no_link(path: Path) -> None:
    """FAILED_PRECONDITION if `path` is a symbolic link: what it points to may be anybody's."""
    if path.is_symlink():
        raise StoreError("FAILED_PRECONDITION", f"{path} is a symbolic link; remove it")
