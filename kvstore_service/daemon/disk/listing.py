"""Listings of packs, a page at a time: none holds the catalogue's lock for long, however many rows it passes over."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from kvstore_service.daemon.disk.database import Database
from kvstore_service.daemon.disk.rows import LISTED_COLUMNS, PACK_COLUMNS, ListedPack, PackFilter, pack_row
from kvstore_service.daemon.disk.uses import Uses
from kvstore_service.shared.types import PackRow, StoreError

_LOOK_ROWS = 1000  # that are read at once
_PAGE_LOOKS = 4  # for one page, whatever passes its filter


class Listing:
    """Over the catalogue's rows, in the order of pack ids. Thread-safe."""

    def __init__(self, database: Database, uses: Uses) -> None:
        self._database = database
        self._uses = uses

    def every_pack(self) -> Iterator[PackRow]:
        """What comes or goes meanwhile may or may not be there."""
        after = b""
        while rows := self.packs(after, _LOOK_ROWS):
            yield from rows
            after = rows[-1].ref.pack_id

    def packs(self, after: bytes = b"", limit: int = -1) -> list[PackRow]:
        """From the first one above `after`."""
        query = f"SELECT {PACK_COLUMNS} FROM packs WHERE pack_id > ? ORDER BY pack_id LIMIT ?"
        return [pack_row(row) for row in self._database.rows(query, (after, limit))]

    def page(self, wanted: PackFilter, after: bytes = b"", limit: int = 1000) -> tuple[list[ListedPack], bytes | None]:
        """Up to `limit` packs that pass the filter, and where the next page begins; None after the last. A page may
        have fewer, even none, before the last: each looks at a bounded number of rows."""
        conditions = ["pack_id > ?"]
        if wanted.damaged:
            conditions.append("damage IS NOT NULL")
        if wanted.pinned:
            conditions.append("pinned_until_s IS NOT NULL")
        query = f"SELECT {LISTED_COLUMNS} FROM packs WHERE {' AND '.join(conditions)} ORDER BY pack_id LIMIT ?"
        found: list[ListedPack] = []
        for _ in range(_PAGE_LOOKS):
            look_at = min(limit, _LOOK_ROWS)
            rows = self._database.rows(query, (after, look_at))
            for listed in self._listed(rows):
                if wanted.passes(listed):
                    found.append(listed)
                    if len(found) == limit:
                        return found, listed.row.ref.pack_id
            if len(rows) < look_at:
                return found, None
            after = rows[-1][0]
        return found, after

    def listed(self, pack_id: bytes) -> ListedPack:
        """One pack as a listing shows it. NOT_FOUND."""
        rows = self._database.rows(f"SELECT {LISTED_COLUMNS} FROM packs WHERE pack_id = ?", (pack_id,))
        if not rows:
            raise StoreError("NOT_FOUND", f"pack {pack_id.hex()} is not stored", reason="PACK_NOT_STORED")
        return self._listed(rows)[0]

    def _listed(self, rows: Sequence[Sequence[Any]]) -> list[ListedPack]:
        """From the values of `LISTED_COLUMNS`, in their order."""
        sidecars = self._sidecar_kinds(rows[0][0], rows[-1][0]) if rows else {}
        return [self._listed_pack(row, sidecars.get(row[0], ())) for row in rows]

    def _listed_pack(self, values: Sequence[Any], sidecars: Sequence[str]) -> ListedPack:
        *columns, pinned_until_s, damage, last_used_s, importance = values
        row = pack_row(columns)
        used_s = max(last_used_s, self._uses.unwritten_s(row.ref.pack_id))
        pinned = (pinned_until_s or 0.0) > time.time()
        return ListedPack(row, tuple(sidecars), pinned, damage is not None, used_s, importance)

    def _sidecar_kinds(self, first: bytes, last: bytes) -> dict[bytes, list[str]]:
        """Of all packs from `first` to `last`."""
        query = """SELECT DISTINCT pack_id, kind FROM sidecars WHERE pack_id BETWEEN ? AND ? ORDER BY pack_id, kind"""
        kinds: defaultdict[bytes, list[str]] = defaultdict(list)
        for name, kind in self._database.rows(query, (first, last)):
            kinds[name].append(kind)
        return kinds
