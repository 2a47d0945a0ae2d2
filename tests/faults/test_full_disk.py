"""A disk that is really full: a small file system of the daemon's own, in a mount namespace that ends with it."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore_service.client import AdminClient, PrefixCandidate, SidecarKey, StoreClient, StoreError
from tests.support.daemon_process import Daemon
from tests.support.life import Life, reservation
from tests.support.world import LAYOUT, TOKENS

DISK_BYTES = 12 << 20
OPTIONS = ("--nvme-bytes=1GiB", "--copy-threads=1")
_MOUNT = {
    "ext4": 'mount -o loop "$1" "$2" && shift 2 && exec "$@"',
    "tmpfs": f'mount -t tmpfs -o size={DISK_BYTES},mode=0700 none "$2" && shift 2 && exec "$@"',
}


class SmallDisk:
    """`prefix` runs a command that sees the file system at `data`; without root in a user namespace."""

    def __init__(self, directory: Path, kind: str) -> None:
        self.data = directory / "data"
        self.data.mkdir()
        image = directory / "image"
        if kind == "ext4":
            with image.open("wb") as file:
                file.truncate(DISK_BYTES)
            subprocess.run(
                ["mkfs.ext4", "-q", "-b", "4096", "-m", "0", "-O", "^has_journal", image], check=True, timeout=60
            )
        user = [] if os.getuid() == 0 else ["--map-root-user"]
        # A new user namespace forgets the signal at the parent's death.
        tethered = ("unshare", "--mount", *user, "setpriv", "--pdeathsig", "TERM")
        self.prefix = (
            shutil.which("env") or "env",
            *tethered,
            "sh",
            "-c",
            _MOUNT[kind],
            "sh",
            str(image),
            str(self.data),
        )

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self.prefix, *command], capture_output=True, text=True, timeout=60, check=False)


PROBE = "import os, sys; os.close(os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_DIRECT)); os.unlink(sys.argv[1])"


@pytest.fixture(params=["ext4", "tmpfs"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> SmallDisk:
    if request.param == "ext4" and os.getuid() != 0:
        pytest.skip("mounting an ext4 image needs root")
    disk = SmallDisk(tmp_path, request.param)
    probed = disk.run(sys.executable, "-c", PROBE, str(disk.data / "probe"))
    if probed.returncode != 0:
        pytest.skip(f"no {request.param} of one's own with O_DIRECT here: {probed.stderr.strip().splitlines()[-1]}")
    return disk


@pytest.fixture
def daemon(disk: SmallDisk, tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path, prefix=disk.prefix, options=(*OPTIONS, "--on-full=refuse")) as running:
        yield running


@pytest.fixture
def evicting(disk: SmallDisk, tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path, prefix=disk.prefix, options=OPTIONS) as running:
        yield running


def fill(path: Path) -> None:
    """Takes every byte that is left."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        for size in (1 << 16, 512):
            while True:
                try:
                    os.write(fd, b"f" * size)
                except OSError as error:
                    if error.errno == errno.ENOSPC:
                        break
                    raise
    finally:
        os.close(fd)


@contextmanager
def small_life(daemon: Daemon) -> Iterator[Life]:
    with (
        StoreClient.connect(daemon.socket, daemon.broker) as client,
        AdminClient.connect(daemon.socket, daemon.broker) as admin,
    ):
        inside = Path(f"/proc/{daemon.pid}/root{daemon.data_dir}")
        life = Life(client, admin, inside, lambda: admin.get_status().counters["warm_bytes"])
        yield life
        life.worker.close()


def take_all(life: Life, session: str, uploads: list[int]) -> None:
    """Writes packs until one does not fit; adds their uploads."""
    for number in range(1000, 1100):
        (item,) = life.worker.client.reserve_pack(session, [reservation(number)])
        assert item.upload_id is not None
        uploads.append(item.upload_id)
        life.worker.store(item.upload_id, number)


