"""`headgate generate` over the node's daemon when that is killed, stopped or draining: one line in time."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore_service.client import AdminClient
from kvstore_service.client.private import PrivateDaemon

from .conftest import StartTerminal
from .terminal import CTRL_C, Terminal, headgate

WAIT_MS = 1500
# wait_ms, the second that is promised beyond it, and what a loaded machine and the interpreter's end take.
END_S = WAIT_MS / 1000 + 1 + 2
Generation = Callable[..., Terminal]


@pytest.fixture
def node(home: Path) -> Iterator[PrivateDaemon]:
    """The node's daemon; a stopped one goes on for its end."""
    with PrivateDaemon(home / "node", "16MiB", options=("--nvme-bytes=1GiB",)) as daemon:
        pid = daemon.pid
        yield daemon
        if daemon.process is not None:
            os.kill(pid, signal.SIGCONT)


@pytest.fixture
def generation(terminal: StartTerminal, node: PrivateDaemon, checkpoint: Path, prompt: Path) -> Generation:
    """Starts a long generation over the node's daemon, and returns when it has shown some words."""

    def start(shown: str = " w") -> Terminal:
        command = headgate(
            "generate", f"--model={checkpoint}", f"--prompt-file={prompt}", "--context=4096", "--new-tokens=3400",
            f"--socket={node.socket}", f"--broker={node.broker}", f"--wait-ms={WAIT_MS}",
        )  # fmt: skip
        started = terminal(command)
        if shown:
            started.wait_for(shown)
        return started

    return start


def ends_with_one_line(running: Terminal, since_s: float, *words: str) -> None:
    assert running.end(30.0) == 1, running.text
    took_s = time.monotonic() - since_s
    print(f"{took_s:.2f} s: {running.last_line}")
    assert took_s < END_S
    assert running.last_line.startswith("headgate: the daemon at "), running.text
    assert all(word in running.last_line for word in words), running.last_line
    assert running.text.count("headgate: ") == 1
    assert "Traceback" not in running.text


@pytest.mark.timeout(120)
def test_a_daemon_that_is_killed(node: PrivateDaemon, generation: Generation) -> None:
    running = generation()
    since_s = time.monotonic()
    node.kill()
    ends_with_one_line(running, since_s, node.socket, "has ended", "start it again")


@pytest.mark.timeout(120)
def test_a_daemon_that_is_stopped(node: PrivateDaemon, generation: Generation) -> None:
    running = generation()
    since_s = time.monotonic()
    os.kill(node.pid, signal.SIGSTOP)
    ends_with_one_line(running, since_s, node.socket, f"has not answered for {WAIT_MS} ms", "--wait-ms")


@pytest.mark.timeout(120)
def test_a_daemon_that_is_stopped_before_the_command_starts(node: PrivateDaemon, generation: Generation) -> None:
    os.kill(node.pid, signal.SIGSTOP)
    running = generation(shown="")
    assert running.end(60.0) == 1, running.text
    assert f"the daemon at {node.socket} has not answered for {WAIT_MS} ms" in running.last_line


@pytest.mark.timeout(120)
def test_a_daemon_that_drains_before_the_command_starts(node: PrivateDaemon, generation: Generation) -> None:
    with AdminClient.connect(node.socket, node.broker) as admin:
        admin.drain()
        running = generation(shown="")
        assert running.end(60.0) == 1, running.text
    assert "draining" in running.last_line, running.last_line
    assert running.text.count("headgate: ") == 1


@pytest.mark.timeout(120)
def test_ctrl_c_while_the_daemon_is_stopped(node: PrivateDaemon, generation: Generation) -> None:
    running = generation()
    os.kill(node.pid, signal.SIGSTOP)
    time.sleep(0.2)
    since_s = time.monotonic()
    running.press(CTRL_C)
    assert running.end(30.0) == 130, running.text
    took_s = time.monotonic() - since_s
    print(f"{took_s:.2f} s")
    assert took_s < 1 + 2
    assert running.last_line == "headgate: interrupted"
