"""Bugs of the store, planted in a life: what the crash model must find. Some of them it has found."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvstore_service import _native
from kvstore_service.daemon import directories
from kvstore_service.daemon.disk import catalog, database, files, sidecars
from kvstore_service.daemon.disk.rows import SidecarRow
from kvstore_service.daemon.store import retier, uploads
from kvstore_service.shared.types import PackRow

_ALWAYS = 1 << 40


def _forget(directory: Path) -> None:
    """Instead of `sync_directory`."""


def _no_sync_before_the_row() -> None:
    _native.io_shim_set([("upload.sync", "skip", 1, _ALWAYS, 0)])


def _short_read_taken_for_whole() -> None:
    _native.io_shim_set([("gather", "trust", 1, _ALWAYS, 0)])


def _no_sync_of_the_directory() -> None:
    uploads.sync_directory = _forget
    sidecars.sync_directory = _forget


def _no_sync_above_the_data_directory() -> None:
    directories.sync_directory = _forget


def _statement_replaced(statement: str, by: str) -> Callable[[], None]:
    """In what the catalogue says to SQLite; "" stands in its name."""

    class Connection(sqlite3.Connection):
        def execute(self, wanted: str, *values: Any) -> sqlite3.Cursor:
            return super().execute(by if wanted == statement else wanted, *values)

    class Module:
        def __getattr__(self, name: str) -> Any:
            return getattr(sqlite3, name)

        def connect(self, name: str, **options: Any) -> sqlite3.Connection:
            return sqlite3.connect(name.replace(statement, by), factory=Connection, **options)

    def plant() -> None:
        database.sqlite3 = Module()  # type: ignore[assignment]

    return plant


def _stamp_that_must_be_readable() -> None:
    def vouches_for(self: files.Stamp, catalog_id: str, commits: int) -> bool:
        with open(self._path, "rb") as file:
            return file.read() == b"%s %020d\n" % (catalog_id.encode(), commits)

    files.Stamp.vouches_for = vouches_for  # type: ignore[method-assign]


def _stamp_before_moves_are_durable() -> None:
    sweep = catalog.Catalog._sweep

    def stamped(self: catalog.Catalog) -> tuple[int, int, int]:
        swept = sweep(self)
        self._stamp.write(self._database.id, self._database.commits())
        return swept

    catalog.Catalog._sweep = stamped  # type: ignore[method-assign]
    catalog.sync_directory = _forget


def _old_build_removed_before_its_row() -> None:
    replace_pack = catalog.Catalog.replace_pack

    def hasty(self: catalog.Catalog, held: PackRow, row: PackRow, sidecars: Sequence[SidecarRow]) -> None:
        files.remove_file(self.packs_dir / held.file)
        files.sync_directory(self.packs_dir)
        replace_pack(self, held, row, sidecars)

    catalog.Catalog.replace_pack = hasty  # type: ignore[method-assign]


def _new_build_without_its_directory() -> None:
    retier.sync_directory = _forget


BUGS: dict[str, Callable[[], None]] = {
    "no sync before the row": _no_sync_before_the_row,
    "no sync of the directory": _no_sync_of_the_directory,
    "no sync above the data directory": _no_sync_above_the_data_directory,
    "no sync of the row": _statement_replaced("PRAGMA synchronous=FULL", "PRAGMA synchronous=OFF"),
    "a short read taken for whole": _short_read_taken_for_whole,
    "commits that share a block of the log": _statement_replaced("?psow=0", ""),
    "a log that is not cut at the start": _statement_replaced("PRAGMA wal_checkpoint(TRUNCATE)", "SELECT 1"),
    "a stamp that must be readable": _stamp_that_must_be_readable,
    "a stamp before moves are durable": _stamp_before_moves_are_durable,
    "an old build removed before its row": _old_build_removed_before_its_row,
    "a new build without its directory": _new_build_without_its_directory,
}
