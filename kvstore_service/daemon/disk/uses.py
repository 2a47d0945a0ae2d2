"""How packs are used, weighed and pinned: what is kept, and what goes first."""

import math
import sqlite3
import time
from collections.abc import Iterable, Mapping
from threading import Lock

from kvstore_service.daemon.disk.database import Database, exists
from kvstore_service.daemon.disk.rows import PACK_COLUMNS, Victim, pack_row
from kvstore_service.shared.types import StoreError

FOREVER_S = math.inf
_TOUCHES_MAX = 1 << 15  # uses that are remembered before they are written
BATCH_ROWS = 128  # that are written at once: each is a page of its own in a large catalogue
_PAUSE_S = 0.001  # between two batches: whoever waits for the connection's lock gets it


class Uses:
    """Over the catalogue's rows. Thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._touched: dict[bytes, float] = {}
        self._writing = Lock()  # what is taken out to be written is in its row before anybody else writes

    def unwritten_s(self, pack_id: bytes) -> float:
        """The last use that is not in the row yet, seconds since the epoch; 0 for none."""
        return self._touched.get(pack_id, 0.0)

    def touch(self, pack_ids: Iterable[bytes], now_s: float) -> None:
        """The packs are used now (seconds since the epoch). Remembered until `write`, which a crash may forestall; only
        beyond a bound does this call write."""
        self._touched.update(dict.fromkeys(pack_ids, now_s))
        while len(self._touched) > _TOUCHES_MAX:
            self._write_batch()

    def write(self) -> None:
        """All that is remembered, a batch at a time. sqlite3.Error: one batch is lost."""
        while self._write_batch():
            time.sleep(_PAUSE_S)

    def _write_batch(self) -> int:
        """How many rows were written."""
        query = "UPDATE packs SET last_used_s = max(last_used_s, ?) WHERE pack_id = ?"
        with self._writing:
            batch = [self._touched.popitem() for _ in range(min(BATCH_ROWS, len(self._touched)))]
            if batch:
                with self._database.transaction() as db:
                    db.executemany(query, [(used_s, name) for name, used_s in batch])
        return len(batch)

    def set_importance(self, importance: Mapping[bytes, float]) -> None:
        """From 0 to 1 per pack id; ids that are not stored do not matter."""
        values = [(value, name) for name, value in importance.items()]
        for first in range(0, len(values), BATCH_ROWS):
            with self._database.transaction() as db:
                query = "UPDATE packs SET importance = ? WHERE pack_id = ?"
                db.executemany(query, values[first : first + BATCH_ROWS])

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
        self.write()
        with self._database.transaction() as db:
            db.execute("UPDATE packs SET pinned_until_s = NULL WHERE pinned_until_s <= ?", (time.time(),))
            return [Victim(pack_row(row), keep_s) for keep_s, *row in db.execute(query, values).fetchall()]

    def pin(self, pack_ids: Iterable[bytes], pinned: bool, until_s: float = FOREVER_S) -> None:
        """All or none, until a time in seconds since the epoch; durable on return.
        NOT_FOUND if a pack to be pinned is not stored."""
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
