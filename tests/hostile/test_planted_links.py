"""What others could put in the daemon's way in the file system: it follows no link, and harms no foreign file."""

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore_service.client import SidecarKey, StoreClient, StoreError
from tests.hostile.sanitized import ROOT
from tests.support.daemon_process import Daemon
from tests.support.world import LAYOUT, TestWorker

FOREIGN = b"somebody else's"


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[Path]:
    """A file that must come through unchanged."""
    path = tmp_path / "foreign"
    path.write_bytes(FOREIGN)
    path.chmod(0o640)
    yield path
    assert path.read_bytes() == FOREIGN
    assert path.stat().st_mode & 0o777 == 0o640


def refused_start(directory: Path, **paths: Path) -> str:
    """Starts a kvstored that must not start; returns its one line."""
    places = {
        "data_dir": directory / "data",
        "socket": directory / "store.sock",
        "broker": directory / "b.sock",
        **paths,
    }
    options = [f"--{name.replace('_', '-')}={path}" for name, path in places.items()]
    command = [
        sys.executable,
        "-m",
        "kvstore_service.daemon.server",
        "--dram-bytes=4MiB",
        "--nvme-bytes=1MiB",
        *options,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvstored: ")
    return line


@pytest.mark.parametrize("name", ["lock", "catalog.sqlite", "catalog.sqlite-wal"])
def test_a_link_in_the_data_directory(tmp_path: Path, foreign: Path, name: str) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / name).symlink_to(foreign)
    line = refused_start(tmp_path)
    assert f"{data / name} is a symbolic link" in line
    (data / name).unlink()
    (data / name).symlink_to(tmp_path / "not there yet")
    assert "symbolic link" in refused_start(tmp_path)
    assert not (tmp_path / "not there yet").exists()


@pytest.mark.parametrize("name", ["store.sock", "b.sock"])
def test_a_link_in_a_sockets_place(tmp_path: Path, foreign: Path, name: str) -> None:
    for target in (foreign, tmp_path / "not there yet"):
        (tmp_path / name).symlink_to(target)
        assert f"{tmp_path / name} exists and is no socket" in refused_start(tmp_path)
        (tmp_path / name).unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "another"))
        (tmp_path / name).symlink_to(tmp_path / "another")
        assert "is no socket" in refused_start(tmp_path)
    assert (tmp_path / "another").exists()


@pytest.mark.parametrize("mode", [0o777, 0o702])
@pytest.mark.parametrize("place", ["data", "data/packs", "data/sidecars", "run"])
def test_a_directory_that_others_can_write(tmp_path: Path, place: str, mode: int) -> None:
    directory = tmp_path / place
    directory.mkdir(parents=True)
    directory.chmod(mode)
    run = tmp_path / "run"
    line = refused_start(tmp_path, socket=run / "s.sock", broker=run / "b.sock")
    assert f"{directory} can be written by every user; chmod o-w it" in line


@pytest.mark.parametrize("place", ["data", "data/packs", "data/sidecars"])
def test_a_sticky_directory_is_not_good_enough_for_data(tmp_path: Path, place: str) -> None:
    """Whoever has put a catalogue there before the first start owns it, with the tenants' keys that come into it."""
    directory = tmp_path / place
    directory.mkdir(parents=True)
    directory.chmod(0o1777)
    assert f"{directory} can be written by every user; chmod o-w it" in refused_start(tmp_path)


def test_what_a_file_says_is_quoted_in_one_plain_line(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with open(tmp_path / "data" / "lock", "w") as lock:
        lock.write("1\x1b[2J\nall is well")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "in use by pid 1\\x1b[2J\\nall is well; stop it" in refused_start(tmp_path)


def test_a_directory_of_another_user(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to give a directory away")
    (tmp_path / "data").mkdir(mode=0o700)
    os.chown(tmp_path / "data", 4242, 4242)
    assert "belongs to user id 4242" in refused_start(tmp_path)


def test_links_beside_and_in_place_of_files(tmp_path: Path, foreign: Path) -> None:
    """What is not ours is neither followed nor touched; a link that took a pack's place is damage."""
    with Daemon(tmp_path) as daemon:
        with StoreClient.connect(daemon.socket, daemon.broker) as client:
            worker = TestWorker(client)
            session = client.open_session(LAYOUT, 1024)
            pack = worker.commit(session, 1)
            key = SidecarKey(pack.pack_id, pack.build, "hash")
            client.put_sidecar(key, b"index")
            worker.close()
        daemon.stop()
        for folder in ("packs", "sidecars"):
            (file,) = (daemon.data_dir / folder).iterdir()
            moved = file.rename(tmp_path / f"moved {folder}")
            file.symlink_to(moved)  # even where the content is right
            for name in ("planted.pack", "planted.sidecar", "planted.partial"):
                (daemon.data_dir / folder / name).symlink_to(foreign)
        daemon.start()
        assert len(list(daemon.data_dir.rglob("planted.*"))) == 6
        with StoreClient.connect(daemon.socket, daemon.broker) as client:
            with pytest.raises(StoreError, match=r"DATA_LOSS.*symbolic link"):
                client.get_sidecar(key)
            with pytest.raises(StoreError, match=r"DATA_LOSS.*symbolic link"):
                client.get_map(pack)
