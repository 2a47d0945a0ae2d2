"""The fd broker: who gets in, what descriptors can do, and that a connection's end is its worker's end."""

import contextlib
import ctypes
import fcntl
import json
import logging
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore_service._proto import store_service_pb2 as pb
from kvstore_service.client import RingGeometry, StoreClient, StoreError, WorkerMemory
from kvstore_service.client.connection import BrokerConnection
from kvstore_service.daemon.front.broker import (
    HELLO_S,
    TRANSFER_BYTES_MAX,
    TRANSFERS_MAX,
    USER_CONNECTIONS_MAX,
    USER_TRANSFER_BYTES_MAX,
    Broker,
)
from kvstore_service.daemon.front.socket_path import SocketPath
from kvstore_service.daemon.logs import SPARSE_LINES
from kvstore_service.daemon.store.registry import Limits, Registry, Worker
from kvstore_service.shared import memory, settings, wire
from tests.support.daemon_process import Daemon

KEEP_SIZE = 0x1
OTHER_UID = 1001
SLOW_RELEASES = 8
_libc = ctypes.CDLL(None, use_errno=True)


class Desk:
    """A broker without the rest of the daemon."""

    def __init__(self, path: Path, allow_uids: frozenset[int], group: int | None = None) -> None:
        self.path = str(path)
        self.released: list[Worker] = []
        self.left = threading.Event()
        self.slow_uid = -1  # whose releases take until `resume`
        self.resume = threading.Event()
        self.sessions = Registry(Limits(8, 8, 8, 8, 1 << 30, 1 << 30, workers=128, user_workers=128))
        self.broker = Broker(path, allow_uids, frozenset(), group, self.sessions.add_worker, self._release)
        self.broker.start()

    def _release(self, worker: Worker) -> None:
        if worker.uid == self.slow_uid:
            assert self.resume.wait(30)
        self.sessions.remove_worker(worker)
        self.released.append(worker)
        self.left.set()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path / "broker.sock", frozenset({os.getuid()}))
    yield desk
    desk.broker.close()


def knock(path: str) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.settimeout(10.0)
    peer.connect(path)
    return peer


def say(peer: socket.socket, message: object, fds: list[int] | None = None) -> dict[str, object]:
    socket.send_fds(peer, [json.dumps(message).encode()], fds or [])
    return json.loads(peer.recv(4096))  # type: ignore[no-any-return]


def test_hello_hands_out_a_token_of_256_bits(desk: Desk) -> None:
    tokens = {BrokerConnection(desk.path, "a", 10.0).token for _ in range(3)}
    assert len(tokens) == 3
    assert all(len(bytes.fromhex(token)) == 32 for token in tokens)


def test_another_user_is_refused_before_a_byte_is_read(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "broker.sock", frozenset({os.getuid() + 12345}))
    with contextlib.closing(knock(desk.path)) as peer:
        assert "allow_uids" in json.loads(peer.recv(4096))["error"]
        assert peer.recv(4096) == b""
    with pytest.raises(StoreError, match=r"PERMISSION_DENIED.*allow_uids"):
        BrokerConnection(desk.path, "a", 10.0)
    desk.broker.close()


def test_a_strangers_directory_below_the_temporary_one_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has no home looks for the daemon below a name that anybody can take first."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    stranger = settings.home()
    stranger.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(stranger / "broker.sock"))
        listening.listen()
        listening.settimeout(0)
        with pytest.raises(StoreError, match=f"{stranger} belongs to uid {os.geteuid()}: remove it") as refused:
            BrokerConnection(str(stranger / "broker.sock"), "w", 5)
        assert refused.value.code == "PERMISSION_DENIED"
        with pytest.raises(BlockingIOError):
            listening.accept()


