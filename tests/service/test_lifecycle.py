"""Start, drain and end of the daemon's process; kvctl; no client ever hangs."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvstore_service.client import AdminClient, KindSpec, Layout, StoreClient, StoreError
from kvstore_service.daemon.config import Config, load
from kvstore_service.daemon.server import Daemon as Running
from kvstore_service.kvctl.output import Output
from tests.service.test_administration import ROOT
from tests.support.daemon_process import Daemon

LAYOUT = Layout(b"f" * 32, 2, (KindSpec(2, 64, 2, 256),))


def kvctl(daemon: Daemon, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "kvstore_service.kvctl", "--socket", daemon.socket, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_sigterm_ends_cleanly_and_removes_the_sockets(daemon: Daemon) -> None:
    assert os.path.exists(daemon.socket)
    started_s = time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - started_s < 5.0
    assert not os.path.exists(daemon.socket)
    assert not os.path.exists(daemon.broker)


def test_sigterm_waits_for_open_sessions_and_refuses_new_ones(daemon: Daemon) -> None:
    process = daemon.process
    assert process is not None
    with StoreClient.connect(daemon.socket, daemon.broker) as client:
        session = client.open_session(LAYOUT, 1024)
        process.send_signal(signal.SIGTERM)
        refused = None
        for _ in range(100):
            try:
                client.close_session(client.open_session(LAYOUT, 1024))
            except StoreError as error:
                refused = error
                break
        assert refused is not None
        assert refused.code == "UNAVAILABLE"
        assert refused.retry_after_s
        client.close_session(session)
        assert process.wait(10) == 0


def test_a_supervisor_that_does_not_listen_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor cuts the draining short."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as full:
        full.bind(str(tmp_path / "notify"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
            other.setblocking(False)
            other.connect(str(tmp_path / "notify"))
            with contextlib.suppress(BlockingIOError):
                while True:
                    other.send(b"x")
        for address in (tmp_path / "notify", tmp_path / "none"):
            monkeypatch.setenv("NOTIFY_SOCKET", str(address))
            with Daemon(tmp_path / address.name[::-1]) as daemon:
                assert daemon.stop() == 0
                assert daemon.log_path.read_text().count("NOTIFY_SOCKET does not answer") == 2


HANGING = """
import sys, threading
from kvstore_service.daemon import server
server.END_S = 0.5
server.Daemon.close = lambda self: threading.Event().wait(60)
sys.exit(server.main(sys.argv[1:]))
"""


def test_sigterm_ends_a_daemon_that_hangs(tmp_path: Path) -> None:
    where = [f"--data-dir={tmp_path}/data", f"--socket={tmp_path}/s", f"--broker={tmp_path}/b"]
    options = ["--dram-bytes=16MiB", "--metrics-addr=off", "--drain-s=0"]
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING, *where, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("kvstored ready")
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "did not end in order" in log


def test_sigterm_does_not_wait_for_ever(daemon: Daemon) -> None:
    with StoreClient.connect(daemon.socket, daemon.broker) as client:
        client.open_session(LAYOUT, 1024)
        started_s = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - started_s < 10.0


def test_drain_is_seen_in_status_and_by_workers_that_ask(daemon: Daemon, client: StoreClient) -> None:
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        assert admin.get_status().state == "serving"
        assert not client.draining
        admin.drain()
        assert admin.get_status().state == "draining"
    with pytest.raises(StoreError, match="UNAVAILABLE"):
        client.open_session(LAYOUT, 1024)
    assert client.draining


def test_sockets_that_a_crash_left_do_not_stop_the_next_start(daemon: Daemon) -> None:
    daemon.kill()
    assert os.path.exists(daemon.socket)
    assert os.path.exists(daemon.broker)
    daemon.start()
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        assert admin.get_status().state == "serving"


def kvstored(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [
        sys.executable,
        "-m",
        "kvstore_service.daemon.server",
        "--dram-bytes=16MiB",
        "--metrics-addr=off",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_second_daemon_on_the_same_directory_says_so(daemon: Daemon, tmp_path: Path) -> None:
    sockets = (f"--socket={tmp_path}/s", f"--broker={tmp_path}/b")
    second = kvstored(f"--data-dir={daemon.data_dir}", *sockets)
    assert second.returncode == 1
    assert f"in use by pid {daemon.ready['pid']}" in second.stderr
    assert second.stderr.count("\n") == 1


def test_a_second_daemon_on_the_same_socket_says_so(daemon: Daemon, tmp_path: Path) -> None:
    for taken in (f"--socket={daemon.socket}", f"--broker={daemon.broker}"):
        free = f"--broker={tmp_path}/b" if taken.startswith("--socket") else f"--socket={tmp_path}/s"
        second = kvstored(f"--data-dir={tmp_path}/other", taken, free)
        assert second.returncode == 1
        assert "another daemon" in second.stderr
        assert second.stderr.count("\n") == 1
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        assert admin.get_status().state == "serving"


def test_of_two_daemons_that_start_at_once_one_has_the_sockets(tmp_path: Path) -> None:
    """Neither the one that lost nor the one that has ended takes the other's sockets away."""

    def config(name: str, *options: str) -> Config:
        return load(
            (
                f"--data-dir={tmp_path}/{name}", f"--socket={tmp_path}/s", f"--broker={tmp_path}/b",
                "--metrics-addr=off", "--dram-bytes=16MiB", *options,
            ),
            {},
        )  # fmt: skip

    first = Running(config("first"))  # does not listen yet
    for other in (config("second"), config("second", f"--broker={tmp_path}/c")):
        with pytest.raises(StoreError, match="another daemon has"):
            Running(other)
    first.start()
    try:
        with AdminClient.connect(f"{tmp_path}/s", f"{tmp_path}/b") as admin:
            assert admin.get_status().state == "serving"
    finally:
        first.close()
    assert {path.name for path in tmp_path.iterdir()} == {"first"}