def test_a_full_disk_refuses_with_a_reason_reads_on_and_serves_again_when_there_is_space(daemon: Daemon) -> None:
    with small_life(daemon) as life:
        client, uploads = life.worker.client, list[int]()
        life.live(1)
        session = client.open_session(LAYOUT, 1 << 20)
        with pytest.raises(StoreError, match=r"RESOURCE_EXHAUSTED.*No space left on device"):
            take_all(life, session, uploads)
        assert len(uploads) > 10
        fill(life.data_dir / "filler")
        life.read(1)
        with pytest.raises(StoreError, match="RESOURCE_EXHAUSTED"):
            client.reserve_pack(session, [reservation(2000)])
        (pack,) = client.lookup_prefix(LAYOUT.fingerprint, [PrefixCandidate(0, TOKENS, reservation(3).token_digest)])
        key = SidecarKey(pack.pack_id, pack.build, "levels")
        with pytest.raises(StoreError, match="RESOURCE_EXHAUSTED"):
            client.put_sidecar(key, bytes(100_000))
        assert client.get_sidecar(key) is None
        # An upload's blocks are its own since the reservation; its row needs a little room besides.
        codes = []
        for upload in uploads[:5]:
            try:
                codes += [item.error for item in client.commit_pack(session, [upload])]
            except StoreError as error:
                codes.append(error.code)
        assert set(codes) <= {None, "RESOURCE_EXHAUSTED"}
        life.read(1)
        client.abort_pack(uploads)
        (life.data_dir / "filler").unlink()
        client.close_session(session)
        life.check_nothing_is_left()
        client.put_sidecar(key, bytes(100_000))
        assert client.get_sidecar(key) == bytes(100_000)
        life.live(2)
        life.read(1)
        life.check_nothing_is_left()


@pytest.mark.parametrize("disk", ["ext4"], indirect=True)
def test_a_daemon_killed_on_a_full_disk_comes_back_with_what_was_committed(daemon: Daemon) -> None:
    with small_life(daemon) as life:
        life.live(1)
        with pytest.raises(StoreError, match="RESOURCE_EXHAUSTED"):
            take_all(life, life.worker.client.open_session(LAYOUT, 1 << 20), [])
        fill(life.data_dir / "filler")
        daemon.kill()
    daemon.start()
    with small_life(daemon) as life:
        life.check_nothing_is_left()
        life.read(1)
        life.live(2)


@pytest.mark.parametrize("disk", ["ext4"], indirect=True)
def test_a_start_on_a_full_disk_serves_what_is_stored(disk: SmallDisk, daemon: Daemon) -> None:
    with small_life(daemon) as life:
        life.live(1)
    daemon.stop()
    zeros = f"if=/dev/zero of={disk.data}/filler oflag=append conv=notrunc"
    full = disk.run("sh", "-c", f"dd {zeros} bs=64K; dd {zeros} bs=512")
    assert "No space left" in full.stderr
    daemon.start()
    with small_life(daemon) as life:
        life.read(1)
        with pytest.raises(StoreError, match="RESOURCE_EXHAUSTED"):
            life.live(2)
    daemon.stop()
    assert disk.run("rm", f"{disk.data}/filler").returncode == 0
    daemon.start()
    with small_life(daemon) as life:
        life.read(1)
        life.live(2)


def test_a_disk_that_is_full_before_the_store_is_evicted_for(evicting: Daemon) -> None:
    """`nvme_bytes` is far away; the catalogue itself cannot grow when the first pack has to go."""
    with small_life(evicting) as life:
        client = life.worker.client
        session = client.open_session(LAYOUT, 1 << 20)
        for number in range(1000, 1010):
            life.worker.commit(session, number)
        client.close_session(session)
        fill(life.data_dir / "filler")
        session = client.open_session(LAYOUT, 1 << 20)
        for number in range(2000, 2006):
            life.worker.commit(session, number)
        with AdminClient.connect(evicting.socket, evicting.broker) as admin:
            counters = admin.get_status().counters
            assert counters["packs_evicted_room"] >= 5
            assert [check for check in admin.audit() if not check.ok] == []
            # An operator can make room there too.
            client.close_session(session)
            assert all(item.code == 0 for item in admin.evict([pack.pack_id for pack in admin.list_packs()]))
        life.live(1)
        life.read(1)
