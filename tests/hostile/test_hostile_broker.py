"""Peers of the broker that break its rules: each ends at most itself, and costs nothing afterwards."""

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from kvstore_service._proto import store_service_pb2 as pb
from kvstore_service._proto import store_service_pb2_grpc as pb_grpc
from kvstore_service.client import AdminClient, StoreError
from kvstore_service.client.connection import BrokerConnection
from kvstore_service.daemon.front.broker import HELLO_S, MESSAGE_BYTES_MAX, TRANSFERS_MAX, USER_CONNECTIONS_MAX
from kvstore_service.shared import memory
from tests.hostile.calls import token
from tests.hostile.sanitized import ROOT
from tests.hostile.victim import INDEX, Victim
from tests.service.test_broker import Desk, knock, say
from tests.support.daemon_process import Daemon

NESTED = b"[" * MESSAGE_BYTES_MAX
GARBAGE = [
    b"\xff" * 100, b"{", b'{"verb": "hel', b"[]", b"7", b'"hello"', b"null", b"\0" * MESSAGE_BYTES_MAX, NESTED,
    b'{"verb": ' + b"9" * 4000 + b"}", b'{"verb": ["hello"]}', b'{"verb": {"a": 1}, "transfer": []}',
    b'{"verb": "\\ud800", "transfer": "\\u0000"}', b'{"verb": "take", "transfer": "../../lock"}',
    b'{"verb": "take", "transfer": 1e999}', b'{"verb": "hello"}', b" " * MESSAGE_BYTES_MAX,
]  # fmt: skip


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path / "broker.sock", frozenset({os.getuid()}))
    yield desk
    desk.broker.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def serves(desk: Desk) -> bool:
    with contextlib.closing(BrokerConnection(desk.path, "honest", 10.0)) as honest:
        return len(honest.token) == 64


@pytest.mark.parametrize("text", GARBAGE, ids=lambda text: repr(text[:16]))
def test_garbage_ends_a_stranger_and_annoys_a_worker(desk: Desk, text: bytes) -> None:
    if text != b'{"verb": "hello"}':
        with contextlib.closing(knock(desk.path)) as stranger:
            stranger.send(text)
            assert "error" in json.loads(stranger.recv(65536))
            assert stranger.recv(65536) == b""
    with contextlib.closing(knock(desk.path)) as worker:
        own = say(worker, {"verb": "hello"})["token"]
        worker.send(text)
        answer = json.loads(worker.recv(65536))
        assert "error" in answer, answer  # a second hello too: a worker has one token
        with memory.Owned(memory.of_bytes("index", b"x")) as offered:
            assert "transfer" in say(worker, {"verb": "offer"}, [offered.fd])
        assert [other.token for other in desk.sessions.workers()] == [own]
    assert serves(desk)


def test_an_oversized_message_is_not_half_read(desk: Desk) -> None:
    with contextlib.closing(knock(desk.path)) as worker:
        say(worker, {"verb": "hello"})
        whole = json.dumps({"verb": "take", "transfer": "x"}).encode().ljust(MESSAGE_BYTES_MAX + 1)
        worker.send(whole)
        assert "at most" in json.loads(worker.recv(65536))["error"]
        worker.send(whole[:MESSAGE_BYTES_MAX])
        assert "no transfer" in json.loads(worker.recv(65536))["error"]
    assert serves(desk)


def test_names_are_plain_wherever_they_are_printed(daemon: Daemon) -> None:
    name = "\ud800\n2026 ERROR forged\x1b[2J\u202e" + "x" * 100
    with contextlib.closing(knock(daemon.broker)) as worker:
        issued = str(say(worker, {"verb": "hello", "name": name})["token"])
        with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
            store = pb_grpc.StoreServiceStub(channel)
            kind = pb.KindSpec(lanes=1, d=16, dtype=2, record_bytes=64)
            layout = pb.Layout(fingerprint=bytes(32), layers=1, kinds=[kind])
            request = pb.OpenSessionRequest(layout=layout, declared_max_tokens=256)
            session = store.OpenSession(request, timeout=5, metadata=token(issued)).session_id
        with AdminClient.connect(daemon.socket, daemon.broker) as admin:
            shown = admin.describe_session(session).session.worker_name
    assert shown.startswith("??2026?ERROR?forged??2J?xxx")
    assert len(shown) == 64