def test_a_strangers_link_to_ones_own_directory_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leads elsewhere the next time."""
    me = os.geteuid()
    other, target = (0, Path("/")) if me else (1, tmp_path / "own")
    if me == 0:
        target.mkdir()
        os.chown(target, other, other)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr(os, "getuid", lambda: other)
    settings.home().symlink_to(target)
    with pytest.raises(StoreError, match=f"{settings.home()} belongs to uid {me}"):
        BrokerConnection(str(settings.home() / "broker.sock"), "w", 5)


def test_refused_peers_do_not_fill_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(tmp_path / "broker.sock", frozenset({os.getuid() + 12345}))
    with caplog.at_level(logging.WARNING, "kvstored.broker"):
        for _ in range(10 * SPARSE_LINES):
            with contextlib.closing(knock(desk.path)) as peer:
                assert "allow_uids" in json.loads(peer.recv(4096))["error"]
        desk.broker.close()
    assert 0 < len(caplog.records) <= 3 * (SPARSE_LINES + 1)  # in three periods
    assert vars(caplog.records[0])["fields"]["uid"] == os.getuid()


def test_strangers_share_one_thread_however_many_they_are(tmp_path: Path) -> None:
    """Whoever has a range of user ids of their own (newuidmap) keeps the group under each of them."""
    if os.getuid() != 0:
        pytest.skip("needs root, to become others")
    program = (
        "import os, socket\n"
        "for uid in range(5000, 5020):\n"
        "    if os.fork() == 0:\n"
        "        os.setgroups([4243]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)\n"
        "        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "        peer.settimeout(20); peer.connect('broker.sock')\n"
        "        os._exit(0 if b'allow_uids' in peer.recv(4096) else 1)\n"
        "    assert os.wait()[1] == 0\n"
    )
    tmp_path.chmod(0o755)
    desk = Desk(tmp_path / "broker.sock", frozenset({0}), 4243)
    before = sum(thread.name == "closer" for thread in threading.enumerate())
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, timeout=60, check=True)
    assert sum(thread.name == "closer" for thread in threading.enumerate()) == before + 1
    desk.broker.close()


def test_the_socket_is_open_to_its_group_alone(desk: Desk, tmp_path: Path) -> None:
    assert os.stat(desk.path).st_mode & 0o777 == 0o600
    grouped = Desk(tmp_path / "grouped.sock", frozenset({os.getuid()}), os.getegid())
    held = os.stat(grouped.path)
    assert (held.st_mode & 0o777, held.st_gid) == (0o660, os.getegid())
    grouped.broker.close()


def test_a_silent_peer_is_dropped(desk: Desk) -> None:
    with contextlib.closing(knock(desk.path)) as peer:
        started_s = time.monotonic()
        assert peer.recv(4096) == b""
        assert time.monotonic() - started_s < HELLO_S + 2.0


@pytest.mark.parametrize("message", [{"verb": "take", "transfer": "x"}, [1], "hello", {}])
def test_nothing_comes_before_hello(desk: Desk, message: object) -> None:
    with contextlib.closing(knock(desk.path)) as peer:
        assert "error" in say(peer, message)
        assert peer.recv(4096) == b""


@pytest.mark.parametrize("fails", ["_refusal", "_answer"])
def test_what_goes_wrong_with_one_peer_leaves_the_broker_serving(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    def fail(*_: object) -> bool:
        monkeypatch.undo()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(desk.broker, fails, fail)
    unlucky = knock(desk.path)
    with contextlib.suppress(ConnectionError):
        unlucky.send(b"{}")
        assert unlucky.recv(4096) == b""
    assert "can't start new thread" in caplog.text
    with knock(desk.path) as peer:
        assert "token" in say(peer, {"verb": "hello"})
    unlucky.close()


def test_the_end_of_a_connection_releases_its_worker_once(desk: Desk) -> None:
    BrokerConnection(desk.path, "short", 10.0).close()
    assert desk.left.wait(5.0)
    assert [worker.name for worker in desk.released] == ["short"]


def test_a_forked_child_does_not_keep_a_dead_worker_alive(desk: Desk) -> None:
    script = (
        "import os, sys, time\n"
        "from kvstore_service.client.connection import BrokerConnection\n"
        "connection = BrokerConnection(sys.argv[1], 'parent', 10.0)\n"
        "if os.fork() == 0: time.sleep(5); os._exit(0)\n"
        "os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", script, desk.path], timeout=20, check=True)
    assert desk.left.wait(2.0)
    assert [worker.name for worker in desk.released] == ["parent"]


def test_a_transfer_is_taken_once_and_only_by_its_worker(desk: Desk) -> None:
    owner, thief = BrokerConnection(desk.path, "owner", 10.0), BrokerConnection(desk.path, "thief", 10.0)
    transfer = desk.broker.give(owner.token, [memory.of_bytes("test", b"secret")])
    with pytest.raises(StoreError, match="NOT_FOUND"):
        thief.take(transfer)
    (fd,) = owner.take(transfer)
    with memory.Owned(fd):
        assert memory.read(fd) == b"secret"
    with pytest.raises(StoreError, match="NOT_FOUND"):
        owner.take(transfer)


def test_only_constant_memory_can_be_offered(desk: Desk) -> None:
    with contextlib.closing(knock(desk.path)) as peer:
        token = str(say(peer, {"verb": "hello"})["token"])
        with memory.Owned(memory.create("changeable", 4096)) as changeable, open("/dev/null") as other:
            assert "sealed" in str(say(peer, {"verb": "offer"}, [changeable.fd])["error"])
            assert "sealed" in str(say(peer, {"verb": "offer"}, [other.fileno()])["error"])
            assert "sealed" in str(say(peer, {"verb": "offer"})["error"])
        with memory.Owned(memory.of_bytes("constant", b"index")) as constant:
            transfer = str(say(peer, {"verb": "offer"}, [constant.fd])["transfer"])
        with memory.Owned(desk.broker.receive(token, transfer)) as received:
            assert memory.read(received.fd) == b"index"


def test_transfers_are_bounded_and_closed_with_the_connection(desk: Desk) -> None:
    connection = BrokerConnection(desk.path, "hoarder", 10.0)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(TRANSFERS_MAX):
        desk.broker.give(connection.token, [memory.of_bytes("test", b"x")])
    with pytest.raises(StoreError, match="RESOURCE_EXHAUSTED"):
        desk.broker.give(connection.token, [memory.of_bytes("test", b"x")])
    with pytest.raises(StoreError, match="RESOURCE_EXHAUSTED"):
        connection.offer("test", b"x")
    connection.close()
    assert desk.left.wait(5.0)
    assert len(os.listdir("/proc/self/fd")) <= before


def offer_bytes(peer: socket.socket, size_bytes: int, beyond_bytes: int = 0) -> dict[str, object]:
    """Offers memory of that size, with pages beyond its end."""
    fd = os.memfd_create("large", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with memory.Owned(fd):
        os.ftruncate(fd, size_bytes)
        if beyond_bytes:
            assert _libc.fallocate(fd, KEEP_SIZE, ctypes.c_long(size_bytes), ctypes.c_long(beyond_bytes)) == 0
        memory.add_seals(fd, memory.CONSTANT)
        return say(peer, {"verb": "offer"}, [fd])


def test_memory_that_is_offered_counts_until_it_is_received(desk: Desk) -> None:
    """Its owner may have closed it: then it is nobody's but the broker's."""
    with contextlib.ExitStack() as stack:
        first, second, third = (stack.enter_context(contextlib.closing(knock(desk.path))) for _ in range(3))
        token = str(say(first, {"verb": "hello"})["token"])
        for other in (second, third):
            say(other, {"verb": "hello"})
        held = str(offer_bytes(first, TRANSFER_BYTES_MAX)["transfer"])
        assert "bytes of transfers" in str(offer_bytes(first, 1)["error"])
        assert "transfer" in offer_bytes(second, USER_TRANSFER_BYTES_MAX - TRANSFER_BYTES_MAX)
        refused = offer_bytes(third, 1)
        assert refused["code"] == "RESOURCE_EXHAUSTED"
        assert f"bytes of user id {os.getuid()}" in str(refused["error"])
        os.close(desk.broker.receive(token, held))
        assert "transfer" in offer_bytes(third, 1)
        # Pages that a file has beyond its end are memory too.
        assert "transfer" in offer_bytes(first, TRANSFER_BYTES_MAX - (1 << 20))
        assert "bytes of transfers" in str(offer_bytes(first, 0, beyond_bytes=2 << 20)["error"])


def test_a_dead_daemons_socket_is_removed_and_other_files_are_not(tmp_path: Path) -> None:
    stale = tmp_path / "stale.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(stale))
        dead.listen()
        with pytest.raises(StoreError, match="another daemon"):
            SocketPath(stale)
    SocketPath(stale).close()
    assert not list(tmp_path.iterdir())
    plain = tmp_path / "notes.txt"
    plain.write_text("mine")
    with pytest.raises(StoreError, match="no socket"):
        SocketPath(plain)
    assert plain.read_text() == "mine"


@pytest.fixture
def shared(client: StoreClient) -> Iterator[WorkerMemory]:
    shared = client.register_worker(1, 1 << 16, 1 << 16, [RingGeometry(8, 8, 64)])
    yield shared
    shared.close()


def test_shared_memory_can_neither_shrink_nor_grow_nor_be_sealed_further(
    client: StoreClient, shared: WorkerMemory
) -> None:
    client.serve_rings()
    for fd in (shared.window_fd, shared.staging_fd, *shared.rings[0]):
        assert memory.seals_of(fd) & memory.FIXED_SIZE == memory.FIXED_SIZE
        for size_bytes in (0, 1 << 30):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size_bytes)
        with pytest.raises(PermissionError):
            memory.add_seals(fd, memory.F_SEAL_WRITE)


def test_completions_cannot_be_written_by_a_worker(shared: WorkerMemory) -> None:
    _, completions = shared.rings[0]
    size_bytes = os.fstat(completions).st_size
    reopened = os.open(f"/proc/self/fd/{completions}", os.O_RDWR)
    for fd in (completions, reopened):
        with pytest.raises(PermissionError):
            mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, memory.F_ADD_SEALS, memory.F_SEAL_WRITE)
        mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ).close()
    os.close(reopened)


def test_a_connection_that_ends_frees_its_descriptors(daemon: Daemon) -> None:
    with StoreClient.connect(daemon.socket, daemon.broker, "first") as first:
        first.lookup_prefix(b"f" * 32, [])
        before = daemon.open_descriptors()
        with StoreClient.connect(daemon.socket, daemon.broker, "second") as second:
            second.register_worker(1, 1 << 16, 1 << 16, [RingGeometry(8, 8, 64)] * 4).close()
            assert daemon.open_descriptors() > before
        deadline = time.monotonic() + 2.0
        while daemon.open_descriptors() > before and time.monotonic() < deadline:
            time.sleep(0.02)
        assert daemon.open_descriptors() <= before


def test_memory_that_was_registered_and_not_taken_goes_with_the_next_registration(daemon: Daemon) -> None:
    """Each waited a minute, 64 of a connection, and nobody counted them."""
    with StoreClient.connect(daemon.socket, daemon.broker, "heedless") as client:
        rings = [wire.geometry_to(RingGeometry(8, 8, 64))] * 8
        request = pb.RegisterWorkerRequest(slots=1, window_bytes=4096, staging_bytes=4096, rings=rings)
        before = daemon.open_descriptors()
        for _ in range(8):
            client._call(client._stub.RegisterWorker, request, 10.0)
            client.unregister_worker("not taken")
        assert daemon.open_descriptors() <= before + 2


def test_who_registers_again_and_again_does_not_fill_the_log(daemon: Daemon) -> None:
    with StoreClient.connect(daemon.socket, daemon.broker, "restless") as client:
        for _ in range(2 * SPARSE_LINES):
            client.register_worker(1, 4096, 4096, [RingGeometry(8, 8, 64)]).close()
            client.unregister_worker("x" * 512)
    for said in ("worker registered", "worker unregistered"):
        assert 0 < daemon.log_path.read_text().count(said) < 2 * SPARSE_LINES


def test_descriptors_are_sent_to_no_peer_that_has_not_read_the_last_ones(desk: Desk) -> None:
    """The kernel counts those on their way as the sender's; beyond its bound nobody gets any more."""
    with contextlib.ExitStack() as stack:
        for _ in range(USER_CONNECTIONS_MAX):
            peer = stack.enter_context(contextlib.closing(knock(desk.path)))
            token = str(say(peer, {"verb": "hello"})["token"])
            transfer = desk.broker.give(token, [memory.of_bytes("test", b"x")])
            for _ in range(2):
                peer.send(json.dumps({"verb": "take", "transfer": transfer}).encode())
            desk.left.wait(10)
            desk.left.clear()
            with pytest.raises(StoreError, match="connection has ended"):
                desk.broker.give(token, [memory.of_bytes("test", b"x")])
        with contextlib.closing(knock(desk.path)) as next_one:  # those that have ended count until they are read
            assert f"{USER_CONNECTIONS_MAX} connections" in json.loads(next_one.recv(4096))["error"]
    deadline = time.monotonic() + 10.0
    answer: dict[str, object] = {}
    while "token" not in answer:
        assert time.monotonic() < deadline, answer
        with contextlib.closing(knock(desk.path)) as next_one, contextlib.suppress(OSError, ValueError):
            answer = say(next_one, {"verb": "hello"})


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to connect as another user")
def test_releases_of_one_user_wait_for_no_others(tmp_path: Path) -> None:
    """A worker's release waits for its call under way, which may wait for a disk."""
    desk = Desk(tmp_path / "broker.sock", frozenset({0, OTHER_UID}))
    desk.slow_uid = 0
    try:
        for _ in range(SLOW_RELEASES):
            BrokerConnection(desk.path, "slow", 10.0).close()
        child = os.fork()
        if child == 0:
            try:
                os.setresuid(0, OTHER_UID, 0)  # what the peer is told is the effective one
                ctypes.CDLL(None).setfsuid(0)  # and the path's directories are root's
                BrokerConnection(desk.path, "quick", 10.0).close()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert desk.left.wait(20)
        assert [worker.uid for worker in desk.released] == [OTHER_UID]
    finally:
        desk.resume.set()
        desk.broker.close()
