"""The durable I/O of the control plane (catalogue, directories, sidecars) fails, in a daemon of this process."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore_service.client import AdminClient, StoreClient, StoreError
from kvstore_service.daemon import config, server
from kvstore_service.daemon.disk.catalog import Catalog
from kvstore_service.shared.types import PackRef, PackRow
from tests.support.life import Life
from tests.support.world import LAYOUT, TOKENS


class Nth:
    """Counts calls of the operations it stands for; the nth one fails."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fail_at = 0
        self.number = errno.EIO

    def arm(self, nth: int, number: int = errno.EIO) -> None:
        self.calls, self.fail_at, self.number = [], nth, number

    @property
    def failed(self) -> str | None:
        return self.calls[self.fail_at - 1] if 0 < self.fail_at <= len(self.calls) else None

    def call(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) != self.fail_at:
            return
        if not name.startswith("sqlite"):
            raise OSError(self.number, os.strerror(self.number))
        full = self.number == errno.ENOSPC
        error = sqlite3.OperationalError("database or disk is full" if full else "disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL if full else sqlite3.SQLITE_IOERR
        raise error


class Connection:
    """A connection whose statements go past `nth`."""

    def __init__(self, db: sqlite3.Connection, nth: Nth) -> None:
        self._db = db
        self._nth = nth

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        if statement != "ROLLBACK":
            self._nth.call(f"sqlite {statement.split()[0]}")
        return self._db.execute(statement, *values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


@pytest.fixture
def nth(monkeypatch: pytest.MonkeyPatch) -> Nth:
    nth = Nth()

    def guard(owner: Any, name: str, of_directory: tuple[str, ...] = ()) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def guarded(*args: Any, **kwargs: Any) -> Any:
            if not of_directory or Path(args[0]).parent.name in of_directory:
                nth.call(f"{owner.__name__}.{name}")
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, guarded)

    guard(os, "fsync")
    guard(os, "open", ("sidecars",))
    for name in ("open", "rename", "unlink"):
        guard(Path, name, ("packs", "sidecars"))
    return nth


@pytest.fixture
def daemon(tmp_path: Path, nth: Nth) -> Iterator[server.Daemon]:
    where = [f"--data-dir={tmp_path}/data", f"--socket={tmp_path}/s", f"--broker={tmp_path}/b", "--metrics-addr=off"]
    daemon = server.Daemon(config.load([*where, "--dram-bytes=64MiB", "--nvme-bytes=1GiB", "--copy-threads=1"]))
    daemon.start()
    daemon.store._upkeep.close()  # its chores would count among the calls of a life
    daemon.store.state.ballast.drop()  # or the first call that finds no room has some
    database = daemon.store.state.catalog._database
    database.connection = Connection(database.connection, nth)  # type: ignore[assignment]
    yield daemon
    nth.arm(0)
    daemon.close()


@pytest.fixture
def life(daemon: server.Daemon) -> Iterator[Life]:
    sockets = (str(daemon.config.socket), str(daemon.config.broker))
    with StoreClient.connect(*sockets) as client, AdminClient.connect(*sockets) as admin:
        life = Life(client, admin, daemon.config.data_dir, lambda: daemon.data_plane.stats()["warm_bytes"])
        yield life
        life.worker.close()


@pytest.mark.parametrize(
    ("number", "code"), [(errno.EIO, "INTERNAL"), (errno.ENOSPC, "RESOURCE_EXHAUSTED")], ids=["EIO", "ENOSPC"]
)
def test_every_durable_call_of_the_control_plane_fails_once(
    daemon: server.Daemon, life: Life, nth: Nth, number: int, code: str
) -> None:
    failed = set()
    for at in range(1, 1000):
        uses_lost = daemon.store.state.counts()["uses_lost"]
        nth.arm(at, number)
        raised = None
        try:
            life.live(at)
        except StoreError as error:
            raised = error.code
        name = nth.failed
        nth.arm(0)
        if name is None:
            break
        failed.add(name)
        # What could not be removed goes with the next start; here the data plane had removed it already. Uses of packs
        # may be lost.
        forgiven = name == "Path.unlink" or daemon.store.state.counts()["uses_lost"] > uses_lost
        assert raised == (None if forgiven else code), (at, name)
        life.give_up()
        life.check_nothing_is_left()
        assert daemon.store.state.uploads.promised()[0] == 0, (at, name)
        life.live(at)
        life.check_nothing_is_left()
    print(sorted(failed), at)
    assert failed >= {"os.fsync", "os.open", "Path.open", "Path.rename", "Path.unlink", "sqlite BEGIN", "sqlite INSERT",
                      "sqlite SELECT", "sqlite COMMIT"}  # fmt: skip


def test_a_catalogue_that_cannot_grow_is_resource_exhausted_until_it_can(daemon: server.Daemon, life: Life) -> None:
    """SQLite's own "database or disk is full"."""
    life.live(1)
    db = daemon.store.state.catalog._database.connection
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    db.execute(f"PRAGMA max_page_count={pages}")
    lived = [1]

    def live_on() -> None:
        for number in range(2, 100):
            life.live(number)
            lived.append(number)

    with pytest.raises(StoreError, match="RESOURCE_EXHAUSTED"):
        live_on()
    life.give_up()
    life.check_nothing_is_left()
    life.read(1)
    db.execute("PRAGMA max_page_count=1000000")
    life.live(lived[-1] + 1)
    life.check_nothing_is_left()


def test_a_commit_stands_when_the_damaged_file_before_it_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(build: int) -> PackRow:
        row = PackRow(PackRef(bytes(32), bytes([build]) * 16, 0, TOKENS), bytes(32), LAYOUT, "uid-0", 1)
        (catalog.packs_dir / row.file).write_bytes(b"x")
        return row

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    catalog = Catalog(tmp_path)
    first, second = row(1), row(2)
    catalog.commit_packs([first])
    assert catalog.mark_damaged(first, "planted")
    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", refuse)
        assert catalog.commit_packs([second]) == [second]
    assert not catalog.mark_damaged(first, "planted")  # found out late, of the old build
    assert catalog.pack(bytes(32)) == second
    catalog.close()
    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", refuse)
        with pytest.raises(OSError, match="Input/output error"):
            Catalog(tmp_path)
    again = Catalog(tmp_path)
    assert again.removed == 1
    assert not (again.packs_dir / first.file).exists()
    assert again.pack(bytes(32)) == second
    again.close()