def test_a_daemon_dies_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import sys, time; from kvstore_service.client.private import PrivateDaemon; "
        f"d = PrivateDaemon({str(tmp_path)!r}, '16MiB').start(); print(d.ready['pid'], flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    deadline = time.monotonic() + 10.0
    while _state(pid) != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _state(pid) == "Z"


def _state(pid: int) -> str:
    """As ps shows it; Z if there is no such process any more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def test_a_start_that_fails_shows_why(tmp_path: Path) -> None:
    broken = Daemon(tmp_path, options=("--io-depth=0",))
    with pytest.raises(StoreError, match="io_depth"):
        broken.start()
    broken.close()


def test_a_client_without_a_daemon_fails_at_once(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"UNAVAILABLE.*no daemon answers"):
        StoreClient.connect(str(tmp_path / "none.sock"), str(tmp_path / "none-broker.sock"))


def test_a_client_of_a_stopped_daemon_ends_at_its_deadline(daemon: Daemon) -> None:
    os.kill(daemon.pid, signal.SIGSTOP)
    while _state(daemon.pid) != "T":
        time.sleep(0.01)
    started_s = time.monotonic()
    try:
        with pytest.raises(StoreError, match=r"DEADLINE_EXCEEDED"):
            StoreClient.connect(daemon.socket, daemon.broker, timeout_s=1.0)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert time.monotonic() - started_s < 5.0


def test_an_unclosed_client_does_not_hold_up_the_interpreters_end(daemon: Daemon) -> None:
    script = (
        "import sys; from kvstore_service.client import StoreClient; "
        "c = StoreClient.connect(sys.argv[1], sys.argv[2]); c.lookup_prefix(b'f' * 32, [])"
    )
    subprocess.run([sys.executable, "-c", script, daemon.socket, daemon.broker], timeout=20, check=True)


def test_many_clients_at_once(daemon: Daemon) -> None:
    failures: list[BaseException] = []

    def visit() -> None:
        try:
            with StoreClient.connect(daemon.socket, daemon.broker, timeout_s=20.0) as client:
                for _ in range(5):
                    client.close_session(client.open_session(LAYOUT, 1024))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=visit) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        assert admin.get_status().sessions == 0


def test_an_idle_daemon_uses_no_cpu(daemon: Daemon, client: StoreClient) -> None:
    def cpu_s() -> float:
        fields = Path(f"/proc/{daemon.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    client.lookup_prefix(b"f" * 32, [])
    before = cpu_s()
    time.sleep(2.0)
    assert cpu_s() - before < 0.2


def test_kvctl_shows_status_sessions_and_configuration(daemon: Daemon, client: StoreClient) -> None:
    session = client.open_session(LAYOUT, 1024)
    status = json.loads(kvctl(daemon, "--format=json", "status").stdout)
    assert (status["state"], status["workers"], status["sessions"]) == ("serving", 0, 1)
    assert status["counters"]["frames"] > 0
    assert [item["session_id"] for item in json.loads(kvctl(daemon, "--format=json", "sessions").stdout)] == [session]
    described = json.loads(kvctl(daemon, "--format=json", "describe", session).stdout)
    assert (described["declared_max"], described["packs"]) == (1024, [])
    rows = {row["key"]: row for row in json.loads(kvctl(daemon, "--format=json", "config").stdout)}
    assert rows["data_dir"]["value"] == str(daemon.data_dir)
    assert rows["dram_bytes"] == {"key": "dram_bytes", "value": "64MiB", "origin": "flag --dram-bytes"}
    for command in (["status"], ["sessions"], ["packs"], ["config"], ["describe", session], ["verify"]):
        shown = kvctl(daemon, *command)
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.strip()


def test_kvctl_shows_texts_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Names of peers and of paths are neither markup, nor the names of emojis, nor commands to a terminal."""
    Output(as_json=False).rows("workers", [{"name": ":skull:", "path": "/x/[red]a[/b]", "reasons": ["\x1b[31m\n"]}])
    shown = capsys.readouterr().out
    for text in (":skull:", "/x/[red]a[/b]", "\\x1b[31m\\n"):
        assert text in shown


