"""Catalogue: what a crash leaves behind, versions, the lock of the directory, the first commit wins."""

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from kvstore_service.daemon.disk import sidecars
from kvstore_service.daemon.disk.catalog import CATALOG_VERSION, Catalog
from kvstore_service.shared.types import KindSpec, Layout, PackRef, PackRow, SidecarKey, StoreError

LAYOUT = Layout(b"f" * 32, 2, (KindSpec(2, 64, 2, 256),))


def pack_row(catalog: Catalog, name: int, build: int = 1) -> PackRow:
    ref = PackRef(bytes([name]) * 32, bytes([build]) * 16, 0, 256)
    file = f"{name}-{build}.pack"
    (catalog.packs_dir / file).write_bytes(b"x" * 100)
    return PackRow(ref, bytes(32), LAYOUT, "uid-0", file, 100)


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
    assert again.totals() == (1, 100, 100)
    again.close()


def test_files_without_a_row_are_removed(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    row = pack_row(catalog, 1)
    catalog.commit_packs([row])
    pack_row(catalog, 2)
    (catalog.sidecars_dir / "half.partial").write_bytes(b"y")
    catalog.close()
    again = Catalog(tmp_path)
    assert sorted(again.removed) == ["2-1.pack", "half.partial"]
    assert [path.name for path in again.packs_dir.iterdir()] == ["1-1.pack"]
    again.close()


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_rows_without_their_file_are_reported_not_served_and_replaced(tmp_path: Path, damage: str) -> None:
    catalog = Catalog(tmp_path)
    row = pack_row(catalog, 1)
    catalog.commit_packs([row])
    sidecars.write(catalog, SidecarKey(row.ref.pack_id, row.ref.build, "hash"), b"index")
    catalog.close()
    path = tmp_path / "packs" / row.file
    path.unlink() if damage == "gone" else os.truncate(path, 50)
    again = Catalog(tmp_path)
    assert list(again.damaged) == [row.ref.pack_id]
    with pytest.raises(StoreError, match="DATA_LOSS"):
        again.pack(row.ref.pack_id)
    replacement = pack_row(again, 1, build=2)
    assert again.commit_packs([replacement]) == [replacement]
    assert again.pack(row.ref.pack_id) == replacement
    assert not path.exists()
    assert again.sidecar_kinds(row.ref.pack_id) == []
    again.close()


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
def test_a_changed_sidecar_is_data_loss(tmp_path: Path, place: int) -> None:
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
    with pytest.raises(StoreError, match="DATA_LOSS"):
        sidecars.read(catalog, key)
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
    with pytest.raises(StoreError, match="NOT_FOUND"):
        sidecars.read(catalog, SidecarKey(row.ref.pack_id, row.ref.build, "hash", b"other"))
    catalog.close()
