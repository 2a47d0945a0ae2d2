"""What is durable: tenants, packs and sidecars in SQLite, and the files that the rows stand for.

Data first: a file is durable, then its directory, then its row. So a file without a row was never acknowledged and is
removed at the next start (see `files`); a row without a file is damage, is reported, and is never served.
"""

import contextlib
import logging
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore_service.daemon import directories
from kvstore_service.daemon.disk import files, schema, tenants
from kvstore_service.daemon.disk.ballast import Ballast
from kvstore_service.daemon.disk.census import Census
from kvstore_service.daemon.disk.database import Database, count_commit, exists, frozen, hold, totals_of, unopened
from kvstore_service.daemon.disk.files import Stamp, remove_file, sync_directory
from kvstore_service.daemon.disk.listing import Listing
from kvstore_service.daemon.disk.rows import (
    PACK_COLUMNS,
    SIDECAR_COLUMNS,
    Quota,
    SidecarRow,
    Totals,
    pack_row,
    pack_values,
)
from kvstore_service.daemon.disk.uses import Uses, pinned
from kvstore_service.daemon.logs import event
from kvstore_service.shared.types import NO_PARENT, PackRow, SidecarKey, StoreError

TENANT_KEY_BYTES = 32
_OWN_FILES = (
    "lock", "packs.stamp", "tenants", "tenants.new", "ballast", "catalog.sqlite", "catalog.sqlite-wal",
    "catalog.sqlite-shm", "catalog.sqlite-journal",
)  # fmt: skip
_SCAN_ROWS = 1000  # that one look takes, so that none holds the lock for long

log = logging.getLogger("kvstored.catalog")


