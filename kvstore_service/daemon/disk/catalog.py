"""What is durable: tenants, packs and sidecars in SQLite, and the files that the rows stand for.

Data first: a file is durable, then its directory, then its row. So a file without a row was never acknowledged and is
removed at the next start; a row without a file is damage, is reported, and is never served.
"""

import contextlib
import fcntl
import json
import logging
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore_service.daemon import directories
from kvstore_service.daemon.logs import event
from kvstore_service.shared.types import NO_PARENT, KindSpec, Layout, PackRef, PackRow, SidecarKey, StoreError

CATALOG_VERSION = 1
TENANT_KEY_BYTES = 32
_OPEN_BYTES = 128 << 10  # what SQLite writes beside a catalogue to open it

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS tenants (name TEXT PRIMARY KEY, key BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS packs (
  pack_id BLOB PRIMARY KEY, build BLOB NOT NULL, parent BLOB NOT NULL, fingerprint BLOB NOT NULL, tenant TEXT NOT NULL,
  first_token INTEGER NOT NULL, tokens INTEGER NOT NULL, layers INTEGER NOT NULL, kinds TEXT NOT NULL,
  file TEXT NOT NULL UNIQUE, file_bytes INTEGER NOT NULL, created_s REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sidecars (
  pack_id BLOB NOT NULL REFERENCES packs(pack_id), build BLOB NOT NULL, kind TEXT NOT NULL, parameters BLOB NOT NULL,
  file TEXT NOT NULL UNIQUE, file_bytes INTEGER NOT NULL,
  PRIMARY KEY (pack_id, build, kind, parameters)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS packs_by_parent ON packs(parent);
CREATE TABLE IF NOT EXISTS pins (pack_id BLOB PRIMARY KEY) WITHOUT ROWID;
"""
_PACK_COLUMNS = (
    "pack_id, build, parent, fingerprint, tenant, first_token, tokens, layers, kinds, file, file_bytes, created_s"
)

log = logging.getLogger("kvstored.catalog")


@dataclass(frozen=True)
class SidecarRow:
    key: SidecarKey
    file: str
    file_bytes: int


class Catalog:
    """One connection under one lock. Holds `data_dir` exclusively until closed.

    `damaged` holds packs whose file is gone, cut short or failed a check; they keep their rows until the same id is
    committed anew, and are not served. `removed` names the leftovers that the start found."""

    def __init__(self, data_dir: Path) -> None:
        """FAILED_PRECONDITION if another daemon holds `data_dir` or a newer version wrote it."""
        self.packs_dir = data_dir / "packs"
        self.sidecars_dir = data_dir / "sidecars"
        for directory in (data_dir, self.packs_dir, self.sidecars_dir):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            directories.require_own(directory)
        for name in ("lock", "catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm"):
            directories.require_no_link(data_dir / name)
        self._lock = threading.Lock()
        with contextlib.ExitStack() as undo:
            self._directory_lock = _hold(data_dir)
            undo.callback(os.close, self._directory_lock)
            try:
                self._db = sqlite3.connect(data_dir / "catalog.sqlite", isolation_level=None, check_same_thread=False)
                undo.callback(self._db.close)
                # One process at a time: without shared memory beside it, a full disk cannot kill the process (SIGBUS).
                self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=FULL")
                self._db.execute("PRAGMA foreign_keys=ON")
                self._check_version(data_dir)
                self.damaged, self.removed = self._reconcile()
                for directory in (data_dir, self.packs_dir, self.sidecars_dir):
                    sync_directory(directory)
            except sqlite3.DatabaseError as error:
                raise _unopened(data_dir, error) from error
            undo.pop_all()

    def close(self) -> None:
        with self._lock:
            self._db.close()
            os.close(self._directory_lock)

    def _check_version(self, data_dir: Path) -> None:
        tables = self._db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'meta'").fetchone()[0]
        if tables:
            row = self._db.execute("SELECT value FROM meta WHERE key = 'version'").fetchone()
            if row is not None and int(row[0]) > CATALOG_VERSION:
                raise StoreError(
                    "FAILED_PRECONDITION",
                    f"{data_dir} was written by a newer kvstored (catalogue version {row[0]}, this one knows "
                    f"{CATALOG_VERSION}); use that version or another data_dir",
                )
        self._db.executescript(_SCHEMA)
        self._db.execute("INSERT OR IGNORE INTO meta VALUES ('version', ?)", (str(CATALOG_VERSION),))

    def _reconcile(self) -> tuple[dict[bytes, PackRow], list[str]]:
        packs = {row.file: row for row in self.packs()}
        sidecars = {file for (file,) in self._db.execute("SELECT file FROM sidecars")}
        damaged = [row for row in packs.values() if _size_of(self.packs_dir / row.file) != row.file_bytes]
        removed = []
        for path in self.data_files():
            if path.name not in (packs if path.parent == self.packs_dir else sidecars):
                path.unlink()
                removed.append(path.name)
        return {row.ref.pack_id: row for row in damaged}, removed

    def mark_damaged(self, row: PackRow, reason: str) -> bool:
        """A check of this build failed: the pack is served no more. False if it is not stored any more."""
        with self._lock:
            held = self._db.execute("SELECT build FROM packs WHERE pack_id = ?", (row.ref.pack_id,)).fetchone()
            if held != (row.ref.build,):
                return False
            known = row.ref.pack_id in self.damaged
            self.damaged[row.ref.pack_id] = row
        if not known:
            event(log, logging.ERROR, "pack damaged", pack_id=row.ref.pack_id.hex(), file=row.file, reason=reason)
        return True

    def tenant_key(self, tenant: str) -> bytes:
        """The tenant's 32 random bytes, created with its first use. Pack ids are keyed by it."""
        with self._transaction() as db:
            db.execute("INSERT OR IGNORE INTO tenants VALUES (?, ?)", (tenant, secrets.token_bytes(TENANT_KEY_BYTES)))
            return bytes(db.execute("SELECT key FROM tenants WHERE name = ?", (tenant,)).fetchone()[0])

    def pack(self, pack_id: bytes) -> PackRow | None:
        """What can be served under this id. DATA_LOSS for a damaged pack."""
        if pack_id in self.damaged:
            raise StoreError("DATA_LOSS", f"pack {pack_id.hex()} is damaged; write it again", reason="PACK_DAMAGED")
        return self._select(pack_id)

    def any_pack(self, pack_id: bytes) -> PackRow:
        """The row, of a damaged pack too. NOT_FOUND."""
        row = self._select(pack_id)
        if row is None:
            raise StoreError("NOT_FOUND", f"pack {pack_id.hex()} is not stored", reason="PACK_NOT_STORED")
        return row

    def _select(self, pack_id: bytes) -> PackRow | None:
        with self._lock:
            row = self._db.execute(f"SELECT {_PACK_COLUMNS} FROM packs WHERE pack_id = ?", (pack_id,)).fetchone()
        return None if row is None else _pack_row(row)

    def packs(self, after: bytes = b"", limit: int = -1) -> list[PackRow]:
        """In the order of their ids, from the first one above `after`."""
        query = f"SELECT {_PACK_COLUMNS} FROM packs WHERE pack_id > ? ORDER BY pack_id LIMIT ?"
        with self._lock:
            return [_pack_row(row) for row in self._db.execute(query, (after, limit)).fetchall()]

    def totals(self) -> tuple[int, int, int]:
        """(packs, their bytes, bytes of packs and sidecars together)."""
        with self._lock:
            packs, pack_bytes = self._db.execute("SELECT count(*), coalesce(sum(file_bytes), 0) FROM packs").fetchone()
            (sidecar_bytes,) = self._db.execute("SELECT coalesce(sum(file_bytes), 0) FROM sidecars").fetchone()
        return packs, pack_bytes, pack_bytes + sidecar_bytes

    def commit_packs(self, rows: Sequence[PackRow]) -> list[PackRow | None]:
        """One transaction for rows whose files are durable. The answer has, in order, what the store holds now:
        the row itself, the winner that had its id before, or None if the parent is gone. A damaged row gives way."""
        winners: list[PackRow | None] = []
        with self._transaction() as db:
            for row in rows:
                parents = db.execute("SELECT count(*) FROM packs WHERE pack_id = ?", (row.parent,)).fetchone()[0]
                if not parents and row.parent != NO_PARENT:
                    winners.append(None)
                    continue
                if row.ref.pack_id in self.damaged:
                    db.execute("DELETE FROM sidecars WHERE pack_id = ?", (row.ref.pack_id,))
                    db.execute("DELETE FROM packs WHERE pack_id = ?", (row.ref.pack_id,))
                marks = ", ".join("?" * 12)
                db.execute(f"INSERT OR IGNORE INTO packs ({_PACK_COLUMNS}) VALUES ({marks})", _pack_values(row))
                held = db.execute(f"SELECT {_PACK_COLUMNS} FROM packs WHERE pack_id = ?", (row.ref.pack_id,)).fetchone()
                winners.append(_pack_row(held))
        for row, winner in zip(rows, winners, strict=True):
            if winner is not None and (replaced := self.damaged.pop(row.ref.pack_id, None)) is not None:
                remove_file(self.packs_dir / replaced.file)
        return winners

    def descendants(self, pack_id: bytes) -> list[PackRow]:
        """Every pack that continues this one, directly or not."""
        query = f"""
            WITH RECURSIVE below(id) AS (
              SELECT pack_id FROM packs WHERE parent = ?
              UNION SELECT packs.pack_id FROM packs JOIN below ON packs.parent = below.id)
            SELECT {_PACK_COLUMNS} FROM packs WHERE pack_id IN below"""
        with self._lock:
            return [_pack_row(row) for row in self._db.execute(query, (pack_id,)).fetchall()]

    def remove_pack(self, row: PackRow) -> int:
        """Forgets a pack and its sidecars, then removes their files; what a crash leaves goes with the next start.

        Returns the bytes. NOT_FOUND; FAILED_PRECONDITION if it is pinned or another pack continues it."""
        name, build = row.ref.pack_id, row.ref.build
        with self._transaction() as db:
            if db.execute("SELECT count(*) FROM pins WHERE pack_id = ?", (name,)).fetchone()[0]:
                raise StoreError(
                    "FAILED_PRECONDITION", f"pack {name.hex()} is pinned; unpin it first", reason="PACK_PINNED"
                )
            children = db.execute("SELECT count(*) FROM packs WHERE parent = ?", (name,)).fetchone()[0]
            if children:
                reason = f"pack {name.hex()} is continued by {children} packs; evict its descendants with it"
                raise StoreError("FAILED_PRECONDITION", reason, reason="PACK_CONTINUED")
            found = db.execute("SELECT file, file_bytes FROM sidecars WHERE pack_id = ?", (name,)).fetchall()
            db.execute("DELETE FROM sidecars WHERE pack_id = ?", (name,))
            if not db.execute("DELETE FROM packs WHERE pack_id = ? AND build = ?", (name, build)).rowcount:
                raise StoreError("NOT_FOUND", f"pack {name.hex()} is not stored", reason="PACK_NOT_STORED")
        self.damaged.pop(name, None)
        remove_file(self.packs_dir / row.file)
        for file, _ in found:
            remove_file(self.sidecars_dir / file)
        return row.file_bytes + sum(size for _, size in found)

    def pin(self, pack_ids: Iterable[bytes], pinned: bool) -> None:
        """All or none; durable on return. NOT_FOUND if a pack to be pinned is not stored."""
        with self._transaction() as db:
            for name in pack_ids:
                if not pinned:
                    db.execute("DELETE FROM pins WHERE pack_id = ?", (name,))
                    continue
                if not db.execute("SELECT count(*) FROM packs WHERE pack_id = ?", (name,)).fetchone()[0]:
                    raise StoreError("NOT_FOUND", f"pack {name.hex()} is not stored", reason="PACK_NOT_STORED")
                db.execute("INSERT OR IGNORE INTO pins VALUES (?)", (name,))

    def is_pinned(self, pack_id: bytes) -> bool:
        with self._lock:
            return bool(self._db.execute("SELECT count(*) FROM pins WHERE pack_id = ?", (pack_id,)).fetchone()[0])

    def data_files(self) -> list[Path]:
        """Every file under packs/ and sidecars/."""
        return [path for directory in (self.packs_dir, self.sidecars_dir) for path in directory.iterdir()]

    def files(self) -> dict[Path, int]:
        """Every file that a row stands for, with its size in bytes."""
        with self._lock:
            packs = self._db.execute("SELECT file, file_bytes FROM packs").fetchall()
            found = self._db.execute("SELECT file, file_bytes FROM sidecars").fetchall()
        sizes = {self.packs_dir / file: size for file, size in packs}
        return sizes | {self.sidecars_dir / file: size for file, size in found}

    def sidecar(self, key: SidecarKey) -> SidecarRow | None:
        with self._lock:
            return self._held_sidecar(key)

    def _held_sidecar(self, key: SidecarKey) -> SidecarRow | None:
        query = "SELECT file, file_bytes FROM sidecars WHERE pack_id = ? AND build = ? AND kind = ? AND parameters = ?"
        row = self._db.execute(query, (key.pack_id, key.build, key.kind, key.parameters)).fetchone()
        return None if row is None else SidecarRow(key, *row)

    def sidecar_kinds(self, pack_id: bytes) -> list[str]:
        with self._lock:
            rows = self._db.execute("SELECT DISTINCT kind FROM sidecars WHERE pack_id = ? ORDER BY kind", (pack_id,))
            return [kind for (kind,) in rows.fetchall()]

    def sidecar_count(self, pack_id: bytes) -> int:
        with self._lock:
            (count,) = self._db.execute("SELECT count(*) FROM sidecars WHERE pack_id = ?", (pack_id,)).fetchone()
        return int(count)

    def commit_sidecar(self, row: SidecarRow) -> SidecarRow:
        """The row of a file that is durable, or the one that was there before."""
        key = row.key
        with self._transaction() as db:
            db.execute(
                "INSERT OR IGNORE INTO sidecars VALUES (?, ?, ?, ?, ?, ?)",
                (key.pack_id, key.build, key.kind, key.parameters, row.file, row.file_bytes),
            )
            return self._held_sidecar(key) or row

    def drop_sidecar(self, key: SidecarKey) -> None:
        """Forgets a damaged sidecar; its file goes with the next start."""
        where = "pack_id = ? AND build = ? AND kind = ? AND parameters = ?"
        with self._transaction() as db:
            db.execute(f"DELETE FROM sidecars WHERE {where}", (key.pack_id, key.build, key.kind, key.parameters))

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise


def remove_file(path: Path) -> None:
    """Removes a file that no row names. If that fails the next start does it: what was done before stands."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        event(log, logging.ERROR, "file not removed", file=path, error=error)


def sync_directory(directory: Path) -> None:
    """Makes names in `directory` durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _hold(data_dir: Path) -> int:
    fd = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise StoreError(
            "FAILED_PRECONDITION", f"data directory {data_dir} in use by pid {holder}; stop it or use another data_dir"
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _unopened(data_dir: Path, error: sqlite3.DatabaseError) -> StoreError:
    """Why the catalogue could not be opened: only what SQLite calls corrupt is lost."""
    message = f"{data_dir}/catalog.sqlite cannot be read: {error}"
    if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return StoreError("DATA_LOSS", message)
    disk = os.statvfs(data_dir)
    if disk.f_bavail * disk.f_frsize < _OPEN_BYTES:
        return StoreError("RESOURCE_EXHAUSTED", f"{message}; the disk is full, make {_OPEN_BYTES >> 10} KiB of room")
    return StoreError("UNAVAILABLE", f"{message}; no other program may have it open")


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def _pack_values(row: PackRow) -> tuple[bytes | str | int | float, ...]:
    kinds = json.dumps([[kind.lanes, kind.d, kind.dtype, kind.record_bytes] for kind in row.layout.kinds])
    return (
        row.ref.pack_id, row.ref.build, row.parent, row.layout.fingerprint, row.tenant, row.ref.first_token,
        row.ref.tokens, row.layout.layers, kinds, row.file, row.file_bytes, row.created_s,
    )  # fmt: skip


def _pack_row(values: Iterable[object]) -> PackRow:
    columns: Iterator[object] = iter(values)
    (pack_id, build, parent, fingerprint, tenant, first, tokens, layers, kinds, file, file_bytes, created_s) = columns
    layout = Layout(fingerprint, layers, tuple(KindSpec(*kind) for kind in json.loads(kinds)))  # type: ignore[arg-type]
    ref = PackRef(pack_id, build, first, tokens)  # type: ignore[arg-type]
    return PackRow(ref, parent, layout, tenant, file, file_bytes, created_s)  # type: ignore[arg-type]
