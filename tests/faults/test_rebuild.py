"""`kvstored rebuild` when it is cut short, when the catalogue knows the packs already, and on a full disk."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from kvstore_service.client import AdminClient, PackRef, SidecarKey
from kvstore_service.daemon.disk import rebuild
from kvstore_service.daemon.disk.catalog import Catalog
from tests.faults.test_truth import CHAIN, joined, kvstored, looked_up, write_chain
from tests.support.daemon_process import Daemon
from tests.support.world import LAYOUT, TOKENS


def lose(data: Path) -> None:
    for path in data.glob("catalog.sqlite*"):
        path.unlink()


def stored(daemon: Daemon) -> tuple[list[PackRef], SidecarKey]:
    """A chain and a sidecar of it, in a daemon that has ended."""
    with joined(daemon) as worker:
        client = worker.client
        packs, _ = write_chain(worker, client.open_session(LAYOUT, CHAIN * TOKENS), range(CHAIN))
        key = SidecarKey(packs[2].pack_id, packs[2].build, "hash", b"seed")
        client.put_sidecar(key, b"index")
    daemon.stop()
    return packs, key


def check_all_is_served(daemon: Daemon, packs: list[PackRef], key: SidecarKey) -> None:
    daemon.start()
    with joined(daemon) as worker, AdminClient.connect(daemon.socket, daemon.broker) as admin:
        assert looked_up(worker.client) == packs
        assert worker.client.get_sidecar(key) == b"index"
        assert {item.record_order for item in admin.list_packs()} == {"cluster"}
        assert [(item.bad_blocks, item.error) for item in admin.verify()] == [([], "")] * CHAIN
        assert [check.detail for check in admin.audit() if not check.ok] == []


def test_packs_that_an_older_catalogue_put_aside_come_back_to_the_newer_one(tmp_path: Path) -> None:
    """The wrong copy is started once; the right one then has rows of the very builds that lie in quarantine."""
    with Daemon(tmp_path) as daemon:
        packs, key = stored(daemon)
        data, right = daemon.data_dir, tmp_path / "right"
        shutil.copy(data / "catalog.sqlite", right)
        lose(data)
        daemon.start()
        daemon.stop()
        assert len(list((data / "quarantine").iterdir())) == CHAIN + 1
        lose(data)
        shutil.copy(right, data / "catalog.sqlite")
        assert kvstored(data, "rebuild")[0] == 0
        check_all_is_served(daemon, packs, key)


class Cut(BaseException):
    """As SIGKILL: nothing is put right after it."""


@pytest.mark.parametrize("step", ["commit_packs", "commit_sidecar"])
@pytest.mark.parametrize("error", [Cut, sqlite3.OperationalError])
def test_a_rebuild_that_is_cut_short_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: type[BaseException]
) -> None:
    def fail(*_: object) -> None:
        raise error("cut short")

    with Daemon(tmp_path) as daemon:
        packs, key = stored(daemon)
        lose(daemon.data_dir)
        with monkeypatch.context() as cut, closing(Catalog(daemon.data_dir)) as catalog:
            cut.setattr(Catalog, step, fail)
            with pytest.raises(error):
                rebuild.rebuild(catalog)
        daemon.start()  # which judges what the catalogue does not know
        daemon.stop()
        assert kvstored(daemon.data_dir, "rebuild")[0] == 0
        check_all_is_served(daemon, packs, key)
