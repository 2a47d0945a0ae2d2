"""Every disk call of the data plane fails, is cut, delayed, torn or told to come again, in a daemon that goes on.

Whatever happens to a call: the worker gets a typed error or the right bytes, nothing half done stays, and the same
work succeeds when it is tried again.
"""

from __future__ import annotations

import errno
import re
import threading
import time
from pathlib import Path

import pytest

from kvstore_service.client import PackReservation, StoreClient, StoreError
from tests.support.daemon_process import Daemon
from tests.support.life import PACKS, Life, Worker, living, reservation, until
from tests.support.world import LAYOUT

ALWAYS = 1 << 40
ROOT = Path(__file__).parents[2]
WRITES = ("upload.map", "upload.segment", "upload.tail", "upload.header")
ONE_BLOCK = ("upload.map", "upload.tail", "upload.header", "pack.header", "pack.crcs")
READS = ("pack.header", "pack.crcs", "pack.map", "gather", "read_ahead")
OTHERS = ("upload.open", "upload.allocate", "upload.sync", "pack.open", "pack.stat")
# Failures of these are repaired where they happen: another unlink, another submit.
QUIET = ("upload.unlink", "submit")
FALLBACK = "upload.extend"  # only where the file system has no fallocate
LIVES_BEYOND = 3
# No daemon verifies with the data plane, no life rewrites a pack (tests/dataplane/test_rewrite.py does); the probe is
# over when a life begins.
NEVER = {"pack.verify", "pack.segment", "probe.open", "probe.write", "probe.read"}
NO_FALLOCATE = ("upload.allocate", "fail", 1, ALWAYS, errno.EOPNOTSUPP)


class Sufferer:
    """Lives with faults in a daemon, one number after the other."""

    def __init__(self, daemon: Daemon, life: Life) -> None:
        self._daemon = daemon
        self._life = life
        self.number = 0
        self.seen: dict[str, int] = {}

    def suffer(self, *rules: tuple[str, str, int, int, int]) -> str | None:
        """The code of the error that a life under `rules` ends with; None if it does not notice.

        Then nothing may be left of it, and the same life without faults must succeed."""
        self.number += 1
        self._daemon.set_disk_faults(*rules)
        code = None
        try:
            self._life.live(self.number)
        except StoreError as error:
            code = error.code
        self.seen = {site: faults for site, (_, faults) in self._daemon.disk_counts().items() if faults}
        self._daemon.set_disk_faults()
        self._life.give_up()
        self._life.check_nothing_is_left()
        self._life.live(self.number)
        self._life.check_nothing_is_left()
        return code


@pytest.fixture
def sufferer(daemon: Daemon, life: Life) -> Sufferer:
    return Sufferer(daemon, life)


def test_the_data_plane_calls_the_disk_through_its_seam_only() -> None:
    calls = re.compile(r"(?<![\w.>])(?:::)?(open|pread\w*|pwrite\w*|fdatasync|fsync|fallocate|ftruncate|unlink|fstat|"
                       r"io_uring_submit)\(")  # fmt: skip
    found = set()
    for path in filter(Path.is_file, (ROOT / "csrc" / "store").rglob("*")):
        for line in path.read_text().splitlines():
            code = line.partition("//")[0].replace("disk::", ".")
            found |= {(path.name, match[1]) for match in calls.finditer(code)}
    # mapping.h looks at a worker's memory, arenas.cc sizes its own.
    seam = {call for name, call in found if name == "disk.h"}
    assert found - {("disk.h", call) for call in seam} == {("mapping.h", "fstat"), ("arenas.cc", "ftruncate")}
    assert seam >= {"open", "pread", "pwrite", "fdatasync", "fallocate", "ftruncate", "unlink", "fstat"}


