"""kvctl, kvstored and headgate where stdin or stdout are not what they should be, and words that are wrong."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from decode_worker import cli
from kvstore_service import kvctl
from kvstore_service._proto import admin_service_pb2 as admin_pb
from kvstore_service.client import AdminClient, StoreClient, StoreError
from kvstore_service.client.admin_client import STREAM_TIMEOUT_S
from tests.service.test_administration import ROOT, run
from tests.support.daemon_process import Daemon
from tests.support.world import TestWorker

KVCTL = [sys.executable, "-m", "kvstore_service.kvctl"]
KVSTORED = [sys.executable, "-m", "kvstore_service.daemon.server"]


def redirected(command: list[str], redirection: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """`command` with a redirection of the shell's."""
    shell = ["sh", "-c", f'exec "$@" {redirection}', "sh", *command]
    return subprocess.run(
        shell, capture_output=True, text=True, timeout=60, cwd=ROOT, env={"PYTHONPATH": str(ROOT), **variables}
    )


def test_a_full_stdout_is_named(daemon: Daemon) -> None:
    status = [*KVCTL, "--socket", daemon.socket, "status"]
    config = [*KVSTORED, "config", "print"]
    for command, unbuffered in ((status, ""), (status, "1"), ([*KVCTL, "completion", "bash"], ""), (config, "")):
        done = redirected(command, ">/dev/full", PYTHONUNBUFFERED=unbuffered)
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert "stdout: No space left on device" in line, line


def test_a_stdout_that_is_closed_or_that_nobody_reads(daemon: Daemon) -> None:
    status = [*KVCTL, "--socket", daemon.socket, "status"]
    closed = redirected(status, ">&-")
    assert (closed.returncode, closed.stderr) == (1, "kvctl: stdout is closed; give it a file, or /dev/null\n")
    unread = redirected(["bash", "-c", '"$@" | true; exit ${PIPESTATUS[0]}', "bash", *status], "")
    assert (unread.returncode, unread.stderr) == (1, "")


@pytest.fixture
def own_signals() -> Iterator[None]:
    """cli.main takes SIGINT and SIGTERM over."""
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    for number, handler in before:
        signal.signal(number, handler)


@pytest.mark.usefixtures("own_signals")
def test_headgate_names_a_full_stdout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "_generate", lambda arguments: print("text"))
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(["generate", "--prompt-file=x"]) == 1
    assert "headgate: stdout: No space left on device" in capsys.readouterr().err


def test_a_token_is_json_too_and_needs_no_stdin(daemon: Daemon) -> None:
    token = [*KVCTL, "--socket", daemon.socket, "token", "--format=json", "--timeout=2"]
    done = redirected(token, "<&-")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token"]) == 64


@pytest.mark.parametrize("command", ["token", "watch"])
def test_a_daemon_that_ends_ends_the_command(daemon: Daemon, command: str) -> None:
    """A token that nobody answers for any more is not left to be used."""
    waiting = subprocess.Popen(
        [*KVCTL, "--socket", daemon.socket, "--format=json", command],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    assert waiting.stdout is not None
    assert waiting.stderr is not None
    assert waiting.stdout.readline()
    daemon.kill()
    assert waiting.wait(timeout=30) == 1
    (line,) = waiting.stderr.read().splitlines()
    assert line.startswith(("kvctl: the daemon has ended", "kvctl: the connection to the daemon failed")), line


def test_a_worker_cannot_write_to_the_terminal_of_who_watches(
    daemon: Daemon, client: StoreClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Why a worker unregisters are its own words."""

    def of_a_worker(self: AdminClient, kinds: Sequence[str]) -> Iterator[admin_pb.WatchEventsResponse]:
        for event in watch(self, kinds):
            if event.kind == "watch":
                TestWorker(client)
                client.unregister_worker("\x1b[2J\nevict \u202e")
            yield event
            if "unregistered" in event.detail:
                return

    watch = AdminClient.watch
    monkeypatch.setattr(AdminClient, "watch", of_a_worker)
    assert kvctl.main(["--socket", daemon.socket, "watch", "worker"]) == 0
    told = capsys.readouterr().out
    assert told.endswith("unregistered: test, \\x1b[2J\\nevict \\u202e\n")
    assert told.count("\n") == 2


def test_a_watch_that_ends_though_nobody_asked_it_to_fails(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def expired(*_: object) -> None:
        raise StoreError("DEADLINE_EXCEEDED", "the call's deadline has passed")

    monkeypatch.setattr(AdminClient, "watch", expired)
    assert kvctl.main(["--socket", daemon.socket, "watch"]) == 1
    assert kvctl.main(["--socket", daemon.socket, "watch", "--timeout=5"]) == 0


def test_a_verification_has_the_time_that_a_large_store_takes() -> None:
    """8 TiB at the usual verify_bytes_per_s."""
    assert STREAM_TIMEOUT_S * (200 << 20) > 8 << 40


def test_a_daemon_that_is_stopped_is_said_to_be(daemon: Daemon) -> None:
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        done = run(daemon, "status", "--timeout=0.5")
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    expected = (
        f"kvctl: the daemon at {daemon.broker} has not answered for 0.5 s: it is stopped or overloaded; see its log\n"
    )
    assert (done.returncode, done.stderr) == (1, expected)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--bogus"], ["unknown flag --bogus; see --help"]),
        (["--sokcet=x"], ["unknown flag --sokcet; did you mean --socket?"]),
        (["status", "--bogus"], ["unknown flag --bogus; see --help"]),
        (["pin", "--tt=7d"], ["unknown flag --tt; did you mean --ttl?"]),
        (["describe", "\udcff"], ["'\\udcff' is not UTF-8"]),
        (["packs", "--tenant=me"], ["--tenant", "'me'; write uid-N"]),
        (["quota", "me"], ["UID", "'me'; write uid-N"]),
        (["quota", "4294967296"], ["uid-4294967296", "below 4294967296"]),
        (["status", "--timeout=0"], ["--timeout", "'0'", "above 0"]),
        (["status", "--timeout=1e300"], ["--timeout", "'1e300'", "from 0 to 86400"]),
        (["status", "--socket="], ["--socket", "write a path"]),
        (["status", "--socket=/" + "x" * 200], ["--socket", "at most 107 bytes"]),
        (["packs", f"--older-than={'9' * 400}d"], ["--older-than", "write an age"]),
        (["quota", "1", "99999999TiB"], ["SIZE", "'99999999TiB'", "less than 8388608TiB"]),
        (["quota", "1", f"--dram={'9' * 400}"], ["--dram", "less than 8388608TiB"]),
        (["status", "--tls=x"], ["--tcp and --tls belong together"]),
    ],
    ids=lambda value: " ".join(map(ascii, value)),
)
def test_wrong_words_are_named(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert kvctl.main(arguments) == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert shown.out == ""
    assert all(word in line for word in words), line
