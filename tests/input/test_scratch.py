"""Temporary directories: gone with their owner, and those of dead owners with the next one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore_service.client.private import PrivateDaemon
from kvstore_service.shared.scratch import Scratch
from kvstore_service.shared.types import StoreError

from .terminal import ROOT

HOLD = (
    "import sys; from pathlib import Path; from kvstore_service.shared.scratch import Scratch; "
    "s = Scratch('headgate-x', Path(sys.argv[1])); print(s.path, flush=True); sys.stdin.read()"
)


def holder(parent: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", HOLD, str(parent)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_only_directories_of_dead_owners_are_swept(tmp_path: Path) -> None:
    other = tmp_path / "headgate-x-of-mine"
    other.mkdir()
    with holder(tmp_path) as living, holder(tmp_path) as dying:
        assert living.stdout
        assert dying.stdout
        kept, abandoned = (Path(process.stdout.readline().strip()) for process in (living, dying) if process.stdout)
        (abandoned / "file").write_text("")
        dying.kill()
        dying.wait(10)
        assert abandoned.exists()
        ended: list[Path] = []
        with Scratch("headgate-x", tmp_path, ended.append) as scratch:
            assert ended == [abandoned]
            assert sorted(tmp_path.iterdir()) == sorted([kept, other, scratch.path])
            assert scratch.path.stat().st_mode & 0o777 == 0o700
        assert sorted(tmp_path.iterdir()) == sorted([kept, other])
        living.kill()


def test_a_private_daemon_serves_below_a_long_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with PrivateDaemon(tmp_path / "data") as daemon:
        assert Path(daemon.broker).is_socket()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "headgate-x-aaaaaaaa").symlink_to(target)
    Scratch("headgate-x", tmp_path).close()
    assert target.exists()


def test_what_another_user_left_is_not_touched(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to make a directory of another user")
    theirs = tmp_path / "headgate-x-aaaaaaaa"
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)
    Scratch("headgate-x", tmp_path).close()
    assert theirs.exists()


def test_a_parent_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"under {tmp_path}/none: No such file"):
        Scratch("headgate-x", tmp_path / "none")