def test_every_operation_of_every_site_fails_once(daemon: Daemon) -> None:
    """EIO for the first operation of a life, then for the second, until a life has no more; then all is read again."""
    failed = set[str]()
    with living(daemon) as life:
        sufferer, beyond = Sufferer(daemon, life), 0
        for nth in range(1, 1000):
            code = sufferer.suffer(("*", "fail", nth, 1, errno.EIO))
            if not sufferer.seen:  # lives differ by a read ahead or two
                beyond += 1
                if beyond == LIVES_BEYOND:
                    break
                continue
            (site,) = sufferer.seen
            failed.add(site)
            quiet = site in QUIET or site == "read_ahead"
            assert code == (None if quiet else "UNAVAILABLE"), (nth, site)
        code = sufferer.suffer(NO_FALLOCATE, (FALLBACK, "fail", 2, 1, errno.EIO))
        assert (code, sufferer.seen[FALLBACK]) == ("UNAVAILABLE", 1)
        for site in set(daemon.disk_counts()) - {FALLBACK} - NEVER - failed:  # a shift has passed over them
            code = sufferer.suffer((site, "fail", 1, 1, errno.EIO))
            assert (code, sufferer.seen) == (None if site in QUIET else "UNAVAILABLE", {site: 1})
    daemon.restart()
    with living(daemon) as life:
        for number in range(1, sufferer.number + 1):
            life.read(number)
        life.check_nothing_is_left()


def test_a_full_disk_is_resource_exhausted_at_every_site_that_writes(sufferer: Sufferer) -> None:
    for site in (*WRITES, "upload.open", "upload.allocate", "upload.sync"):
        for times in (1, ALWAYS):
            code = sufferer.suffer((site, "fail", 2, times, errno.ENOSPC))
            assert (code, site) == ("RESOURCE_EXHAUSTED", site)
            assert sufferer.seen[site] >= 1
    code = sufferer.suffer(NO_FALLOCATE, (FALLBACK, "fail", 1, 1, errno.ENOSPC))
    assert code == "RESOURCE_EXHAUSTED"


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EINTR], ids=["EAGAIN", "EINTR"])
def test_a_transfer_that_the_kernel_wants_again_is_repeated(sufferer: Sufferer, number: int) -> None:
    for site in (*WRITES, *READS, "submit"):
        assert sufferer.suffer((site, "fail", 1, 20, number)) is None, site
        assert sufferer.seen == {site: 20}


def test_a_transfer_that_is_never_done_is_given_up_in_bounded_time(sufferer: Sufferer) -> None:
    for site in (*WRITES, *READS):
        started_s = time.monotonic()
        code = sufferer.suffer((site, "fail", 1, ALWAYS, errno.EAGAIN))
        assert code == (None if site == "read_ahead" else "UNAVAILABLE"), site
        assert 1000 < sufferer.seen[site] < 100_000
        assert time.monotonic() - started_s < 10.0


@pytest.mark.parametrize("size", [4096, 4096 + 512, 512])
def test_a_short_transfer_is_continued(sufferer: Sufferer, size: int) -> None:
    for site in (*WRITES, *READS):
        assert sufferer.suffer((site, "shorten", 1, 3, size)) is None, site
        assert set(sufferer.seen) == {site}


def test_a_transfer_of_nothing_is_an_error(sufferer: Sufferer) -> None:
    """A read of nothing is the end of the file."""
    for site in (*WRITES, *READS):
        code = sufferer.suffer((site, "shorten", 1, 1, 0))
        assert code == ("UNAVAILABLE" if site in WRITES else "DATA_LOSS"), site


def test_a_late_operation_changes_nothing(sufferer: Sufferer) -> None:
    for site in (*WRITES, *READS, *OTHERS, *QUIET):
        assert sufferer.suffer((site, "delay", 1, 2, 20_000)) is None, site
        assert sufferer.seen[site] >= 1


