"""How packs are used, weighed and pinned: what is kept, and what goes first."""

import math
import sqlite3
import time
from collections.abc import Iterable, Mapping

from kvstore_service.daemon.disk.database import Database, exists
from kvstore_service.daemon.disk.rows import PACK_COLUMNS, Victim, pack_row
from kvstore_service.shared.types import StoreError

FOREVER_S = math.inf
_TOUCHES_MAX = 1024  # uses that are remembered before they are written


class Uses:
    """Over the catalogue's rows. Thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._touched: dict[bytes, float] = {}

    def unwritten_s(self, pack_id: bytes) -> float:
        """The last use that is not in the row yet, seconds since the epoch; 0 for none."""
        return self._touched.get(pack_id, 0.0)

    def touch(self, pack_ids: Iterable[bytes], now_s: float) -> None:
        """The packs are used now (seconds since the epoch). Written in batches: a crash forgets the latest uses."""
        with self._database.lock:
            self._touched.update(dict.fromkeys(pack_ids, now_s))
            if len(self._touched) < _TOUCHES_MAX:
                return
        with self._database.transaction() as db:
            self.write(db)

    def write(self, db: sqlite3.Connection) -> None:
        """What was remembered, in the caller's transaction."""
        touched = [(now_s, name) for name, now_s in self._touched.items()]
        db.executemany("UPDATE packs SET last_used_s = max(last_used_s, ?) WHERE pack_id = ?", touched)
        self._touched.clear()

    def set_importance(self, importance: Mapping[bytes, float]) -> None:
        """From 0 to 1 per pack id; ids that are not stored do not matter."""
        with self._database.transaction() as db:
            values = [(value, name) for name, value in importance.items()]
            db.executemany("UPDATE packs SET importance = ? WHERE pack_id = ?", values)

    def victims(self, limit: int, tenant: str | None = None, after: Victim | None = None) -> list[Victim]:
        """The packs to go first, of one tenant or of all, after the one before: continued by none, not pinned; in the
        order of their last use, where importance counts as later use."""
        conditions = ["children = 0", "pinned_until_s IS NULL"]
        if tenant is not None:
            conditions.append("tenant = :tenant")
        if after is not None:
            conditions.append("(keep_s, pack_id) > (:keep_s, :pack_id)")
        query = f"""SELECT keep_s, {PACK_COLUMNS} FROM packs WHERE {" AND ".join(conditions)}
                    ORDER BY keep_s, pack_id LIMIT :limit"""
        values = {"tenant": tenant, "limit": limit, "keep_s": after and after.keep_s,
                  "pack_id": after and after.row.ref.pack_id}  # fmt: skip
        with self._database.transaction() as db:
            self.write(db)
            db.execute("UPDATE packs SET pinned_until_s = NULL WHERE pinned_until_s <= ?", (time.time(),))
            return [Victim(pack_row(row), keep_s) for keep_s, *row in db.execute(query, values).fetchall()]

    def pin(self, pack_ids: Iterable[bytes], pinned: bool, until_s: float = FOREVER_S) -> None:
        """All or none, until a time in seconds since the epoch; durable on return. NOT_FOUND if a pack to be pinned is
        not stored."""
        with self._database.transaction() as db:
            for name in pack_ids:
                if pinned and not exists(db, name):
                    raise StoreError("NOT_FOUND", f"pack {name.hex()} is not stored", reason="PACK_NOT_STORED")
                until = until_s if pinned else None
                db.execute("UPDATE packs SET pinned_until_s = ? WHERE pack_id = ?", (until, name))

    def is_pinned(self, pack_id: bytes) -> bool:
        with self._database.lock:
            return pinned(self._database.connection, pack_id)


def pinned(db: sqlite3.Connection, pack_id: bytes) -> bool:
    query = "SELECT count(*) FROM packs WHERE pack_id = ? AND pinned_until_s > ?"
    return bool(db.execute(query, (pack_id, time.time())).fetchone()[0])