def test_too_many_connections(desk: Desk) -> None:
    before = descriptors()
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(contextlib.closing(knock(desk.path))) for _ in range(USER_CONNECTIONS_MAX)]
        one_more = stack.enter_context(contextlib.closing(knock(desk.path)))
        assert f"{USER_CONNECTIONS_MAX} connections" in json.loads(one_more.recv(4096))["error"]
        assert "token" in say(peers[0], {"verb": "hello"})
        # Silent peers are dropped in time, and make room.
        started_s = time.monotonic()
        assert peers[-1].recv(4096) == b""
        assert time.monotonic() - started_s < HELLO_S + 2.0
        until(lambda: serves(desk))
    until(lambda: descriptors() <= before)


def test_descriptors_of_strangers_and_in_wrong_numbers_are_closed(desk: Desk) -> None:
    before = descriptors()
    with memory.Owned(memory.of_bytes("flood", b"x")) as flood, contextlib.closing(knock(desk.path)) as worker:
        say(worker, {"verb": "hello"})
        for count in (2, 17, 253):
            assert "one memfd" in str(say(worker, {"verb": "offer"}, [flood.fd] * count)["error"])
            assert "error" in say(worker, {"verb": "take", "transfer": "x"}, [flood.fd] * count)
            assert "error" in say(worker, {"verb": "hello"}, [flood.fd] * count)
            with contextlib.closing(knock(desk.path)) as stranger:
                assert "hello first" in str(say(stranger, {"verb": "hello"}, [flood.fd] * count)["error"])
        for _ in range(TRANSFERS_MAX):
            assert "transfer" in say(worker, {"verb": "offer"}, [flood.fd])
        assert f"at most {TRANSFERS_MAX} may" in str(say(worker, {"verb": "offer"}, [flood.fd])["error"])
        until(lambda: descriptors() < before + TRANSFERS_MAX + 16)
    assert desk.left.wait(5.0)
    until(lambda: descriptors() <= before)


def test_transfers_belong_to_a_connection(desk: Desk) -> None:
    with contextlib.closing(knock(desk.path)) as owner, contextlib.closing(knock(desk.path)) as thief:
        tokens = [str(say(peer, {"verb": "hello"})["token"]) for peer in (owner, thief)]
        with memory.Owned(memory.of_bytes("index", b"x")) as offered:
            inbound = str(say(owner, {"verb": "offer"}, [offered.fd])["transfer"])
        outbound = desk.broker.give(tokens[0], [memory.of_bytes("index", b"x")])
        for transfer in (inbound, outbound):
            assert "no transfer" in str(say(thief, {"verb": "take", "transfer": transfer})["error"])
            with pytest.raises(StoreError, match="NOT_FOUND"):
                desk.broker.receive(tokens[1], transfer)
        # Not even by its owner in the wrong direction.
        assert "no transfer" in str(say(owner, {"verb": "take", "transfer": inbound})["error"])
        with pytest.raises(StoreError, match="NOT_FOUND"):
            desk.broker.receive(tokens[0], outbound)