def test_a_torn_operation_that_reports_success_is_found_and_not_delivered(sufferer: Sufferer) -> None:
    for site in (*WRITES, *READS):
        for kept in (0, 4096):
            # What is one block is torn only if nothing of it is kept.
            whole = site in ONE_BLOCK and kept == 4096
            code = sufferer.suffer((site, "tear", 1, 1, kept))
            assert code == (None if whole else "DATA_LOSS"), (site, kept)
            assert sufferer.seen == {site: 1}


def test_an_upload_whose_sync_failed_is_never_committed(daemon: Daemon, life: Life) -> None:
    """After a failed sync the kernel may call pages clean that are not on the disk: a second sync proves nothing."""
    client = life.worker.client
    session = client.open_session(LAYOUT, 4096)
    (item,) = client.reserve_pack(session, [reservation(1)])
    assert item.upload_id is not None
    life.worker.store(item.upload_id, 1)
    daemon.set_disk_faults(("upload.sync", "fail", 1, 1, errno.EIO))
    (committed,) = client.commit_pack(session, [item.upload_id])
    assert committed.error is not None
    assert committed.error.code == "UNAVAILABLE"
    with pytest.raises(StoreError, match="NOT_FOUND"):
        client.commit_pack(session, [item.upload_id])
    assert list((daemon.data_dir / "packs").iterdir()) == []
    (again,) = client.reserve_pack(session, [reservation(1)])
    assert not again.exists


def test_an_upload_that_fails_gives_its_quota_back(shim: Path, tmp_path: Path) -> None:
    """The disk tier has room for three packs; what a failed attempt kept would not let the next one in."""
    with (
        Daemon(tmp_path, options=("--nvme-bytes=1MiB", "--copy-threads=1"), faulty=True, native=shim) as daemon,
        StoreClient.connect(daemon.socket, daemon.broker) as client,
    ):
        worker = Worker(client)
        session = client.open_session(LAYOUT, 4096)
        chain = [reservation(n, n) for n in range(3)]
        firsts = {
            "upload.open": 3,
            "upload.allocate": 2,
            "upload.segment": 9,
            "upload.header": 1,
            "upload.sync": 1,
        }
        for site, nth in firsts.items():
            daemon.set_disk_faults((site, "fail", nth, ALWAYS, errno.EIO))
            uploads: list[int] = []
            with pytest.raises(StoreError, match="UNAVAILABLE"):
                _write(worker, session, chain, uploads)
            client.abort_pack(uploads)
            daemon.set_disk_faults()
            uploads = [item.upload_id or 0 for item in client.reserve_pack(session, chain)]
            assert all(uploads), "nothing was committed"
            client.abort_pack(uploads)
        worker.close()


def _write(worker: Worker, session: str, chain: list[PackReservation], uploads: list[int]) -> None:
    uploads += [item.upload_id or 0 for item in worker.client.reserve_pack(session, chain)]
    for number, upload in enumerate(uploads):
        worker.store(upload, number)
    for item in worker.client.commit_pack(session, uploads):
        if item.error is not None:
            raise item.error


@pytest.mark.parametrize("site", ["upload.allocate", "upload.tail", "upload.header", "upload.sync"])
def test_a_daemon_killed_amid_a_write_leaves_nothing_half_done(daemon: Daemon, site: str) -> None:
    with living(daemon) as life:
        life.live(1)
        daemon.set_disk_faults((site, "delay", 2, 1, 60_000_000))
        ended: list[str] = []

        def live() -> None:
            try:
                life.live(2)
            except StoreError as error:
                ended.append(error.code)

        thread = threading.Thread(target=live)
        thread.start()
        until(lambda: daemon.disk_counts()[site][1] == 1, f"{site} is under way")
        daemon.kill()
        thread.join(20.0)
        assert ended == ["UNAVAILABLE"]
    assert len(list((daemon.data_dir / "packs").iterdir())) > PACKS + 1
    daemon.start()
    with living(daemon) as life:
        life.check_nothing_is_left()
        assert len(list((daemon.data_dir / "packs").iterdir())) == PACKS + 1
        for number in (1, 2):
            life.live(number)
        life.check_nothing_is_left()
