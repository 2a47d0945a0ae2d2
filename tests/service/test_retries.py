"""What the client does again, and what it must not: a mutation whose answer was lost is done once."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore_service.client import AdminClient, StoreClient, StoreError
from kvstore_service.daemon.front.replies import Replies
from tests.support.daemon_process import Daemon
from tests.support.world import LAYOUT


class Line:
    """A socket before the daemon's. Once `cut`, answers are lost, and the connection breaks when one came."""

    def __init__(self, path: Path, target: str) -> None:
        self.path = str(path)
        self.cuts = 0
        self.cut = threading.Event()
        self._target = target
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                far.connect(self._target)
                for pair in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if answers and self.cut.is_set() and len(data) > LOST_BYTES_MIN:
                    self.cut.clear()
                    self.cuts += 1
                    break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


LOST_BYTES_MIN = 40  # frames of HTTP/2 that only acknowledge are shorter than an answer


@pytest.fixture
def line(daemon: Daemon, tmp_path: Path) -> Iterator[Line]:
    line = Line(tmp_path / "line.sock", daemon.socket)
    yield line
    line.close()


def test_a_call_whose_answer_was_lost_is_repeated_and_done_once(daemon: Daemon, line: Line) -> None:
    with (
        StoreClient.connect(line.path, daemon.broker, "cut", 20.0) as client,
        AdminClient.connect(daemon.socket, daemon.broker) as admin,
    ):
        client.close_session(client.open_session(LAYOUT, 1024))
        line.cut.set()
        session = client.open_session(LAYOUT, 1024)
        assert line.cuts == 1
        assert [item.session_id for item in admin.list_sessions()] == [session]


def test_a_repeated_call_does_not_share_the_end_of_one_whose_peer_had_left() -> None:
    replies = Replies()
    begun, left = threading.Event(), threading.Event()

    def first() -> bytes:
        begun.set()
        left.wait(10.0)
        raise StoreError("CANCELLED", "nobody waits for this call any more")

    with ThreadPoolExecutor(2) as pool:
        given_up = pool.submit(replies.once, "caller", "method", "key", b"request", first, 10.0)
        assert begun.wait(10.0)
        repeated = pool.submit(replies.once, "caller", "method", "key", b"request", lambda: b"done", 10.0)
        left.set()
        assert repeated.result(10.0) == b"done"
        with pytest.raises(StoreError, match="CANCELLED"):
            given_up.result(10.0)


def test_a_call_to_a_daemon_that_is_gone_is_not_repeated(daemon: Daemon) -> None:
    with StoreClient.connect(daemon.socket, daemon.broker, "left", 60.0) as client:
        session = client.open_session(LAYOUT, 1024)
        assert not client.gone
        daemon.kill()
        started_s = time.monotonic()
        with pytest.raises(StoreError, match="UNAVAILABLE"):
            client.close_session(session)
        assert client.gone
        assert time.monotonic() - started_s < 10.0


def test_refusals_that_time_alone_does_not_cure_are_not_repeated(daemon: Daemon) -> None:
    with (
        StoreClient.connect(daemon.socket, daemon.broker, "refused", 60.0) as client,
        AdminClient.connect(daemon.socket, daemon.broker) as admin,
    ):
        admin.drain()
        with pytest.raises(StoreError) as raised:
            client.open_session(LAYOUT, 1024)
        assert (raised.value.code, raised.value.reason) == ("UNAVAILABLE", "DRAINING")
        assert client.rpc_count == 1


def test_an_answer_that_was_lost_is_taken_back_only_if_nobody_asked_again() -> None:
    replies, acted = Replies(), list[int]()

    def once() -> bytes:
        acted.append(len(acted))
        return str(acted[-1]).encode()

    def ask() -> bytes:
        return replies.once("caller", "method", "key", b"request", once, 10.0)

    assert ask() == b"0"
    assert replies.withdraw("caller", "method", "key")
    assert [ask(), ask()] == [b"1", b"1"]
    assert not replies.withdraw("caller", "method", "key")
    assert ask() == b"1"