def test_kvctl_fails_in_one_line(daemon: Daemon) -> None:
    unknown = kvctl(daemon, "describe", "nonsense")
    assert unknown.returncode == 1
    assert unknown.stderr.count("\n") == 1
    assert kvctl(daemon, "dance").returncode == 2
    daemon.stop()
    alone = kvctl(daemon, "status")
    assert alone.returncode == 1
    assert alone.stderr.startswith("kvctl: no daemon answers at")
    assert alone.stderr.count("\n") == 1


def test_a_stale_socket_of_another_kind_is_no_obstacle(daemon: Daemon) -> None:
    daemon.stop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as leftover:
        leftover.bind(daemon.socket)
    daemon.start()


def test_the_start_script_leaves_a_daemon_or_says_why_not(tmp_path: Path) -> None:
    variables = {
        "KVSTORE_DATA_DIR": str(tmp_path / "data"), "XDG_RUNTIME_DIR": str(tmp_path), "KVSTORE_METRICS_ADDR": "off",
        "KVSTORE_DRAM_BYTES": "64MiB", "KVSTORE_NVME_BYTES": "1GiB", "KVSTORED_LOG": str(tmp_path / "a log" / "log"),
    }  # fmt: skip
    environment = os.environ | variables

    def started(**more: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["scripts/start_daemon.sh"], capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment | more
        )

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        refused = started(KVSTORE_METRICS_ADDR=f"127.0.0.1:{taken.getsockname()[1]}")
    assert refused.returncode == 1
    assert "kvstored has ended; its log is" in refused.stderr
    assert "Address already in use" in refused.stderr
    done = started()
    assert done.returncode == 0, done.stderr
    try:
        again = started()
        assert (again.returncode, again.stderr) == (0, "kvstored is already running\n")
    finally:
        ready = (tmp_path / "a log" / "log").read_text().rpartition("pid=")[2].split()[0]
        os.kill(int(ready), signal.SIGTERM)
