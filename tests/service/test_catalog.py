"""Catalogue: what a crash leaves behind, versions, the lock of the directory, the first commit wins."""

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore_service.daemon.disk import sidecars
from kvstore_service.daemon.disk.catalog import Catalog
from kvstore_service.daemon.disk.rows import PackFilter, Quota, Totals
from kvstore_service.daemon.disk.schema import CATALOG_VERSION
from kvstore_service.daemon.disk.uses import BATCH_ROWS
from kvstore_service.shared.types import NO_PARENT, KindSpec, Layout, PackRef, PackRow, SidecarKey, StoreError

LAYOUT = Layout(b"f" * 32, 2, (KindSpec(2, 64, 2, 256),))


def pack_row(catalog: Catalog, name: int, build: int = 1, parent: bytes = NO_PARENT, tenant: str = "uid-0") -> PackRow:
    ref = PackRef(bytes([name]) * 32, bytes([build]) * 16, 0, 256)
    row = PackRow(ref, parent, LAYOUT, tenant, 100)
    (catalog.packs_dir / row.file).write_bytes(b"x" * 100)
    return row


def test_an_unknown_file_that_lies_in_quarantine_too_leaves_packs(tmp_path: Path) -> None:
    """A rebuild that was cut leaves a file with both names, and of two names of one file none is renamed."""
    with closing(Catalog(tmp_path)) as catalog:
        row = pack_row(catalog, 1)
    (tmp_path / "packs.stamp").unlink()
    (tmp_path / "quarantine").mkdir()
    (tmp_path / "quarantine" / row.file).hardlink_to(tmp_path / "packs" / row.file)
    with closing(Catalog(tmp_path)) as catalog:
        assert (catalog.removed, catalog.quarantined) == (0, 1)
        assert names(tmp_path / "packs") == []
        assert names(tmp_path / "quarantine") == [row.file]


def test_rows_survive_a_restart(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    row = pack_row(catalog, 1)
    key = catalog.tenant_key("uid-0")
    catalog.commit_packs([row])
    catalog.close()
    again = Catalog(tmp_path)
    assert again.pack(row.ref.pack_id) == row
    assert again.tenant_key("uid-0") == key
    assert again.tenant_key("uid-1") != key
    assert again.totals() == Totals(1, 100)
    again.close()


def test_files_without_a_row_are_removed_and_foreign_ones_are_not_touched(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    row = pack_row(catalog, 1)
    catalog.commit_packs([row])
    lost = pack_row(catalog, 2)
    half = f"{'ab' * 32}-{'cd' * 8}.partial"
    (catalog.sidecars_dir / half).write_bytes(b"y")
    catalog.close()
    foreign = [b"notes.pack", b"lost+found/x", b"not \xff utf-8", b"core", f"{'ef' * 32}-{'ab' * 16}.pack/x".encode()]
    for name in foreign:
        path = Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), b"packs", name)))
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"mine")
    os.mkfifo(tmp_path / "sidecars" / f"{'01' * 32}-{'cd' * 8}.sidecar")
    again = Catalog(tmp_path)
    assert (again.removed, again.quarantined) == (2, 0)
    assert not (again.sidecars_dir / half).exists()
    assert not (again.packs_dir / lost.file).exists()
    assert len(list(again.packs_dir.iterdir())) == 1 + len(foreign)
    assert again.served(row.ref.pack_id) == row
    assert len(list(again.sidecars_dir.iterdir())) == 1
    again.close()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_lost_catalogue_costs_no_file(tmp_path: Path) -> None:
    with closing(Catalog(tmp_path)) as catalog:
        rows = [pack_row(catalog, name) for name in (1, 2)]
        catalog.commit_packs(rows)
        sidecars.write(catalog, SidecarKey(rows[0].ref.pack_id, rows[0].ref.build, "hash"), b"index")
        held = names(catalog.packs_dir) + names(catalog.sidecars_dir)
    (tmp_path / "catalog.sqlite").unlink()
    with closing(Catalog(tmp_path)) as catalog:
        assert (catalog.removed, catalog.quarantined) == (0, len(held))
        assert names(tmp_path / "quarantine") == sorted(held)
        catalog.commit_packs([pack_row(catalog, 3)])
    with closing(Catalog(tmp_path)) as catalog:  # from now on it judges its own
        stray = pack_row(catalog, 4)
    with closing(Catalog(tmp_path)) as catalog:
        assert (catalog.removed, catalog.quarantined) == (1, 0)
        assert not (catalog.packs_dir / stray.file).exists()


