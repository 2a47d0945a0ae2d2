"""Ray that does not start, dies on the way or is killed with its owner: one line, and nothing left in the end."""

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest
import ray

from decode_worker.actor import PORT_VARIABLE, RemoteWorker, local_ray
from decode_worker.config import WorkerConfig
from decode_worker.scheduler import Request
from kvstore_service.client.private import PrivateDaemon

from .conftest import StartTerminal
from .terminal import alive, headgate, nothing_left

DEMO = headgate("demo", "--long=none", "--context=1024", "--questions=100")


def test_a_taken_port_is_said_at_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(home))
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        monkeypatch.setenv(PORT_VARIABLE, port)
        said = f"{PORT_VARIABLE}={port}: Address already in use"
        with nothing_left(home), pytest.raises(RuntimeError, match=said), local_ray():
            pass


@pytest.mark.timeout(120)
def test_a_text_that_outlives_ray_starts_no_other(
    home: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(home))
    with PrivateDaemon(home / "data", "16MiB") as daemon:
        config = WorkerConfig(checkpoint, Path(daemon.socket), Path(daemon.broker), context=4096, profile="off")
        with local_ray():
            text = RemoteWorker(config).generate(Request([1, 2, 3], 4000))
            next(text)
        text.close()  # type: ignore[attr-defined]
        assert not ray.is_initialized()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("victim", "word"), [("ray::Worker", "decode worker died"), ("gcs_server", "gcs_server died")])
def test_a_process_of_ray_that_dies_ends_the_demo(home: Path, terminal: StartTerminal, victim: str, word: str) -> None:
    with nothing_left(home):
        demo = terminal(DEMO)
        demo.wait_for("questions, qsac")
        children = psutil.Process(demo.process.pid).children(recursive=True)
        (process,) = [child for child in children if named(child, victim)]
        process.kill()
        assert demo.end(30.0) == 1, demo.text
        assert demo.last_line.startswith("headgate: ")
        assert word in demo.last_line
        assert "Traceback" not in demo.text


@pytest.mark.timeout(120)
def test_a_killed_demo_is_cleaned_up_by_the_next_one_which_sigterm_ends(home: Path, terminal: StartTerminal) -> None:
    before = set(psutil.Process().children(recursive=True))
    with nothing_left(home):
        killed = terminal(DEMO)
        killed.wait_for("questions, qsac")
        os.kill(killed.process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 20.0
        while any("kvstore_service" in " ".join(command_of(process)) for process in alive(before)):
            assert time.monotonic() < deadline, "the private daemon outlives its owner"
            time.sleep(0.05)
        assert sorted(path.name.rsplit("-", 1)[0] for path in home.iterdir()) == [
            "headgate-data", "headgate-ray", "headgate-run"
        ]  # fmt: skip
        following = terminal(DEMO)
        following.wait_for("prefill")
        following.process.send_signal(signal.SIGTERM)
        following.process.send_signal(signal.SIGTERM)
        assert following.end(30.0) == 143, following.text
        assert following.last_line == "headgate: terminated"


def named(process: psutil.Process, name: str) -> bool:
    """By its command line: Ray's processes rename themselves there."""
    return any(name in word for word in command_of(process)[:1])


def command_of(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []
