"""Whoever closes a peer's descriptor last may wait for it as long as the peer likes: never the broker's thread."""

import json
import os
import resource
import select
import signal
import socket
import struct
from collections.abc import Sequence

import pytest

from kvstore_service.client import StoreClient
from kvstore_service.daemon.front.closers import Closers
from tests.support.daemon_process import Daemon

LINGER_S = 60
WAIT_S = 10.0


def lingering() -> tuple[socket.socket, socket.socket]:
    """A connection whose first end closes only when its second, which does not read, has taken all that was sent."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        peer, _ = listener.accept()
    sender.setblocking(False)
    try:
        while True:
            sender.send(bytes(1 << 16))
    except BlockingIOError:
        pass
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_S))
    return sender, peer


def offer(daemon: Daemon, messages: Sequence[dict[str, str]]) -> socket.socket:
    """Sends a lingering descriptor with each of the messages; the end that would let it close."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.connect(daemon.broker)
        sender, end = lingering()
        os.kill(daemon.pid, signal.SIGSTOP)  # it is to close the last one
        try:
            for message in messages:
                socket.send_fds(peer, [json.dumps(message).encode()], [sender.fileno()])
            sender.close()
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
    return end


@pytest.mark.parametrize("messages", [[{"verb": "offer"}], [{"verb": "hello"}], [{"verb": "x"}] * 3], ids=str)
def test_a_descriptor_that_closes_slowly_holds_nobody_up(daemon: Daemon, messages: list[dict[str, str]]) -> None:
    end = offer(daemon, messages)
    try:
        with StoreClient.connect(daemon.socket, daemon.broker, timeout_s=WAIT_S) as client:
            assert client is not None
    finally:
        end.close()


def test_a_descriptor_whose_close_fails_is_the_only_one_that_does() -> None:
    """A file system of the peer's own answers close as it likes; a number that is none stands for its descriptor."""
    closers = Closers()
    refused, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    reader, writer = os.pipe()
    try:
        closers.close(4711, [refused, writer])
        readable, _, _ = select.select([reader], [], [], WAIT_S)
        assert readable, "the descriptors behind it are never closed"
    finally:
        os.close(reader)