@pytest.mark.parametrize("killed", [False, True])
def test_a_catalogue_restored_from_an_older_copy_costs_no_file(tmp_path: Path, killed: bool) -> None:
    """Also if the copy was made while this daemon ran, and the daemon was killed since."""
    data, copy = tmp_path / "data", tmp_path / "copy"
    catalog = Catalog(data)
    old = pack_row(catalog, 1)
    catalog.commit_packs([old])
    catalog._database.connection.execute("VACUUM INTO ?", (str(copy),))
    new = pack_row(catalog, 2)
    catalog.commit_packs([new])
    if killed:  # a lock and a connection that nobody ends
        os.close(catalog._directory_lock)
        catalog._database.connection.close()
    else:
        catalog.close()
    for path in data.glob("catalog.sqlite*"):
        path.unlink()
    copy.rename(data / "catalog.sqlite")
    with closing(Catalog(data)) as catalog:
        assert (catalog.removed, catalog.quarantined) == (0, 1)
        assert catalog.served(old.ref.pack_id) == old
        assert names(data / "quarantine") == [new.file]


def test_rows_without_their_file_are_reported_not_served_and_replaced(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    row, kept = pack_row(catalog, 1), pack_row(catalog, 3)
    catalog.commit_packs([row, kept])
    sidecars.write(catalog, SidecarKey(row.ref.pack_id, row.ref.build, "hash"), b"index")
    sidecars.write(catalog, SidecarKey(kept.ref.pack_id, kept.ref.build, "hash"), b"index")
    lost = catalog.sidecar(SidecarKey(kept.ref.pack_id, kept.ref.build, "hash"))
    assert lost is not None
    catalog.close()
    (tmp_path / "packs" / row.file).unlink()
    (tmp_path / "sidecars" / lost.file).unlink()
    again = Catalog(tmp_path)
    assert [damaged for damaged, _ in again.damaged()] == [row]
    assert (again.sidecars_dropped, again.sidecar_kinds(kept.ref.pack_id)) == (1, [])
    with pytest.raises(StoreError, match="DATA_LOSS"):
        again.pack(row.ref.pack_id)
    replacement = pack_row(again, 1, build=2)
    assert again.commit_packs([replacement]) == [replacement]
    assert again.pack(row.ref.pack_id) == replacement
    assert names(again.sidecars_dir) == []
    assert again.sidecar_kinds(row.ref.pack_id) == []
    again.close()


def test_what_gives_the_bytes_their_meaning_is_frozen(tmp_path: Path) -> None:
    for _ in range(2):
        with closing(Catalog(tmp_path)) as catalog:
            catalog.freeze({"extent_blocks": 4})
    with closing(Catalog(tmp_path)) as catalog, pytest.raises(StoreError, match=r"extent_blocks=8: .* set it to 4 or"):
        catalog.freeze({"extent_blocks": 8})


def test_the_first_commit_of_an_id_wins(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    first, second = pack_row(catalog, 1, build=1), pack_row(catalog, 1, build=2)
    assert catalog.commit_packs([first]) == [first]
    assert catalog.commit_packs([second]) == [first]
    catalog.close()


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    Catalog(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "catalog.sqlite", isolation_level=None)) as db:
        db.execute("UPDATE meta SET value = ? WHERE key = 'version'", (str(CATALOG_VERSION + 1),))
    with pytest.raises(StoreError, match="newer kvstored"):
        Catalog(tmp_path)
    # The refusal gave the directory free again.
    with pytest.raises(StoreError, match="newer kvstored"):
        Catalog(tmp_path)


@pytest.mark.parametrize("change", ["UPDATE meta SET value = value - 1", "DELETE FROM meta"])
@pytest.mark.parametrize("version", ["version", "pack_version"])
def test_an_older_version_is_refused_in_one_line(tmp_path: Path, version: str, change: str) -> None:
    """Catalogues that do not say know packs of version 1."""
    Catalog(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "catalog.sqlite", isolation_level=None)) as db:
        db.execute(f"{change} WHERE key = ?", (version,))
    for _ in range(2):
        with pytest.raises(StoreError, match=r"written by an older kvstored .*; use that version or another data_dir$"):
            Catalog(tmp_path)