class Catalog:
    """One connection under one lock. Holds `data_dir` exclusively until closed.

    A pack is damaged if its file is gone, cut short or failed a check; it keeps its row until the same id is committed
    anew, and is not served. `removed` and `quarantined` count the leftovers that the start found. `on_gone` is told
    each row that ended (evicted, or replaced by a new build), `on_damaged` each newly marked one; outside the lock."""

    def __init__(self, data_dir: Path) -> None:
        """FAILED_PRECONDITION if another daemon holds `data_dir` or a newer version wrote it."""
        self.packs_dir = data_dir / "packs"
        self.sidecars_dir = data_dir / "sidecars"
        for directory in (data_dir, self.packs_dir, self.sidecars_dir):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            directories.require_own(directory)
        self.quarantine_dir = data_dir / "quarantine"
        self._tenants_path = data_dir / "tenants"
        self.replaced = 0  # packs of which another build was put in their place since the start
        for name in _OWN_FILES:
            directories.require_plain(data_dir / name)
        self.on_gone: Callable[[PackRow], None] = lambda row: None
        self.on_damaged: Callable[[PackRow, str], None] = lambda row, reason: None
        with contextlib.ExitStack() as undo:
            self._directory_lock = hold(data_dir)
            undo.callback(os.close, self._directory_lock)
            self.ballast = Ballast(data_dir)
            try:
                self._database = Database(data_dir)
                undo.callback(self._database.close)
                self.uses = Uses(self._database)
                self.census = Census(self._database)
                self.listing = Listing(self._database, self.uses)
                self._recall_tenants()
                self._stamp = Stamp(data_dir / "packs.stamp")
                undo.callback(self._stamp.close)
                self.removed, self.quarantined, self.sidecars_dropped = self._sweep()
                for directory in (data_dir, self.quarantine_dir, self.packs_dir, self.sidecars_dir):
                    if directory.is_dir():
                        sync_directory(directory)
                # Only now: were a move to quarantine undone, a start that trusts this stamp would remove the file.
                self._stamp.write(self._database.id, self._database.commits())
            except sqlite3.DatabaseError as error:
                raise unopened(data_dir, error) from error
            undo.pop_all()

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):  # how packs were used may be lost
            self.uses.write()
        self._database.close()
        self._stamp.close()
        os.close(self._directory_lock)

    def freeze(self, settings: Mapping[str, int]) -> None:
        """Settings that give the stored bytes their meaning: the first start's stay. FAILED_PRECONDITION for others."""
        with self._database.transaction() as db:
            for name, value in settings.items():
                held = frozen(db, name, value)
                if held != value:
                    raise StoreError(
                        "FAILED_PRECONDITION",
                        f"{name}={value}: what is stored in {self.packs_dir.parent} has {name}={held}; "
                        f"set it to {held} or use another data_dir",
                    )

    def frozen(self, name: str, value: int) -> int:
        """What the first start has frozen, or now freezes."""
        with self._database.transaction() as db:
            return frozen(db, name, value)

    def _sweep(self) -> tuple[int, int, int]:
        """What the start found: (files removed, files quarantined, sidecars whose file is gone)."""
        trusted = self._stamp.vouches_for(self._database.id, self._database.commits())
        quarantine = None if trusted else self.quarantine_dir
        with ThreadPoolExecutor(1) as thread:  # rows and names take about as long, and cores are idle at a start
            known = thread.submit(self.census.pack_keys, pause_s=0)
            found = files.keys_in(self.packs_dir, files.PACK_NAME)
        packs = files.sweep(self.packs_dir, files.PACK_NAME, found, known.result(), quarantine)
        found = files.keys_in(self.sidecars_dir, files.SIDECAR_NAME)
        sidecars = files.sweep(self.sidecars_dir, files.SIDECAR_NAME, found, self.census.sidecar_keys(), quarantine)
        files.report((packs, sidecars), self.quarantine_dir)
        self._mark_lost(packs.lost)
        sidecars_lost = self._forget_lost(sidecars.lost)
        return packs.removed + sidecars.removed, packs.quarantined + sidecars.quarantined, sidecars_lost

    def _mark_lost(self, lost: NDArray[np.uint64]) -> None:
        for names in self.census.packs_of(lost) if len(lost) else ():
            with self._database.transaction() as db:
                query = "UPDATE packs SET damage = 'its file is gone' WHERE pack_id = ? AND damage IS NULL"
                db.executemany(query, [(name,) for name in names])

    def _forget_lost(self, lost: NDArray[np.uint64]) -> int:
        for gone in self.census.sidecars_of(lost) if len(lost) else ():
            with self._database.transaction() as db:
                db.executemany("DELETE FROM sidecars WHERE file = ?", [(file,) for file in gone])
        return len(lost)

    # --- damage ---

    def mark_damaged(self, row: PackRow, reason: str) -> bool:
        """A check of this build failed: the pack is served no more, durably. False if it is not stored any more."""
        name, build = row.ref.pack_id, row.ref.build
        with self._database.transaction() as db:
            held = db.execute("SELECT build, damage FROM packs WHERE pack_id = ?", (name,)).fetchone()
            if held is None or held[0] != build:
                return False
            if held[1] is None:
                db.execute("UPDATE packs SET damage = ? WHERE pack_id = ?", (reason, name))
        if held[1] is None:
            event(log, logging.ERROR, "pack damaged", pack_id=name.hex(), file=row.file, reason=reason)
            self.on_damaged(row, reason)
        return True

    def damaged(self, limit: int = -1) -> list[tuple[PackRow, str]]:
        """Packs that are not served, in the order of their ids, each with the reason."""
        query = f"SELECT damage, {PACK_COLUMNS} FROM packs WHERE damage IS NOT NULL ORDER BY pack_id LIMIT ?"
        return [(pack_row(row), reason) for reason, *row in self._database.rows(query, (limit,))]

    # --- tenants ---

    def tenant_key(self, tenant: str) -> bytes:
        """The tenant's 32 random bytes, created with its first use, and kept beside the catalogue before they are
        used. Pack ids are keyed by it."""
        with self._database.transaction() as db:
            row = db.execute("SELECT key FROM tenants WHERE name = ?", (tenant,)).fetchone()
            if row is not None:
                return bytes(row[0])
            key = secrets.token_bytes(TENANT_KEY_BYTES)
            db.execute("INSERT INTO tenants VALUES (?, ?)", (tenant, key))
            tenants.store(self._tenants_path, _tenant_keys(db))
            return key

    def tenant_keys(self) -> dict[str, bytes]:
        with self._database.lock:
            return _tenant_keys(self._database.connection)

    def _recall_tenants(self) -> None:
        """Keys that a lost or older catalogue does not have; those that only it has are kept beside it."""
        beside = tenants.load(self._tenants_path)
        with self._database.transaction() as db:
            db.executemany("INSERT OR IGNORE INTO tenants VALUES (?, ?)", beside.items())
            held = _tenant_keys(db)
        if held != beside:
            tenants.store(self._tenants_path, held)

    def set_quota(self, tenant: str, quota: Quota) -> None:
        """Durable on return. A quota without limits is none."""
        with self._database.transaction() as db:
            db.execute("DELETE FROM quotas WHERE tenant = ?", (tenant,))
            if quota != Quota():
                db.execute("INSERT INTO quotas VALUES (?, ?, ?)", (tenant, quota.nvme_bytes, quota.dram_bytes))

    def quotas(self) -> dict[str, Quota]:
        rows = self._database.rows("SELECT tenant, nvme_bytes, dram_bytes FROM quotas ORDER BY tenant")
        return {tenant: Quota(nvme_bytes, dram_bytes) for tenant, nvme_bytes, dram_bytes in rows}

    def totals(self) -> Totals:
        """Over all tenants, exact, in constant time."""
        return self.totals_of(schema.EVERYONE)

    def totals_of(self, tenant: str) -> Totals:
        with self._database.lock:
            return totals_of(self._database.connection, tenant)

    def totals_by_tenant(self) -> dict[str, Totals]:
        query = "SELECT tenant, packs, pack_bytes, sidecar_bytes, damaged FROM totals WHERE tenant <> ? ORDER BY tenant"
        return {row[0]: Totals(*row[1:]) for row in self._database.rows(query, (schema.EVERYONE,))}

    # --- packs ---

    def pack(self, pack_id: bytes) -> PackRow | None:
        """What can be served under this id. DATA_LOSS for a damaged pack."""
        row, damage = self._select(pack_id)
        if damage is not None:
            raise StoreError(
                "DATA_LOSS", f"pack {pack_id.hex()} is damaged ({damage}); write it again", reason="PACK_DAMAGED"
            )
        return row

    def served(self, pack_id: bytes) -> PackRow | None:
        """Like `pack`, but a damaged pack is none."""
        row, damage = self._select(pack_id)
        return row if damage is None else None

    def any_pack(self, pack_id: bytes) -> PackRow:
        """The row, of a damaged pack too. NOT_FOUND."""
        row, _ = self._select(pack_id)
        if row is None:
            raise StoreError("NOT_FOUND", f"pack {pack_id.hex()} is not stored", reason="PACK_NOT_STORED")
        return row

    def _select(self, pack_id: bytes) -> tuple[PackRow | None, str | None]:
        """(row, why it is not served)."""
        query = f"SELECT damage, {PACK_COLUMNS} FROM packs WHERE pack_id = ?"
        row = self._database.row(query, (pack_id,))
        return (None, None) if row is None else (pack_row(row[1:]), row[0])

    def commit_packs(self, rows: Sequence[PackRow]) -> list[PackRow | None]:
        """One transaction for rows whose files are durable. The answer has, in order, what the store holds now:
        the row itself, the winner that had its id before, or None if the parent is gone. A damaged row gives way, and,
        if it was of another build, its file and sidecars with it."""
        gone: list[tuple[PackRow, list[str]]] = []
        with self._database.transaction() as db:
            winners = [self._commit_pack(db, row, gone) for row in rows]
            commits = count_commit(db)
        self._stamp.write(self._database.id, commits)
        for replaced, sidecar_files in gone:
            self.remove_files(self._forgotten(replaced, sidecar_files))
        return winners

    def _commit_pack(
        self, db: sqlite3.Connection, row: PackRow, gone: list[tuple[PackRow, list[str]]]
    ) -> PackRow | None:
        name = row.ref.pack_id
        if row.parent != NO_PARENT and not exists(db, row.parent):
            return None
        held = db.execute(f"SELECT damage, {PACK_COLUMNS} FROM packs WHERE pack_id = ?", (name,)).fetchone()
        if held is None:
            columns = f"{PACK_COLUMNS}, last_used_s, children"
            children = "(SELECT count(*) FROM packs WHERE parent = ?1)"
            marks = ", ".join("?" * len(pack_values(row)))
            db.execute(f"INSERT INTO packs ({columns}) VALUES ({marks}, ?11, {children})", pack_values(row))
            return row
        replaced = pack_row(held[1:])
        if held[0] is None:
            return replaced
        if replaced.ref.build != row.ref.build:
            gone.append((replaced, _drop_sidecars(db, name)[0]))
        _put(db, row)
        return row

    def replace_pack(self, held: PackRow, row: PackRow, sidecars: Sequence[SidecarRow]) -> None:
        """Another build of a pack, whose file and sidecars' files are durable, takes the place of the one `held`, in
        one transaction; whose files go afterwards, its other sidecars with them.

        ABORTED if the pack is not what it was: evicted, damaged or written anew; FAILED_PRECONDITION if it is pinned.
        Then nothing is changed."""
        name = held.ref.pack_id
        with self._database.transaction() as db:
            if pinned(db, name):
                raise StoreError("FAILED_PRECONDITION", f"pack {name.hex()} is pinned", reason="PACK_PINNED")
            query = "SELECT count(*) FROM packs WHERE pack_id = ? AND build = ? AND damage IS NULL"
            if not db.execute(query, (name, held.ref.build)).fetchone()[0]:
                raise StoreError("ABORTED", f"pack {name.hex()} was evicted, damaged or written anew meanwhile")
            sidecar_files, _ = _drop_sidecars(db, name)
            _put(db, row)
            for sidecar in sidecars:
                _insert_sidecar(db, sidecar)
            commits = count_commit(db)
        self.replaced += 1
        self._stamp.write(self._database.id, commits)
        self.remove_files(self._forgotten(held, sidecar_files))

    def descendants(self, pack_id: bytes) -> Iterator[PackRow]:
        """Every pack that continues this one, directly or not, looked up page by page."""
        query = f"SELECT {PACK_COLUMNS} FROM packs WHERE parent = ? AND pack_id > ? ORDER BY pack_id LIMIT ?"
        parents = [pack_id]
        while parents:
            parent, after, full = parents.pop(), b"", True
            while full:
                rows = [pack_row(row) for row in self._database.rows(query, (parent, after, _SCAN_ROWS))]
                yield from rows
                parents.extend(row.ref.pack_id for row in rows)
                full = len(rows) == _SCAN_ROWS
                after = rows[-1].ref.pack_id if full else b""

    def remove_packs(self, rows: Sequence[PackRow]) -> tuple[list[int | StoreError], list[Path]]:
        """Forgets packs and their sidecars in one transaction; packs come before those that they continue.

        Returns the bytes of each, or why it stays (NOT_FOUND; FAILED_PRECONDITION if it is pinned or another pack
        continues it), and the files that no row names any more, for `remove_files`; what a crash leaves of them goes
        with the next start."""
        gone: list[tuple[PackRow, list[str]]] = []
        with self._database.transaction() as db:
            outcomes = [_removed(db, row, gone) for row in rows]
        return outcomes, [path for row, sidecar_files in gone for path in self._forgotten(row, sidecar_files)]

    def remove_files(self, paths: Iterable[Path]) -> None:
        for path in paths:
            remove_file(path)

    def _forgotten(self, row: PackRow, sidecar_files: Iterable[str]) -> list[Path]:
        """Says that the row is no more; returns its files."""
        self.on_gone(row)
        return [self.packs_dir / row.file, *(self.sidecars_dir / file for file in sidecar_files)]

    # --- files and sidecars ---

    def wanted_bytes(self, path: Path) -> int | None:
        """The size of this file of packs/ or sidecars/ as a row has it; None without a row or for a damaged pack."""
        if path.parent == self.sidecars_dir:
            row = self._database.row("SELECT file_bytes FROM sidecars WHERE file = ?", (path.name,))
        elif files.PACK_NAME.fullmatch(os.fsencode(path.name)):
            ids = (bytes.fromhex(path.name[:64]), bytes.fromhex(path.name[65:97]))
            query = "SELECT file_bytes FROM packs WHERE pack_id = ? AND build = ? AND damage IS NULL"
            row = self._database.row(query, ids)
        else:
            row = None
        return None if row is None else int(row[0])

    def sidecars(self, after: str = "", limit: int = 1000) -> list[SidecarRow]:
        """In the order of their files' names, from the first one above `after`."""
        query = f"SELECT {SIDECAR_COLUMNS} FROM sidecars WHERE file > ? ORDER BY file LIMIT ?"
        rows = self._database.rows(query, (after, limit))
        return [SidecarRow(SidecarKey(*row[:4]), *row[4:]) for row in rows]

    def sidecars_of(self, pack_id: bytes) -> list[SidecarRow]:
        query = f"SELECT {SIDECAR_COLUMNS} FROM sidecars WHERE pack_id = ?"
        rows = self._database.rows(query, (pack_id,))
        return [SidecarRow(SidecarKey(*row[:4]), *row[4:]) for row in rows]

    def sidecar(self, key: SidecarKey) -> SidecarRow | None:
        with self._database.lock:
            return _held_sidecar(self._database.connection, key)

    def sidecar_kinds(self, pack_id: bytes) -> list[str]:
        query = "SELECT DISTINCT kind FROM sidecars WHERE pack_id = ? ORDER BY kind"
        return [kind for (kind,) in self._database.rows(query, (pack_id,))]

    def sidecar_count(self, pack_id: bytes) -> int:
        (count,) = self._database.row("SELECT count(*) FROM sidecars WHERE pack_id = ?", (pack_id,))
        return int(count)

    def commit_sidecar(self, row: SidecarRow, replace: bool = False) -> str | None:
        """Of a file that is durable. Its key may have one already, which stays unless it is to be replaced. Returns the
        file that no row names then, if there is one."""
        with self._database.transaction() as db:
            held = _held_sidecar(db, row.key)
            if held is not None and replace:
                db.execute("DELETE FROM sidecars WHERE file = ?", (held.file,))
            _insert_sidecar(db, row)
            commits = count_commit(db)
        self._stamp.write(self._database.id, commits)
        return None if held is None else held.file if replace else row.file

    def drop_sidecar(self, row: SidecarRow, reason: str) -> bool:
        """Forgets a damaged sidecar, then removes its file. False if another call has done so."""
        with self._database.transaction() as db:
            if not db.execute("DELETE FROM sidecars WHERE file = ?", (row.file,)).rowcount:
                return False
            self.sidecars_dropped += 1
        event(log, logging.ERROR, "sidecar dropped", pack_id=row.key.pack_id.hex(), kind=row.key.kind, reason=reason)
        remove_file(self.sidecars_dir / row.file)
        return True


