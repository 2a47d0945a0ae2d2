"""A census of the catalogue's rows: what concerns all of them, taken a page at a time, so that no call waits for it."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore_service.daemon.disk import files, schema
from kvstore_service.daemon.disk.database import Database, totals_of
from kvstore_service.daemon.disk.rows import Totals
from kvstore_service.shared.types import pack_file

PAGE_ROWS = 1 << 13
PAUSE_S = 0.001  # between two pages: whoever waits for the connection's lock gets it
_HALVES = "hex(substr(pack_id, 1, 8)) || hex(substr(build, 1, 8))"


def _carry(name: str, event: str, row: str, **changes: str) -> str:
    """A trigger that adds the changes of a row that was counted already to the count."""
    changed = ", ".join(f"{column} = {column} + ({change})" for column, change in changes.items())
    return f"""CREATE TEMP TRIGGER recount_{name} AFTER {event} WHEN {row}.pack_id <= (SELECT upto FROM recount) BEGIN
      UPDATE recount SET {changed};
    END"""


_BEGIN_RECOUNT = (
    "CREATE TEMP TABLE recount (upto BLOB, packs INTEGER, pack_bytes INTEGER, sidecar_bytes INTEGER, damaged INTEGER)",
    "INSERT INTO recount VALUES (x'', 0, 0, 0, 0)",
    _carry("pack_added", "INSERT ON main.packs", "new",
           packs="1", pack_bytes="new.file_bytes", damaged="new.damage IS NOT NULL"),
    _carry("pack_changed", "UPDATE OF file_bytes, damage ON main.packs", "new",
           pack_bytes="new.file_bytes - old.file_bytes",
           damaged="(new.damage IS NOT NULL) - (old.damage IS NOT NULL)"),
    _carry("pack_removed", "DELETE ON main.packs", "old",
           packs="-1", pack_bytes="-old.file_bytes", damaged="-(old.damage IS NOT NULL)"),
    _carry("sidecar_added", "INSERT ON main.sidecars", "new", sidecar_bytes="new.file_bytes"),
    _carry("sidecar_removed", "DELETE ON main.sidecars", "old", sidecar_bytes="-old.file_bytes"),
)  # fmt: skip
_END_RECOUNT = (
    *(f"DROP TRIGGER IF EXISTS recount_{name}"
      for name in ("pack_added", "pack_changed", "pack_removed", "sidecar_added", "sidecar_removed")),
    "DROP TABLE IF EXISTS recount",
)  # fmt: skip
_COUNT_PAGE = """
  UPDATE recount SET packs = packs + seen, pack_bytes = pack_bytes + seen_bytes, damaged = damaged + seen_damaged,
    sidecar_bytes = sidecar_bytes + (
      SELECT coalesce(sum(file_bytes), 0) FROM sidecars WHERE pack_id > recount.upto AND pack_id <= seen_upto),
    upto = seen_upto
  FROM (
    SELECT count(*) AS seen, sum(file_bytes) AS seen_bytes, sum(damage IS NOT NULL) AS seen_damaged,
      max(pack_id) AS seen_upto
    FROM (SELECT pack_id, file_bytes, damage FROM packs
          WHERE pack_id > (SELECT upto FROM recount) ORDER BY pack_id LIMIT ?))
  WHERE seen > 0"""


class Census:
    """Thread-safe. What comes or goes during one may or may not be in it, except where it says otherwise."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._recounting = Lock()

    def pack_keys(self, pause_s: float = PAUSE_S) -> NDArray[np.uint64]:
        """The keys of the packs' file names (see `files.keys_of`), sorted. `pause_s` 0: nobody else is there yet."""
        return files.in_order(files.folded(bytes.fromhex(halves)) for halves in self._pack_halves(pause_s))

    def _pack_halves(self, pause_s: float) -> Iterator[str]:
        query = f"""SELECT group_concat({_HALVES}, ''), max(pack_id)
                    FROM (SELECT pack_id, build FROM packs WHERE pack_id > ? ORDER BY pack_id LIMIT ?)"""
        after: bytes | None = b""
        while after is not None:
            halves, after = self._database.row(query, (after, PAGE_ROWS))
            if halves:
                yield halves
                time.sleep(pause_s)

    def sidecar_keys(self) -> NDArray[np.uint64]:
        """Those of the sidecars' file names."""
        return files.in_order(files.keys_of([file.encode() for file in page]) for page in self._sidecar_files())

    def _sidecar_files(self) -> Iterator[list[str]]:
        query = "SELECT file FROM sidecars WHERE file > ? ORDER BY file LIMIT ?"
        after = ""
        while page := self._database.rows(query, (after, PAGE_ROWS)):
            after = page[-1][0]
            yield [file for (file,) in page]

    def packs_of(self, keys: NDArray[np.uint64]) -> Iterator[list[bytes]]:
        """The ids of the packs whose files have one of the keys, which are sorted."""
        for page in self._packs("pack_id, build"):
            found = files.among(files.folded(b"".join(name[:8] + build[:8] for name, build in page)), keys)
            yield [name for (name, _), wanted in zip(page, found, strict=True) if wanted]

    def sidecars_of(self, keys: NDArray[np.uint64]) -> Iterator[list[str]]:
        """The files, of sidecars, that have one of the keys."""
        for page in self._sidecar_files():
            found = files.among(files.keys_of([file.encode() for file in page]), keys)
            yield [file for file, wanted in zip(page, found, strict=True) if wanted]

    def pack_files(self) -> Iterator[tuple[str, int]]:
        """(name, bytes) of each pack that is not damaged."""
        for page in self._packs("pack_id, build, file_bytes, damage"):
            yield from ((pack_file(name, build), size) for name, build, size, damage in page if damage is None)

    def _packs(self, columns: str) -> Iterator[Sequence[Any]]:
        query = f"SELECT {columns} FROM packs WHERE pack_id > ? ORDER BY pack_id LIMIT ?"
        after = b""
        while page := self._database.rows(query, (after, PAGE_ROWS)):
            after = page[-1][0]
            yield page

    def recounted(self) -> tuple[Totals, Totals]:
        """(the running totals, the same by a look at all rows), of one moment, whatever is written meanwhile."""
        with self._recounting, self._carrying():
            while True:
                with self._database.lock:
                    db = self._database.connection
                    if not db.execute(_COUNT_PAGE, (PAGE_ROWS,)).rowcount:
                        found = db.execute("SELECT packs, pack_bytes, sidecar_bytes, damaged FROM recount").fetchone()
                        return totals_of(db, schema.EVERYONE), Totals(*found)
                time.sleep(PAUSE_S)

    @contextmanager
    def _carrying(self) -> Iterator[None]:
        """While it is held, a change of what was counted changes the count."""
        try:
            self._run(_BEGIN_RECOUNT)
            yield
        finally:
            self._run(_END_RECOUNT)

    def _run(self, statements: Iterable[str]) -> None:
        with self._database.lock:
            for statement in statements:
                self._database.connection.execute(statement)