def test_a_file_that_is_no_database_is_data_loss(tmp_path: Path) -> None:
    Catalog(tmp_path).close()
    (tmp_path / "catalog.sqlite").write_bytes(b"no database at all" * 500)
    with pytest.raises(StoreError, match="DATA_LOSS"):
        Catalog(tmp_path)


def test_the_directory_has_one_daemon(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    script = (
        "import sys; from pathlib import Path; from kvstore_service.daemon.disk.catalog import Catalog; "
        "Catalog(Path(sys.argv[1]))"
    )
    other = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=30, check=False
    )
    assert f"in use by pid {os.getpid()}" in other.stderr
    catalog.close()
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=30, check=True)


@pytest.mark.parametrize("place", [0, 10, 44, 60, -1])
def test_a_changed_sidecar_is_none_and_can_be_put_anew(tmp_path: Path, place: int) -> None:
    catalog = Catalog(tmp_path)
    row = pack_row(catalog, 1)
    catalog.commit_packs([row])
    key = SidecarKey(row.ref.pack_id, row.ref.build, "hash", b"seed 1")
    sidecars.write(catalog, key, b"index" * 20)
    assert sidecars.read(catalog, key) == b"index" * 20
    (path,) = catalog.sidecars_dir.iterdir()
    blob = bytearray(path.read_bytes())
    blob[place] ^= 1
    path.write_bytes(blob)
    stored_bytes = catalog.totals().sidecar_bytes
    assert sidecars.read(catalog, key) is None
    assert (list(catalog.sidecars_dir.iterdir()), catalog.sidecars_dropped) == ([], 1)
    assert stored_bytes > catalog.totals().sidecar_bytes == 0
    sidecars.write(catalog, key, b"anew")
    assert sidecars.read(catalog, key) == b"anew"
    catalog.close()


