"""A sidecar that is replaced: the former content or the new one, in whatever step it ends, and one file of it."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from kvstore_service.daemon.disk import catalog as catalog_module
from kvstore_service.daemon.disk import sidecars
from kvstore_service.daemon.disk.catalog import Catalog
from kvstore_service.shared.types import Layout, PackRef, PackRow, SidecarKey

REF = PackRef(bytes(32), bytes(16), 0, 256)
KEY = SidecarKey(REF.pack_id, REF.build, "labels", b"settings")


class Cut(BaseException):
    """As SIGKILL: nothing is put right after it."""


def stored(directory: Path) -> Catalog:
    """A pack with a sidecar."""
    catalog = Catalog(directory)
    row = PackRow(REF, bytes(32), Layout(bytes(32), 1, ()), "uid-0", 1)
    (catalog.packs_dir / row.file).write_bytes(b"x")
    catalog.commit_packs([row])
    sidecars.write(catalog, KEY, b"former")
    return catalog


def files(catalog: Catalog) -> list[Path]:
    return list(catalog.sidecars_dir.iterdir())


def test_the_former_content_stays_where_the_new_one_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with closing(stored(tmp_path)) as catalog:
        before = files(catalog), catalog.totals()
        with monkeypatch.context() as broken:
            broken.setattr(catalog_module, "_insert_sidecar", fail)
            with pytest.raises(Exception, match="I/O error"):
                sidecars.write(catalog, KEY, b"the new one", replace=True)
        assert sidecars.read(catalog, KEY) == b"former"
        assert (files(catalog), catalog.totals()) == before


def test_a_former_file_that_a_crash_has_left_goes_with_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*_: object) -> None:
        raise Cut

    with closing(stored(tmp_path)) as catalog, monkeypatch.context() as broken:
        broken.setattr(sidecars, "remove_file", cut)
        with pytest.raises(Cut):
            sidecars.write(catalog, KEY, b"the new one", replace=True)
        assert len(files(catalog)) == 2
    with closing(Catalog(tmp_path)) as catalog:
        assert sidecars.read(catalog, KEY) == b"the new one"
        (path,) = files(catalog)
        assert catalog.totals().stored_bytes == 1 + path.stat().st_size


def test_a_damaged_one_is_replaced(tmp_path: Path) -> None:
    with closing(stored(tmp_path)) as catalog:
        (path,) = files(catalog)
        path.write_bytes(b"damaged")
        sidecars.write(catalog, KEY, b"the new one", replace=True)
        assert sidecars.read(catalog, KEY) == b"the new one"
        assert len(files(catalog)) == 1
