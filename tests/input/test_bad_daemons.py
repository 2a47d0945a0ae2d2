"""What kvstored refuses at its start: one line, the right status, and nothing created."""

import contextlib
import shutil
import socket
import sqlite3
import subprocess
from pathlib import Path

import pytest

from kvstore_service.client.private import PrivateDaemon
from kvstore_service.daemon.config import ConfigError, load

from .terminal import kvstored, nothing_left, run

Done = subprocess.CompletedProcess[str]


def start(home: Path, *flags: str) -> Done:
    """Ends at once, because something in `flags` is wrong."""
    sockets = [f"--socket={home}/s/store.sock", f"--broker={home}/s/broker.sock"]
    return run(kvstored("--dram-bytes=16MiB", "--metrics-addr=off", *sockets, *flags), home)


def refused(done: Done, status: int, *words: str) -> None:
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvstored: ")
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("mount", "words"),
    [
        ("-t ramfs ramfs", ["no O_DIRECT", "ext4 or xfs"]),
        ("-t tmpfs -o size=64k tmpfs", ["No space left", "free at least 1MiB"]),
        ("-t tmpfs -o ro tmpfs", ["Read-only file system", "another directory"]),
    ],
    ids=["without-o-direct", "full", "read-only"],
)
def test_a_file_system_that_cannot_keep_packs(home: Path, tmp_path: Path, mount: str, words: list[str]) -> None:
    """Real file systems, mounted for this command alone."""
    disk = tmp_path / "disk"
    disk.mkdir()
    alone = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None or run([*alone, f"mount {mount} {disk}"], home).returncode:
        pytest.skip("needs user namespaces, to mount a file system")
    command = kvstored(f"--data-dir={disk}/new/data", f"--socket={home}/store.sock", f"--broker={home}/broker.sock")
    script = f'mount {mount} {disk}; "$@"; status=$?; ls -A {disk} >&2; exit $status'
    with nothing_left(home):
        done = run([*alone, script, "sh", *command, "--dram-bytes=16MiB", "--metrics-addr=off"], home)
    refused(done, 1, f"data_dir={disk}/new/data", *words)


def test_a_data_directory_that_cannot_be_one(home: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in ("/proc/none/data", f"{tmp_path}/file", f"{tmp_path}/file/data"):
        with nothing_left(home, "s"):
            refused(start(home, f"--data-dir={path}"), 1, f"data_dir={path}", "set")


def test_more_dram_than_the_machine_has() -> None:
    with pytest.raises(ConfigError, match=r"dram_bytes='900TiB' .*900TiB is more than this machine's memory of \d+.*B"):
        load(["--dram-bytes=900TiB"], {})


def test_a_metrics_port_that_is_taken(home: Path) -> None:
    with nothing_left(home, "s", "data"), contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = start(home, f"--data-dir={home}/data", f"--metrics-addr={address}")
        refused(done, 1, f"metrics_addr={address}", "in use", "another port, or off")
        assert list((home / "s").iterdir()) == []


def test_a_socket_where_no_socket_can_be(home: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    taken = f"--socket={tmp_path}/file"
    with nothing_left(home, "s"):
        refused(start(home, f"--data-dir={home}/data", taken), 1, f"{tmp_path}/file", "no socket", "remove it")
        refused(start(home, f"--data-dir={home}/data", "--socket=/proc/none/s"), 1, "socket=/proc/none/s", "choose")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_data_directory_of_a_newer_version(home: Path) -> None:
    with PrivateDaemon(home / "data", "16MiB"):
        pass
    with contextlib.closing(sqlite3.connect(home / "data" / "catalog.sqlite")) as catalog, catalog:
        catalog.execute("UPDATE meta SET value = '99' WHERE key = 'version'")
    with nothing_left(home, "s", "data"):
        refused(start(home, f"--data-dir={home}/data"), 1, f"{home}/data", "newer kvstored", "version 99", "another")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"dram_byte: 1GiB", ["dram_byte", "did you mean dram_bytes?"]),
        (b"frobnicate: 1", ["frobnicate", "see --help"]),
        (b"dram_bytes: 8 parsecs", ["8 parsecs", "GiB"]),
        (b"dram_bytes: [1]", ["dram_bytes=[1]", "at least 4MiB"]),
        (b"dram_bytes: true", ["dram_bytes=True", "at least 4MiB"]),
        (b"dram_bytes:", ["dram_bytes has no value"]),
        (b"slots_max: \xc2\xb2", ["slots_max", "whole number"]),
        (b"allow_uids: [-1]", ["allow_uids", "user ids"]),
        (b"- dram_bytes", ["not a mapping"]),
        (b"dram_bytes: [1, ", ["line 1"]),
        (b"\x80\x81", ["not text"]),
        (b"nvme_bytes: 9223372036854775808", ["nvme_bytes", "less than 8388608TiB"]),
        (b'data_dir: "a\\0b"', ["data_dir", "without NUL"]),
        (b"data_dir: " + b"[" * 1200, ["nested too deeply", "key: value"]),
    ],
)
def test_a_bad_line_of_the_file(tmp_path: Path, content: bytes, words: list[str]) -> None:
    file = tmp_path / "kvstored.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        load([f"--config={file}"], {})
    assert "\n" not in str(raised.value)
    assert all(word in str(raised.value) for word in [str(file), *words]), raised.value


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dram-bytes"], ["--dram-bytes", "expected one argument"]),
        (["--xyzzy=1"], ["--xyzzy", "see --help"]),
        (["serve"], ["unknown word serve"]),
        (["--config=/none.yaml"], ["/none.yaml", "No such file"]),
    ],
)
def test_a_bad_flag(arguments: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        load(arguments, {})
    assert all(word in str(raised.value) for word in words), raised.value
