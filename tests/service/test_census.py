"""What goes through all rows: right whatever is written meanwhile, and never long in the way of a call."""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import pytest

from kvstore_service.daemon.disk import census, listing, sidecars
from kvstore_service.daemon.disk.catalog import Catalog
from kvstore_service.daemon.disk.rows import PackFilter, Totals
from kvstore_service.shared.types import NO_PARENT, KindSpec, Layout, PackRef, PackRow, SidecarKey

LAYOUT = Layout(b"f" * 32, 1, (KindSpec(1, 64, 2, 256),))
PACKS = 2000
PAGE_ROWS = 50
STEPS_MAX = 5000  # of SQLite's machine while the lock is held; one look at all rows takes three times as many


def row_of(number: int, parent: bytes = NO_PARENT, build: int = 1) -> PackRow:
    name = hashlib.sha256(number.to_bytes(8, "big")).digest()
    return PackRow(PackRef(name, bytes([build]) * 16, 0, 256), parent, LAYOUT, "uid-0", 100)


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Catalog]:
    """Many packs without files; all but the first continue it."""
    monkeypatch.setattr(census, "PAGE_ROWS", PAGE_ROWS)
    monkeypatch.setattr(listing, "_LOOK_ROWS", PAGE_ROWS)
    monkeypatch.setattr("kvstore_service.daemon.disk.catalog._SCAN_ROWS", PAGE_ROWS)
    with closing(Catalog(tmp_path)) as catalog:
        root = row_of(0)
        catalog.commit_packs([root, *(row_of(number, root.ref.pack_id) for number in range(1, PACKS))])
        yield catalog


def scanned(catalog: Catalog) -> Totals:
    packs = catalog._database.row("SELECT count(*), sum(file_bytes), sum(damage IS NOT NULL) FROM packs")
    (sidecar_bytes,) = catalog._database.row("SELECT coalesce(sum(file_bytes), 0) FROM sidecars")
    return Totals(packs[0], packs[1], sidecar_bytes, packs[2])


def remove(catalog: Catalog, row: PackRow) -> None:
    with catalog._database.transaction() as db:
        db.execute("DELETE FROM sidecars WHERE pack_id = ?", (row.ref.pack_id,))
        db.execute("DELETE FROM packs WHERE pack_id = ?", (row.ref.pack_id,))


class StepsUnderLock:
    """In the place of the database's lock: counts the steps of SQLite's machine from each entry to its exit."""

    def __init__(self, catalog: Catalog) -> None:
        self._inner = threading.Lock()
        self._steps = 0
        self.most = 0
        catalog._database.lock = self  # type: ignore[assignment]
        catalog._database.connection.set_progress_handler(self._step, 10)

    def _step(self) -> int:
        self._steps += 10
        self.most = max(self.most, self._steps)
        return 0

    def __enter__(self) -> None:
        self._inner.acquire()
        self._steps = 0

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._inner.release()


def every_page(catalog: Catalog, wanted: PackFilter) -> int:
    after: bytes | None = b""
    found = 0
    while after is not None:
        page, after = catalog.listing.page(wanted, after)
        found += len(page)
    return found


WALKS: dict[str, Callable[[Catalog], object]] = {
    "keys": lambda catalog: len(catalog.census.pack_keys()) == PACKS,
    "keys of sidecars": lambda catalog: len(catalog.census.sidecar_keys()) == 0,
    "files": lambda catalog: len(list(catalog.census.pack_files())) == PACKS,
    "recount": lambda catalog: catalog.census.recounted()[1].packs == PACKS,
    "descendants": lambda catalog: len(list(catalog.descendants(row_of(0).ref.pack_id))) == PACKS - 1,
    "every pack": lambda catalog: len(list(catalog.listing.every_pack())) == PACKS,
    "listing": lambda catalog: every_page(catalog, PackFilter()) == PACKS,
    "listing of what is pinned": lambda catalog: every_page(catalog, PackFilter(pinned=True)) == 1,
    "listing of what is damaged": lambda catalog: every_page(catalog, PackFilter(damaged=True)) == 0,
    "listing of a tenant": lambda catalog: every_page(catalog, PackFilter(tenant="uid-9")) == 0,
}


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_over_all_packs_holds_the_lock_for_a_page_at_most(catalog: Catalog, walk: str) -> None:
    catalog.uses.pin([row_of(7).ref.pack_id], True)
    steps = StepsUnderLock(catalog)
    assert WALKS[walk](catalog)
    assert 0 < steps.most < STEPS_MAX


def test_what_is_written_during_a_recount_is_counted_once(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two pages come rows, sidecars and damage, and go, before and behind what was looked at."""
    numbers = iter(range(PACKS, 10 * PACKS))
    turns = 0

    def write(_: float) -> None:
        nonlocal turns
        turns += 1
        new = row_of(next(numbers))
        gone, hurt, mended = (row_of(turns * 20 + place, row_of(0).ref.pack_id) for place in range(3))
        catalog.commit_packs([new])
        sidecars.write(catalog, SidecarKey(new.ref.pack_id, new.ref.build, "hash"), b"index" * turns)
        if turns % 2:
            remove(catalog, gone)
        if turns % 5 == 0:
            remove(catalog, new)
        catalog.mark_damaged(hurt, "planted")
        catalog.mark_damaged(mended, "planted")
        catalog.commit_packs([replace(mended, ref=replace(mended.ref, build=b"2" * 16), file_bytes=7)])

    monkeypatch.setattr(time, "sleep", write)
    kept, counted = catalog.census.recounted()
    monkeypatch.undo()
    assert turns > 10
    assert kept == counted == scanned(catalog)
    assert kept.damaged == turns
    with catalog._database.transaction() as db:
        db.execute("UPDATE totals SET packs = packs + 1 WHERE tenant = ''")
    kept, counted = catalog.census.recounted()
    assert (kept.packs, counted) == (counted.packs + 1, scanned(catalog))


def test_lost_files_are_found_page_by_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(census, "PAGE_ROWS", 3)
    rows = [row_of(number) for number in range(10)]
    with closing(Catalog(tmp_path)) as catalog:
        for row in rows:
            (catalog.packs_dir / row.file).write_bytes(b"x" * 100)
        catalog.commit_packs(rows)
        for row in rows:
            sidecars.write(catalog, SidecarKey(row.ref.pack_id, row.ref.build, "hash"), b"index")
        lost = sorted(row.ref.pack_id for row in rows[::2])
        for row in rows[::2]:
            (catalog.packs_dir / row.file).unlink()
        for path in list(catalog.sidecars_dir.iterdir())[:7]:
            path.unlink()
    with closing(Catalog(tmp_path)) as catalog:
        assert [row.ref.pack_id for row, _ in catalog.damaged()] == lost
        assert (catalog.sidecars_dropped, catalog.totals().damaged) == (7, 5)
        assert len(catalog.census.sidecar_keys()) == 3
