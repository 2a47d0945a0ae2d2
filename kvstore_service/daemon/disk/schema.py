"""The catalogue's tables.

Triggers keep what would else be a scan: `totals`, and how many packs continue each pack.
"""

import secrets
import sqlite3
from pathlib import Path

from kvstore_service._native import PACK_VERSION
from kvstore_service.shared.types import StoreError

CATALOG_VERSION = 3
CATALOG_ID_BYTES = 16
EVERYONE = ""  # the row of `totals` that sums all tenants
IMPORTANCE_S = 86400  # a pack of importance 1 is kept like one that was used a day later

_TABLES = (
    "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS tenants (name TEXT PRIMARY KEY, key BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS quotas (tenant TEXT PRIMARY KEY, nvme_bytes INTEGER, dram_bytes INTEGER)",
    """CREATE TABLE IF NOT EXISTS totals (
      tenant TEXT PRIMARY KEY, packs INTEGER NOT NULL DEFAULT 0, pack_bytes INTEGER NOT NULL DEFAULT 0,
      sidecar_bytes INTEGER NOT NULL DEFAULT 0, damaged INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID""",
    f"""CREATE TABLE IF NOT EXISTS packs (
      pack_id BLOB PRIMARY KEY, build BLOB NOT NULL, parent BLOB NOT NULL, fingerprint BLOB NOT NULL,
      tenant TEXT NOT NULL, first_token INTEGER NOT NULL, tokens INTEGER NOT NULL, layers INTEGER NOT NULL,
      kinds TEXT NOT NULL, file_bytes INTEGER NOT NULL, created_s REAL NOT NULL, last_used_s REAL NOT NULL,
      importance REAL NOT NULL DEFAULT 0,
      record_order INTEGER NOT NULL, children INTEGER NOT NULL DEFAULT 0, pinned_until_s REAL, damage TEXT,
      keep_s REAL AS (last_used_s + {IMPORTANCE_S} * importance)) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS sidecars (
      pack_id BLOB NOT NULL REFERENCES packs(pack_id), build BLOB NOT NULL, kind TEXT NOT NULL,
      parameters BLOB NOT NULL, file TEXT NOT NULL UNIQUE, file_bytes INTEGER NOT NULL,
      PRIMARY KEY (pack_id, build, kind, parameters)) WITHOUT ROWID""",
)
_EVICTABLE = "children = 0 AND pinned_until_s IS NULL"
_INDEXES = (
    "CREATE INDEX IF NOT EXISTS packs_by_parent ON packs(parent)",
    f"CREATE INDEX IF NOT EXISTS packs_by_use ON packs(keep_s) WHERE {_EVICTABLE}",
    f"CREATE INDEX IF NOT EXISTS packs_by_tenant_and_use ON packs(tenant, keep_s) WHERE {_EVICTABLE}",
    "CREATE INDEX IF NOT EXISTS packs_pinned ON packs(pinned_until_s) WHERE pinned_until_s IS NOT NULL",
    "CREATE INDEX IF NOT EXISTS packs_pinned_by_id ON packs(pack_id) WHERE pinned_until_s IS NOT NULL",
    "CREATE INDEX IF NOT EXISTS packs_damaged ON packs(pack_id) WHERE damage IS NOT NULL",
)


def _total(tenant: str, **changes: str) -> str:
    """The statement of a trigger that adds each change to the tenant's total and to everyone's."""
    changed = ", ".join(f"{column} = {column} + ({change})" for column, change in changes.items())
    return f"UPDATE totals SET {changed} WHERE tenant IN ('{EVERYONE}', {tenant});"


def _tenant_of(row: str) -> str:
    return f"(SELECT tenant FROM packs WHERE pack_id = {row}.pack_id)"


_TRIGGERS = (
    f"""CREATE TRIGGER IF NOT EXISTS pack_added AFTER INSERT ON packs BEGIN
      INSERT OR IGNORE INTO totals (tenant) VALUES ('{EVERYONE}'), (new.tenant);
      {_total("new.tenant", packs="1", pack_bytes="new.file_bytes", damaged="new.damage IS NOT NULL")}
      UPDATE packs SET children = children + 1 WHERE pack_id = new.parent;
    END""",
    f"""CREATE TRIGGER IF NOT EXISTS pack_changed AFTER UPDATE OF file_bytes, damage ON packs BEGIN
      {_total("new.tenant", pack_bytes="new.file_bytes - old.file_bytes",
              damaged="(new.damage IS NOT NULL) - (old.damage IS NOT NULL)")}
    END""",
    f"""CREATE TRIGGER IF NOT EXISTS pack_removed AFTER DELETE ON packs BEGIN
      {_total("old.tenant", packs="-1", pack_bytes="-old.file_bytes", damaged="-(old.damage IS NOT NULL)")}
      UPDATE packs SET children = children - 1 WHERE pack_id = old.parent;
    END""",
    f"""CREATE TRIGGER IF NOT EXISTS sidecar_added AFTER INSERT ON sidecars BEGIN
      {_total(_tenant_of("new"), sidecar_bytes="new.file_bytes")}
    END""",
    f"""CREATE TRIGGER IF NOT EXISTS sidecar_removed AFTER DELETE ON sidecars BEGIN
      {_total(_tenant_of("old"), sidecar_bytes="-old.file_bytes")}
    END""",
)  # fmt: skip


def bring_up(db: sqlite3.Connection, data_dir: Path) -> str:
    """Creates the tables, whole or not at all, in a fresh catalogue.

    Returns the catalogue's id. FAILED_PRECONDITION if another version wrote it, or the packs that it knows."""
    known = (CATALOG_VERSION, PACK_VERSION)
    held = _versions(db)
    if held not in (None, known):
        writer = "a newer" if any(theirs > ours for theirs, ours in zip(held, known, strict=True)) else "an older"
        raise StoreError(
            "FAILED_PRECONDITION",
            f"{data_dir} was written by {writer} kvstored (catalogue version {held[0]}, packs of version {held[1]}; "
            f"this one knows {known[0]} and {known[1]}); use that version or another data_dir",
        )
    db.execute("BEGIN IMMEDIATE")
    try:
        for statement in (*_TABLES, *_TRIGGERS, *_INDEXES):
            db.execute(statement)
        db.execute("INSERT OR IGNORE INTO totals (tenant) VALUES (?)", (EVERYONE,))
        versions = [("version", str(CATALOG_VERSION)), ("pack_version", str(PACK_VERSION))]
        fresh = [*versions, ("id", secrets.token_hex(CATALOG_ID_BYTES)), ("commits", "0")]
        db.executemany("INSERT OR IGNORE INTO meta VALUES (?, ?)", fresh)
        (catalog_id,) = db.execute("SELECT value FROM meta WHERE key = 'id'").fetchone()
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
    return str(catalog_id)


def _versions(db: sqlite3.Connection) -> tuple[int, int] | None:
    """Of the catalogue and of packs; None for a catalogue without tables.
    One that does not say has packs of version 1."""
    if not db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'meta'").fetchone()[0]:
        return None
    held = dict(db.execute("SELECT key, value FROM meta WHERE key IN ('version', 'pack_version')"))
    return int(held.get("version", 0)), int(held.get("pack_version", 1))
