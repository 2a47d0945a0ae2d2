"""Bugs of the store, planted in a life: what the crash model must find."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvstore_service import _native
from kvstore_service.daemon.disk import sidecars
from kvstore_service.daemon.store import uploads

_ALWAYS = 1 << 40


def _no_sync_before_the_row() -> None:
    _native.io_shim_set([("upload.header_sync", "skip", 1, _ALWAYS, 0)])


def _short_read_taken_for_whole() -> None:
    _native.io_shim_set([("gather", "trust", 1, _ALWAYS, 0)])


def _no_directory_sync() -> None:
    def forget(directory: Path) -> None:
        del directory

    uploads.sync_directory = forget
    sidecars.sync_directory = forget


BUGS: dict[str, Callable[[], None]] = {
    "no sync before the row": _no_sync_before_the_row,
    "a short read taken for whole": _short_read_taken_for_whole,
    "no sync of the directory": _no_directory_sync,
}