def _removed(db: sqlite3.Connection, row: PackRow, gone: list[tuple[PackRow, list[str]]]) -> int | StoreError:
    """The bytes of the pack and its sidecars, or why it stays. Adds to `gone` the row and its sidecars' files."""
    name, build = row.ref.pack_id, row.ref.build
    if pinned(db, name):
        return StoreError("FAILED_PRECONDITION", f"pack {name.hex()} is pinned; unpin it first", reason="PACK_PINNED")
    held = db.execute("SELECT children FROM packs WHERE pack_id = ? AND build = ?", (name, build)).fetchone()
    if held is None:
        return StoreError("NOT_FOUND", f"pack {name.hex()} is not stored", reason="PACK_NOT_STORED")
    if held[0]:
        reason = f"pack {name.hex()} is continued by {held[0]} packs; evict its descendants with it"
        return StoreError("FAILED_PRECONDITION", reason, reason="PACK_CONTINUED")
    sidecar_files, sidecar_bytes = _drop_sidecars(db, name)
    db.execute("DELETE FROM packs WHERE pack_id = ?", (name,))
    gone.append((row, sidecar_files))
    return row.file_bytes + sidecar_bytes


def _drop_sidecars(db: sqlite3.Connection, pack_id: bytes) -> tuple[list[str], int]:
    """(files that no row names any more, their bytes)."""
    found = db.execute("SELECT file, file_bytes FROM sidecars WHERE pack_id = ?", (pack_id,)).fetchall()
    db.execute("DELETE FROM sidecars WHERE pack_id = ?", (pack_id,))
    return [file for file, _ in found], sum(size for _, size in found)