def test_no_descriptor_is_left_for_a_peer(desk: Desk) -> None:
    """The broker goes on when the process has used up its descriptors, and lets peers in afterwards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.settimeout(10.0)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
        peer.connect(desk.path)
        time.sleep(0.2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with contextlib.closing(peer):
        assert "token" in say(peer, {"verb": "hello"})


def test_a_sidecars_descriptor_is_judged_before_it_is_read(daemon: Daemon, victim: Victim) -> None:
    """Wrong sizes, and a sparse terabyte that would not fit this machine's memory."""
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel, contextlib.closing(knock(daemon.broker)) as peer:
        store, own = pb_grpc.StoreServiceStub(channel), str(say(peer, {"verb": "hello"})["token"])

        def put(fd: int, size: int) -> str:
            transfer = str(say(peer, {"verb": "offer"}, [fd])["transfer"])
            key = pb.SidecarKey(pack_id=victim.pack.pack_id, build=victim.pack.build, kind="judged")
            request = pb.PutSidecarRequest(key=key, transfer=transfer, size=size)
            try:
                store.PutSidecar(request, timeout=30, metadata=token(own))
            except grpc.RpcError as error:
                return str(error.code().name)
            return "OK"

        with memory.Owned(memory.of_bytes("index", INDEX)) as index:
            assert put(index.fd, 7) == "INVALID_ARGUMENT"
            open_before = daemon.open_descriptors()
            for size in (0, len(INDEX) - 1, len(INDEX) + 1, 1 << 40, 2**64 - 1):
                assert put(index.fd, size) == "INVALID_ARGUMENT"
            with pytest.raises(PermissionError):  # nor can it shrink while it is read
                os.ftruncate(index.fd, 1)
            assert put(index.fd, len(INDEX)) == "OK"
        with memory.Owned(memory.create("sparse", 1 << 40)) as sparse:
            memory.add_seals(sparse.fd, memory.CONSTANT)
            assert "bytes of transfers" in str(say(peer, {"verb": "offer"}, [sparse.fd])["error"])
        with memory.Owned(memory.create("writable", 4096)) as writable, (ROOT / "README.md").open() as plain:
            for fd in (writable.fd, plain.fileno(), peer.fileno()):
                assert "sealed" in str(say(peer, {"verb": "offer"}, [fd])["error"])
            with memory.Owned(os.open(f"/proc/self/fd/{writable.fd}", os.O_WRONLY)) as unreadable:
                memory.add_seals(unreadable.fd, memory.CONSTANT)
                assert "can be read" in str(say(peer, {"verb": "offer"}, [unreadable.fd])["error"])
        until(lambda: daemon.open_descriptors() <= open_before)  # the broker has them closed beside it


def test_a_peer_that_never_reads_delays_nobody(desk: Desk) -> None:
    with contextlib.closing(knock(desk.path)) as deaf:
        say(deaf, {"verb": "hello"})
        deaf.setblocking(False)
        with contextlib.suppress(BlockingIOError, ConnectionError):
            for _ in range(100_000):
                deaf.send(b'{"verb": "take", "transfer": "' + b"x" * 3000 + b'"}')
        started_s = time.monotonic()
        assert serves(desk)
        assert time.monotonic() - started_s < 5.0


def test_another_user_is_refused_whatever_it_sends(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to start a process as another user")
    folder = tmp_path / "run"
    folder.mkdir()
    desk = Desk(folder / "broker.sock", frozenset({0, 4242}), group=4343)
    script = (
        "import os, socket, sys\n"
        "peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "directory = os.open(os.path.dirname(sys.argv[1]), os.O_RDONLY)\n"
        "os.fchdir(directory); os.setgroups([]); os.setresgid(4343, 4343, 4343); os.setresuid(4343, 4343, 4343)\n"
        "peer.connect('broker.sock')\n"
        'try: peer.send(b\'{"verb": "hello"}\')\n'
        "except OSError: pass\n"
        "heard = b''\n"
        "for _ in range(3):\n"
        "    try: heard += peer.recv(4096)\n"
        "    except ConnectionResetError: pass  # it ended with something of ours unread\n"
        "print(heard.decode())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, desk.path], capture_output=True, text=True, timeout=30, check=False
    )
    desk.broker.close()
    assert done.stdout.strip() == '{"error": "user id 4343 is not in allow_uids"}', done.stderr
    assert desk.released == []