def test_the_first_sidecar_of_a_key_stays(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    row = pack_row(catalog, 1)
    catalog.commit_packs([row])
    key = SidecarKey(row.ref.pack_id, row.ref.build, "hash")
    sidecars.write(catalog, key, b"first")
    sidecars.write(catalog, key, b"second")
    assert sidecars.read(catalog, key) == b"first"
    assert sidecars.read(catalog, SidecarKey(row.ref.pack_id, row.ref.build, "hash", b"other")) is None
    catalog.close()


# --- totals, use, quotas ---


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with closing(Catalog(tmp_path)) as catalog:
        yield catalog


def summed(catalog: Catalog, tenant: str = "%") -> Totals:
    """What `totals` must be, by a scan."""
    db = catalog._database.connection
    packs = db.execute(
        "SELECT count(*), coalesce(sum(file_bytes), 0), 0, coalesce(sum(damage IS NOT NULL), 0) FROM packs "
        "WHERE tenant LIKE ?", (tenant,)
    ).fetchone()  # fmt: skip
    (sidecar_bytes,) = db.execute(
        "SELECT coalesce(sum(sidecars.file_bytes), 0) FROM sidecars JOIN packs USING (pack_id) WHERE tenant LIKE ?",
        (tenant,),
    ).fetchone()
    return Totals(packs[0], packs[1], sidecar_bytes, packs[3])


def test_running_totals_are_what_a_scan_finds(catalog: Catalog) -> None:
    rows = [pack_row(catalog, name, tenant=f"uid-{name % 3}") for name in range(1, 20)]
    catalog.commit_packs(rows)
    for row in rows[::2]:
        sidecars.write(catalog, SidecarKey(row.ref.pack_id, row.ref.build, "hash"), bytes(row.ref.pack_id[0]))
    for row in rows[::5]:
        assert catalog.mark_damaged(row, "planted")
        assert catalog.mark_damaged(row, "planted again")
    catalog.commit_packs([replace(pack_row(catalog, 1, build=2, tenant="uid-1"), file_bytes=77), rows[1]])
    (dropped,) = [catalog.sidecar(SidecarKey(rows[2].ref.pack_id, rows[2].ref.build, "hash"))]
    assert dropped is not None
    assert catalog.drop_sidecar(dropped, "planted")
    assert not catalog.drop_sidecar(dropped, "planted")
    outcomes, files = catalog.remove_packs(rows[3:9])
    catalog.remove_files(files)
    assert all(isinstance(size, int) for size in outcomes)
    assert catalog.totals() == summed(catalog)
    assert catalog.totals().damaged == 2
    by_tenant = {f"uid-{number}": catalog.totals_of(f"uid-{number}") for number in range(3)}
    assert by_tenant == {tenant: summed(catalog, tenant) for tenant in by_tenant} == catalog.totals_by_tenant()
    assert catalog.totals_of("uid-9") == Totals()


def test_marks_are_durable_and_the_next_commit_lifts_them(tmp_path: Path) -> None:
    with closing(Catalog(tmp_path)) as catalog:
        row = pack_row(catalog, 1)
        catalog.commit_packs([row])
        catalog.mark_damaged(row, "3 bad blocks")
    with closing(Catalog(tmp_path)) as catalog:
        assert catalog.damaged() == [(row, "3 bad blocks")]
        assert catalog.served(row.ref.pack_id) is None
        replaced: list[PackRow] = []
        catalog.on_gone = replaced.append
        anew = pack_row(catalog, 1, build=2)
        assert catalog.commit_packs([anew]) == [anew]
        assert replaced == [row]
        assert not catalog.mark_damaged(row, "found out late, of the old build")
        assert catalog.served(row.ref.pack_id) == anew


def test_two_writers_that_replace_the_same_damaged_packs_have_one_winner_each(catalog: Catalog) -> None:
    rows = [pack_row(catalog, name) for name in range(1, 16)]
    catalog.commit_packs(rows)
    for row in rows:
        catalog.mark_damaged(row, "planted")
    offers = [[pack_row(catalog, name, build) for name in range(1, 16)] for build in (2, 3)]
    with ThreadPoolExecutor(2) as writers:
        answers = list(writers.map(catalog.commit_packs, offers))
    for first, second, name in zip(*answers, range(1, 16), strict=True):
        assert first == second == catalog.served(bytes([name]) * 32)


def test_victims_are_leaves_in_the_order_of_use_and_importance(catalog: Catalog) -> None:
    day_s = 86400.0
    root, leaf = pack_row(catalog, 1), pack_row(catalog, 2, parent=bytes([1]) * 32)
    others = [pack_row(catalog, name, tenant="uid-1") for name in (3, 4, 5)]
    rows = [replace(row, created_s=1000.0) for row in (root, leaf, *others)]
    catalog.commit_packs(rows)
    names = [row.ref.pack_id for row in rows]

    def order(**options: Any) -> list[int]:
        return [victim.row.ref.pack_id[0] for victim in catalog.uses.victims(10, **options)]

    assert order() == [2, 3, 4, 5]
    catalog.uses.touch(names[1:3], 2000.0)
    assert order() == [4, 5, 2, 3]
    catalog.uses.set_importance({names[3]: 1.0})
    catalog.uses.touch([names[1]], 1000.0 + 0.5 * day_s)
    assert order() == [5, 3, 2, 4]
    assert order(tenant="uid-1") == [5, 3, 4]
    catalog.uses.pin([names[2]], True)
    catalog.uses.pin([names[4]], True, until_s=time.time() - 1.0)
    assert order() == [5, 2, 4]
    first = catalog.uses.victims(1)
    assert order(after=first[0]) == [2, 4]
    catalog.remove_packs([rows[1]])
    assert order() == [1, 5, 4]  # the root is a leaf now
    plan = catalog._database.connection.execute(
        "EXPLAIN QUERY PLAN SELECT pack_id FROM packs WHERE children = 0 AND pinned_until_s IS NULL "
        "ORDER BY keep_s, pack_id LIMIT 5"
    ).fetchall()
    assert "packs_by_use" in plan[0][3]
    assert len(plan) == 1


def test_uses_are_written_in_batches_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever touches writes nothing but what is beyond the bound; nobody writes more than a batch at a time."""
    with closing(Catalog(tmp_path)) as catalog:
        batches: list[int] = []
        with catalog._database.lock:
            catalog._database.connection.set_trace_callback(
                lambda query: batches.append(0) if query.startswith("BEGIN") else None
            )
        row = pack_row(catalog, 1)
        catalog.commit_packs([row])
        catalog.uses.touch([row.ref.pack_id], row.created_s + 50)
        assert catalog.listing.listed(row.ref.pack_id).last_used_s == row.created_s + 50
        batches.clear()
        catalog.uses.touch([number.to_bytes(32) for number in range(2000)], 1.0)
        assert not batches
        catalog.uses.write()
        assert len(batches) == -(-2001 // BATCH_ROWS)
        assert catalog.listing.listed(row.ref.pack_id).last_used_s == row.created_s + 50
        batches.clear()
        monkeypatch.setattr("kvstore_service.daemon.disk.uses._TOUCHES_MAX", 1000)
        catalog.uses.touch([number.to_bytes(32) for number in range(1500)], 1.0)
        assert len(batches) == -(-500 // BATCH_ROWS)
        assert len(catalog.uses._touched) <= 1000
        catalog.uses.touch([row.ref.pack_id], row.created_s + 60)
    with closing(Catalog(tmp_path)) as catalog:
        assert catalog.listing.listed(row.ref.pack_id).last_used_s == row.created_s + 60


def test_quotas_are_durable(tmp_path: Path) -> None:
    with closing(Catalog(tmp_path)) as catalog:
        catalog.set_quota("uid-1", Quota(1 << 30, None))
        catalog.set_quota("uid-2", Quota(5, 6))
        catalog.set_quota("uid-2", Quota())
    with closing(Catalog(tmp_path)) as catalog:
        assert catalog.quotas() == {"uid-1": Quota(1 << 30, None)}


def test_a_pin_ends_with_its_time(catalog: Catalog) -> None:
    row = pack_row(catalog, 1)
    catalog.commit_packs([row])
    name = row.ref.pack_id
    catalog.uses.pin([name], True, until_s=time.time() + 1000)
    assert catalog.uses.is_pinned(name)
    assert [str(error) for error in catalog.remove_packs([row])[0]] == [
        f"FAILED_PRECONDITION: pack {name.hex()} is pinned; unpin it first"
    ]
    catalog.uses.pin([name], True, until_s=time.time() - 1)
    assert not catalog.uses.is_pinned(name)
    assert catalog.remove_packs([row])[0] == [row.file_bytes]


def test_pages_pass_their_filter_and_look_at_a_bounded_number_of_rows(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore_service.daemon.disk.listing._LOOK_ROWS", 2)
    rows = [replace(pack_row(catalog, n, tenant=f"uid-{n % 2}"), created_s=float(n)) for n in range(1, 21)]
    catalog.commit_packs(rows)
    catalog.mark_damaged(rows[4], "planted")
    catalog.uses.pin([rows[7].ref.pack_id], True)

    def listing(wanted: PackFilter, limit: int = 3) -> list[int]:
        found, after = list[int](), b""
        while True:
            page, following = catalog.listing.page(wanted, after, limit)
            found += [item.row.ref.pack_id[0] for item in page]
            if following is None:
                return found
            assert following > after
            after = following

    assert listing(PackFilter()) == list(range(1, 21))
    assert listing(PackFilter(tenant="uid-1")) == list(range(1, 21, 2))
    assert listing(PackFilter(damaged=True)) == [5]
    assert listing(PackFilter(pinned=True)) == [8]
    assert listing(PackFilter(pinned=False, damaged=False, used_before_s=9.5)) == [1, 2, 3, 4, 6, 7, 9]