def _put(db: sqlite3.Connection, row: PackRow) -> None:
    """In the place of the row that the pack has; what it continues and is continued by stays."""
    columns = ", ".join(f"{column} = ?" for column in PACK_COLUMNS.split(", "))
    db.execute(f"UPDATE packs SET {columns}, damage = NULL WHERE pack_id = ?1", pack_values(row))


def _insert_sidecar(db: sqlite3.Connection, row: SidecarRow) -> None:
    """Unless its key has one."""
    key = row.key
    values = (key.pack_id, key.build, key.kind, key.parameters, row.file, row.file_bytes)
    db.execute("INSERT OR IGNORE INTO sidecars VALUES (?, ?, ?, ?, ?, ?)", values)


def _held_sidecar(db: sqlite3.Connection, key: SidecarKey) -> SidecarRow | None:
    query = "SELECT file, file_bytes FROM sidecars WHERE pack_id = ? AND build = ? AND kind = ? AND parameters = ?"
    row = db.execute(query, (key.pack_id, key.build, key.kind, key.parameters)).fetchone()
    return None if row is None else SidecarRow(key, *row)


def _tenant_keys(db: sqlite3.Connection) -> dict[str, bytes]:
    return {name: bytes(key) for name, key in db.execute("SELECT name, key FROM tenants").fetchall()}
