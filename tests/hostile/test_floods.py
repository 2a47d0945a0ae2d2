"""Whoever floods the daemon waits for itself: neighbours, operators and health are answered meanwhile."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore_service._proto import store_service_pb2 as pb
from kvstore_service._proto import store_service_pb2_grpc as pb_grpc
from kvstore_service.client import AdminClient, SidecarKey, StoreClient, StoreError
from kvstore_service.client.connection import BrokerConnection
from kvstore_service.daemon.front import lanes, server
from kvstore_service.daemon.front.broker import TRANSFER_BYTES_MAX
from kvstore_service.daemon.store.indexes import SIDECARS_MAX
from kvstore_service.daemon.store.registry import Limits
from kvstore_service.shared import wire
from tests.hostile import calls
from tests.hostile.calls import METHODS, path_of
from tests.hostile.victim import Victim
from tests.support.daemon_process import Daemon
from tests.support.world import LAYOUT, candidate

CALLS = 96  # of one kind
ANSWER_S = 5.0  # generous: an answer that a flood holds up comes never
HONEST_CLIENTS, SESSIONS_EACH = 50, 20
WATCHES = 3000
SIDECAR_BYTES = 256 << 20
CONNECTIONS = 1600


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    directory: Path = tmp_path_factory.mktemp("floods")
    with Daemon(directory) as running:
        yield running


@contextlib.contextmanager
def pending(daemon: Daemon, metadata: calls.Metadata, count: int, timeout_s: float) -> Iterator[list[grpc.Call]]:
    """`count` calls of every method in turn, whose requests do not come before the end of the block."""
    end = threading.Event()

    def never() -> Iterator[bytes]:
        end.wait(60.0)
        yield from ()

    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        open_calls = [
            channel.stream_stream(path_of(METHODS[number % len(METHODS)]))(
                never(), timeout=timeout_s, metadata=metadata
            )
            for number in range(count)
        ]
        try:
            yield open_calls
        finally:
            end.set()
            for call in open_calls:
                call.cancel()


def all_are_served(daemon: Daemon) -> None:
    """A worker, an operator and health, each within ANSWER_S."""
    with StoreClient.connect(daemon.socket, daemon.broker, "honest", ANSWER_S) as client:
        client.close_session(client.open_session(LAYOUT, 1024))
        assert not client.draining
    with AdminClient.connect(daemon.socket, daemon.broker, ANSWER_S) as admin:
        assert admin.get_status().state == "serving"


def code_of(call: grpc.Call) -> str:
    with pytest.raises(grpc.RpcError) as raised:
        list(call)
    return str(raised.value.code().name)


def test_calls_without_a_token_end_before_their_request_comes(daemon: Daemon) -> None:
    with pending(daemon, (), CALLS * 2, 60.0) as open_calls:
        all_are_served(daemon)
        started_s = time.monotonic()
        assert {code_of(call) for call in open_calls} == {"UNAUTHENTICATED"}
        assert time.monotonic() - started_s < ANSWER_S


def test_calls_without_a_deadline_end_before_their_request_comes(daemon: Daemon) -> None:
    with contextlib.closing(BrokerConnection(daemon.broker, "endless", 10.0)) as connection:
        ends = set()
        for method in METHODS:
            with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
                silent = threading.Event()
                call = channel.stream_stream(path_of(method))(
                    iter(lambda event=silent: (event.wait(30.0) and None) or b"", None),  # type: ignore[misc]
                    metadata=calls.token(connection.token),
                )
                ends.add(code_of(call))
                silent.set()
        assert ends == {"INVALID_ARGUMENT"}


def test_calls_whose_request_never_comes_hold_nobody_up(daemon: Daemon) -> None:
    """Of a peer that may call: it is counted, told to come again, and ended in time. No thread waits for it."""
    process = psutil.Process(daemon.pid)
    with contextlib.closing(BrokerConnection(daemon.broker, "silent", 10.0)) as connection:
        before = process.num_threads()
        with pending(daemon, calls.token(connection.token), CALLS * len(METHODS), 4.0) as open_calls:
            all_are_served(daemon)
            most = sum(limits.threads for limits in (lanes.WORKERS, lanes.OPERATORS, lanes.STREAMS))
            assert process.num_threads() <= max(before, most + 32)
            ends = {code_of(call) for call in open_calls}
            # UNAVAILABLE: more streams of one connection than it may have.
            assert {"DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"} <= ends
            assert ends <= {"DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "UNAVAILABLE"}
            all_are_served(daemon)


def test_silent_calls_of_health_do_not_silence_it(daemon: Daemon) -> None:
    end = threading.Event()

    def never() -> Iterator[bytes]:
        end.wait(60.0)
        yield from ()

    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        check = channel.stream_stream("/grpc.health.v1.Health/Check")
        silent = [check(never()) for _ in range(CALLS)]
        all_are_served(daemon)
        for call in silent:  # they are answered, whether they have said what they ask or not
            assert (
                health_pb2.HealthCheckResponse.FromString(next(call)).status == health_pb2.HealthCheckResponse.SERVING
            )
        end.set()


def test_a_request_has_to_come_soon(daemon: Daemon) -> None:
    with contextlib.closing(BrokerConnection(daemon.broker, "slow", 10.0)) as connection:
        started_s = time.monotonic()
        with pending(daemon, calls.token(connection.token), 1, 60.0) as (call,):
            with pytest.raises(grpc.RpcError, match="no request came"):
                list(call)
            assert time.monotonic() - started_s < lanes.WORKERS.request_s + ANSWER_S


def test_overload_says_when_to_come_again_and_the_client_does(daemon: Daemon) -> None:
    with StoreClient.connect(daemon.socket, daemon.broker, "crowd", 30.0) as client:
        metadata = calls.token(client._connection.token)
        method = next(method for method in METHODS if method.name == "LookupPrefix")
        end = threading.Event()

        def never() -> Iterator[bytes]:
            end.wait(60.0)
            yield from ()

        with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
            call = channel.stream_stream(path_of(method))
            crowd = [call(never(), timeout=60, metadata=metadata) for _ in range(lanes.WORKERS.caller_calls)]
            deadline = time.monotonic() + ANSWER_S
            while True:
                probe = call(iter([b""]), timeout=0.2, metadata=metadata)
                if code_of(probe) == "RESOURCE_EXHAUSTED":
                    break
                assert time.monotonic() < deadline
            threading.Timer(0.5, end.set).start()
            client.close_session(client.open_session(LAYOUT, 1024))  # waits until there is room
            assert client.rpc_count > 2
            for waiting in crowd:
                waiting.cancel()


def test_fifty_clients_with_a_thousand_sessions_are_never_refused(daemon: Daemon) -> None:
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(StoreClient.connect(daemon.socket, daemon.broker, f"honest-{number}", 60.0))
            for number in range(HONEST_CLIENTS)
        ]

        def work(client: StoreClient) -> int:
            sessions = [client.open_session(LAYOUT, 1024) for _ in range(SESSIONS_EACH)]
            client.lookup_prefix(LAYOUT.fingerprint, [candidate(1)])
            with (
                AdminClient.connect(daemon.socket, daemon.broker, 60.0)
                if client is clients[0]
                else (contextlib.nullcontext()) as admin
            ):
                if admin is not None:
                    admin.get_status()
            for session in sessions:
                client.close_session(session)
            return client.rpc_count

        with ThreadPoolExecutor(HONEST_CLIENTS) as pool:
            assert list(pool.map(work, clients)) == [2 * SESSIONS_EACH + 1] * HONEST_CLIENTS  # nothing was tried twice


def test_workers_of_one_user_leave_room_for_operators(daemon: Daemon) -> None:
    most = Limits.user_workers
    with contextlib.ExitStack() as stack:
        for number in range(most):
            stack.callback(BrokerConnection(daemon.broker, f"hello-{number}", 10.0).close)
        with pytest.raises(StoreError, match=f"RESOURCE_EXHAUSTED.*{most}"):
            BrokerConnection(daemon.broker, "one-more", 10.0)
        for _ in range(3):
            with AdminClient.connect(daemon.socket, daemon.broker, ANSWER_S) as admin:
                assert admin.get_status().state == "serving"


def test_operators_are_bounded_and_are_no_workers(daemon: Daemon) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(Limits.operators):
            stack.enter_context(AdminClient.connect(daemon.socket, daemon.broker))
        with pytest.raises(StoreError, match=f"operators.*{Limits.operators}"):
            AdminClient.connect(daemon.socket, daemon.broker)
        BrokerConnection(daemon.broker, "worker", 10.0).close()
    with (
        AdminClient.connect(daemon.socket, daemon.broker) as admin,
        grpc.insecure_channel(f"unix:{daemon.socket}") as channel,
    ):
        for method in METHODS:
            if not calls.admin(method):
                assert calls.code_of(channel, method, calls.GARBAGE, calls.token(admin.token)) == "PERMISSION_DENIED"


def test_health_cannot_be_watched_to_death(daemon: Daemon) -> None:
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        for number in range(WATCHES):
            watch = health.Watch(request)
            if number % 100 == 0:
                assert code_of(watch) == "UNIMPLEMENTED"
            watch.cancel()
        answer = health.Check(request, timeout=ANSWER_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        large = health_pb2.HealthCheckRequest(service="nobody" * (1 << 20))  # not read, whatever it is
        assert health.Check(large, timeout=ANSWER_S) == answer
    all_are_served(daemon)


def test_lookups_that_nobody_waits_for_end(daemon: Daemon) -> None:
    """Fingerprints of megabytes are refused unread, and a lookup past its deadline stops between two candidates."""
    process = psutil.Process(daemon.pid)
    with StoreClient.connect(daemon.socket, daemon.broker, "asker", 10.0) as client:
        metadata = calls.token(client._connection.token)
        before_s = sum(process.cpu_times()[:2])
        with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
            store = pb_grpc.StoreServiceStub(channel)
            item = pb.PrefixCandidate(first_token=0, tokens=256, token_digest=b"d" * 32)
            large = pb.LookupPrefixRequest(fingerprint=b"f" * (3 << 20), candidates=[item])
            many = pb.LookupPrefixRequest(fingerprint=b"f" * 32, candidates=[item] * 16384)
            for request in (large, many):
                asked = [store.LookupPrefix.future(request, timeout=0.5, metadata=metadata) for _ in range(8)]
                ends = {call.code().name for call in asked}
                assert ends <= {"INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "OK"}
        client.lookup_prefix(LAYOUT.fingerprint, [candidate(1)])
        assert sum(process.cpu_times()[:2]) - before_s < 8.0


def test_bytes_that_nobody_takes_are_bounded(daemon: Daemon) -> None:
    """Sidecars that are asked for and left: refused beyond the limit, and never copied into the daemon itself."""
    process = psutil.Process(daemon.pid)
    with StoreClient.connect(daemon.socket, daemon.broker, "hoarder", 30.0) as client:
        victim = Victim(client, number=31)
        key = SidecarKey(victim.pack.pack_id, victim.pack.build, "large")
        client.put_sidecar(key, bytes(SIDECAR_BYTES))
        assert client.get_sidecar(key) == bytes(SIDECAR_BYTES)
        before = process.memory_info()
        metadata = calls.token(client._connection.token)
        most = TRANSFER_BYTES_MAX // SIDECAR_BYTES
        with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
            store = pb_grpc.StoreServiceStub(channel)
            request = pb.GetSidecarRequest(key=wire.sidecar_key_to(key))
            for _ in range(most):
                store.GetSidecar(request, timeout=30, metadata=metadata)
            with pytest.raises(grpc.RpcError, match="bytes of transfers"):
                store.GetSidecar(request, timeout=30, metadata=metadata)
            after = process.memory_info()
            assert (after.rss - after.shared) - (before.rss - before.shared) < 32 << 20
        assert client.lookup_prefix(LAYOUT.fingerprint, [candidate(31)])
        victim.close()


def test_sidecars_of_a_pack_are_bounded(daemon: Daemon) -> None:
    with StoreClient.connect(daemon.socket, daemon.broker, "indexer", 30.0) as client:
        victim = Victim(client, number=41)  # it has one sidecar
        for number in range(SIDECARS_MAX - 1):
            client.put_sidecar(SidecarKey(victim.pack.pack_id, victim.pack.build, "kind", bytes([number])), b"x")
        with pytest.raises(StoreError, match="at most") as raised:
            client.put_sidecar(SidecarKey(victim.pack.pack_id, victim.pack.build, "one more"), b"x")
        assert (raised.value.code, raised.value.reason) == ("RESOURCE_EXHAUSTED", "LIMIT_REACHED")
        client.put_sidecar(victim.key, b"again")  # what is there may be put again
        for kind, parameters in (("k" * 65, b""), ("kind", b"p" * 65)):
            with pytest.raises(StoreError, match=r"INVALID_ARGUMENT.*at most 64"):
                client.put_sidecar(SidecarKey(victim.pack.pack_id, victim.pack.build, kind, parameters), b"x")
        victim.check()
        victim.close()


def test_idle_connections_leave_room(daemon: Daemon) -> None:
    """More connections than gRPC lets in, and none says a word: the broker and those who were there are served."""
    with StoreClient.connect(daemon.socket, daemon.broker, "early", ANSWER_S) as early, contextlib.ExitStack() as stack:
        assert not early.draining
        for _ in range(CONNECTIONS):
            peer = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            peer.settimeout(ANSWER_S)
            with contextlib.suppress(OSError):  # the daemon may not let it in
                peer.connect(daemon.socket)
        BrokerConnection(daemon.broker, "late", ANSWER_S).close()
        early.close_session(early.open_session(LAYOUT, 1024))
        assert daemon.open_descriptors() < server.CONNECTIONS_MAX + 300
        with StoreClient.connect(daemon.socket, daemon.broker, "late", server.HANDSHAKE_MS / 1e3 + 20.0) as late:
            late.close_session(late.open_session(LAYOUT, 1024))  # as soon as the silent ones are dropped


def test_a_full_backlog_is_waited_for(tmp_path: Path) -> None:
    """Others who connect in crowds, refused or not, are no reason to say that no daemon answers."""
    path = str(tmp_path / "broker.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, contextlib.ExitStack() as stack:
        listener.bind(path)
        listener.listen(0)
        crowd = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        crowd.connect(path)

        def serve() -> None:
            time.sleep(0.3)
            for _ in range(2):
                peer, _ = listener.accept()
                stack.callback(peer.close)
            peer.recv(4096)
            peer.send(b'{"token": "t"}')

        server = threading.Thread(target=serve)
        server.start()
        with contextlib.closing(BrokerConnection(path, "patient", ANSWER_S)) as connection:
            assert connection.token == "t"
        server.join(ANSWER_S)
        crowd_again = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        crowd_again.connect(path)
        started_s = time.monotonic()
        with pytest.raises(StoreError, match="UNAVAILABLE"):
            BrokerConnection(path, "late", 0.2)
        assert time.monotonic() - started_s < ANSWER_S
