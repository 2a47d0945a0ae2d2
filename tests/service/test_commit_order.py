"""Commit order: the file's bytes, then its directory, then the row (docs/architecture.md, step 3)."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore_service.client import StoreClient
from kvstore_service.client.private import DAEMON_ARGV, PrivateDaemon
from tests.support.world import LAYOUT, TestWorker

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that records every write and sync of the process that preloads it."""
    library = tmp_path_factory.mktemp("recorder") / "sync_recorder.so"
    source = HERE / "sync_recorder.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True, timeout=60)
    return library


def recorded_commit(directory: Path, recorder: Path, argv: Sequence[str]) -> list[tuple[str, str]]:
    """(call, file) of everything that one CommitPack writes and syncs, in order."""
    log = directory / "sync.log"
    preloaded = ("/usr/bin/env", f"LD_PRELOAD={recorder}", f"SYNC_LOG={log}", *argv)
    with (
        PrivateDaemon(directory / "data", "64MiB", argv=preloaded) as daemon,
        StoreClient.connect(daemon.socket, daemon.broker, "order") as client,
    ):
        worker = TestWorker(client)
        session = client.open_session(LAYOUT, 4096)
        upload_id = worker.write(session, 1).upload_id
        assert upload_id is not None
        log.unlink(missing_ok=True)
        (committed,) = client.commit_pack(session, [upload_id])
        assert committed.error is None
        worker.close()
    lines = [line.split(" ", 1) for line in log.read_text().splitlines()]
    return [(call, Path(path).name) for call, path in lines]


def order_violations(events: list[tuple[str, str]]) -> list[str]:
    """What a power cut could turn into a row without its bytes."""
    packs = [i for i, (_, name) in enumerate(events) if name.endswith(".pack")]
    syncs_of_pack = [i for i in packs if events[i][0] == "sync"]
    writes_of_pack = [i for i in packs if events[i][0] == "write"]
    directory = [i for i, event in enumerate(events) if event == ("sync", "packs")]
    row = [i for i, (call, name) in enumerate(events) if call == "write" and name.endswith("-wal")]
    assert packs, events
    assert row, events
    wrong = []
    if not syncs_of_pack or max(syncs_of_pack) < max(writes_of_pack):
        wrong.append("the file's last write is not synced")
    if max(packs) > min(row):
        wrong.append("the row is written before the file is durable")
    if not directory or not max(packs) < directory[0] < min(row):
        wrong.append("the directory is not synced between file and row")
    if not any(call == "sync" and name.endswith("-wal") for call, name in events[max(row) :]):
        wrong.append("the row is not synced")
    return wrong


def test_commit_is_file_then_directory_then_row(tmp_path: Path, recorder: Path) -> None:
    assert order_violations(recorded_commit(tmp_path, recorder, DAEMON_ARGV)) == []


def test_a_commit_before_fsync_is_seen(tmp_path: Path, recorder: Path) -> None:
    """The check above is one that can fail: here is a daemon with the bug planted."""
    events = recorded_commit(tmp_path, recorder, (sys.executable, "-m", "tests.service.hasty_daemon"))
    assert "the row is written before the file is durable" in order_violations(events)
