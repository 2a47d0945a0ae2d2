"""The catalogue's SQLite file: one connection under one lock, in a directory that one daemon holds."""

import contextlib
import fcntl
import logging
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvstore_service.daemon.disk import schema
from kvstore_service.daemon.disk.rows import Totals
from kvstore_service.daemon.logs import event
from kvstore_service.shared.types import StoreError

_OPEN_BYTES = 128 << 10  # what SQLite writes beside a catalogue to open it
_CACHE_BYTES = 16 << 20  # of SQLite pages, however many packs there are

log = logging.getLogger("kvstored.catalog")


class Database:
    """Thread-safe. `connection` is for those who hold `lock`; a transaction holds it."""

    def __init__(self, data_dir: Path) -> None:
        """FAILED_PRECONDITION if a newer version wrote the file, sqlite3.DatabaseError if it cannot be read."""
        self.lock = threading.Lock()
        # A block that is being written when the power goes may lose what it held before: commits share none in the log.
        name = f"{(data_dir / 'catalog.sqlite').absolute().as_uri()}?psow=0"
        db = sqlite3.connect(name, uri=True, isolation_level=None, check_same_thread=False)
        self.connection = db
        try:
            # One process at a time: without shared memory beside it, a full disk cannot kill the process (SIGBUS).
            db.execute("PRAGMA locking_mode=EXCLUSIVE")
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")
            db.execute("PRAGMA foreign_keys=ON")
            db.execute("PRAGMA temp_store=MEMORY")  # else what a trigger may undo goes to a file, for every row
            db.execute(f"PRAGMA cache_size=-{_CACHE_BYTES >> 10}")
            _cut_log(db)
            self.id = schema.bring_up(db, data_dir)
        except BaseException:
            db.close()
            raise

    def close(self) -> None:
        with self.lock:
            self.connection.close()

    def row(self, query: str, values: Sequence[Any] = ()) -> Any:
        """The first row, or None."""
        with self.lock:
            return self.connection.execute(query, values).fetchone()

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        with self.lock:
            return self.connection.execute(query, values).fetchall()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        with self.lock:
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                yield self.connection
                self.connection.execute("COMMIT")
            except BaseException:
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")
                raise

    def commits(self) -> int:
        """How many commits the catalogue has seen."""
        return int(self.row("SELECT value FROM meta WHERE key = 'commits'")[0])


def _cut_log(db: sqlite3.Connection) -> None:
    """Moves what the log holds into the catalogue and begins it anew: behind its last commit a power cut may leave a
    block that cannot be written in part, and the next commit would share its last block. A full disk leaves it."""
    try:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.OperationalError as error:
        event(log, logging.WARNING, "log of the catalogue not cut", error=error)


def hold(data_dir: Path) -> int:
    """A descriptor whose lock is the directory. FAILED_PRECONDITION if another process has it."""
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


def unopened(data_dir: Path, error: sqlite3.DatabaseError) -> StoreError:
    """Why the catalogue could not be opened: only what SQLite calls corrupt is lost."""
    message = f"{data_dir}/catalog.sqlite cannot be read: {error}"
    if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return StoreError("DATA_LOSS", f"{message}; move it away, then kvstored rebuild gives the packs new rows")
    disk = os.statvfs(data_dir)
    if disk.f_bavail * disk.f_frsize < _OPEN_BYTES:
        return StoreError("RESOURCE_EXHAUSTED", f"{message}; the disk is full, make {_OPEN_BYTES >> 10} KiB of room")
    return StoreError("UNAVAILABLE", f"{message}; no other program may have it open")


def frozen(db: sqlite3.Connection, name: str, value: int) -> int:
    db.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (f"frozen {name}", str(value)))
    return int(db.execute("SELECT value FROM meta WHERE key = ?", (f"frozen {name}",)).fetchone()[0])


def count_commit(db: sqlite3.Connection) -> int:
    """How many commits the catalogue has seen with this one."""
    counted = db.execute("UPDATE meta SET value = value + 1 WHERE key = 'commits' RETURNING value").fetchall()
    return int(counted[0][0])


def exists(db: sqlite3.Connection, pack_id: bytes) -> bool:
    return db.execute("SELECT 1 FROM packs WHERE pack_id = ?", (pack_id,)).fetchone() is not None


def totals_of(db: sqlite3.Connection, tenant: str) -> Totals:
    query = "SELECT packs, pack_bytes, sidecar_bytes, damaged FROM totals WHERE tenant = ?"
    row = db.execute(query, (tenant,)).fetchone()
    return Totals(*row) if row is not None else Totals()
