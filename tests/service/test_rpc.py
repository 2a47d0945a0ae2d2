"""What holds for every call: token, deadline, idempotency, rich errors, limits; health and reflection."""

import errno
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore_service import kvctl
from kvstore_service._proto import admin_service_pb2 as admin_pb
from kvstore_service._proto import admin_service_pb2_grpc as admin_grpc
from kvstore_service._proto import store_service_pb2 as pb
from kvstore_service._proto import store_service_pb2_grpc as pb_grpc
from kvstore_service.client import (
    LEARNT,
    AdminClient,
    KindSpec,
    Layout,
    PackRef,
    PackReservation,
    RingGeometry,
    StoreClient,
    StoreError,
)
from kvstore_service.client.connection import BrokerConnection
from kvstore_service.daemon.front import rpc
from kvstore_service.daemon.store.registry import Limits, Registry
from kvstore_service.shared import wire
from tests.support.daemon_process import Daemon
from tests.support.life import until

LAYOUT = Layout(b"f" * 32, 2, (KindSpec(2, 64, 2, 256),))


@pytest.fixture
def channel(daemon: Daemon) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        yield channel


def code_of(call) -> str:  # type: ignore[no-untyped-def]
    with pytest.raises(grpc.RpcError) as raised:
        call()
    return str(raised.value.code().name)


def open_request(key: str = "") -> pb.OpenSessionRequest:
    return pb.OpenSessionRequest(idempotency_key=key, layout=wire.layout_to(LAYOUT), declared_max_tokens=1024)


def test_a_call_needs_a_token(channel: grpc.Channel) -> None:
    store, admin = pb_grpc.StoreServiceStub(channel), admin_grpc.AdminServiceStub(channel)
    assert code_of(lambda: store.OpenSession(open_request(), timeout=5)) == "UNAUTHENTICATED"
    assert code_of(lambda: admin.GetStatus(admin_pb.GetStatusRequest(), timeout=5)) == "UNAUTHENTICATED"
    assert code_of(lambda: list(admin.Verify(admin_pb.VerifyRequest(), timeout=5))) == "UNAUTHENTICATED"
    forged = (("kvstore-token", "0" * 64),)
    assert code_of(lambda: store.OpenSession(open_request(), timeout=5, metadata=forged)) == "UNAUTHENTICATED"


def test_a_token_ends_with_its_connection(daemon: Daemon, channel: grpc.Channel) -> None:
    connection = BrokerConnection(daemon.broker, "short", 5.0)
    metadata = (("kvstore-token", connection.token),)
    store = pb_grpc.StoreServiceStub(channel)
    assert store.OpenSession(open_request(), timeout=5, metadata=metadata).session_id
    connection.close()
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        for _ in range(200):
            if admin.get_status().sessions == 0:
                break
    assert code_of(lambda: store.OpenSession(open_request(), timeout=5, metadata=metadata)) == "UNAUTHENTICATED"


def test_a_call_needs_a_deadline(daemon: Daemon, channel: grpc.Channel) -> None:
    connection = BrokerConnection(daemon.broker, "endless", 5.0)
    store = pb_grpc.StoreServiceStub(channel)
    metadata = (("kvstore-token", connection.token),)
    assert code_of(lambda: store.OpenSession(open_request(), metadata=metadata)) == "INVALID_ARGUMENT"
    connection.close()


def test_a_repeated_mutation_gets_the_first_answer(daemon: Daemon, channel: grpc.Channel) -> None:
    connection = BrokerConnection(daemon.broker, "retry", 5.0)
    store = pb_grpc.StoreServiceStub(channel)
    metadata = (("kvstore-token", connection.token),)

    def open_session(key: str) -> str:
        return str(store.OpenSession(open_request(key), timeout=5, metadata=metadata).session_id)

    assert open_session("a") == open_session("a")
    assert open_session("a") != open_session("b")
    opened: list[str] = []
    threads = [threading.Thread(target=lambda: opened.append(open_session("c"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(opened) == 8
    assert len(set(opened)) == 1
    other = open_request("a")
    other.declared_max_tokens = 2
    assert code_of(lambda: store.OpenSession(other, timeout=5, metadata=metadata)) == "INVALID_ARGUMENT"
    connection.close()


def test_limits_name_themselves(tmp_path: Path) -> None:
    options = ("--sessions-max=2", "--slots-max=4", "--copy-threads=1")
    with Daemon(tmp_path, options=options) as daemon, StoreClient.connect(daemon.socket, daemon.broker) as client:
        for _ in range(2):
            client.open_session(LAYOUT, 1024)
        with pytest.raises(StoreError) as raised:
            client.open_session(LAYOUT, 1024)
        assert raised.value.code == "RESOURCE_EXHAUSTED"
        assert raised.value.violations[0].subject == "sessions_max"
        assert raised.value.retry_after_s == 1.0
        with pytest.raises(StoreError) as raised:
            client.register_worker(5, 1 << 16, 1 << 16, [RingGeometry(8, 8, 64)])
        assert raised.value.violations[0].subject == "slots_max"
        client.register_worker(4, 1 << 16, 1 << 16, [RingGeometry(8, 8, 64)]).close()


def test_a_session_of_another_worker_is_not_found(daemon: Daemon, client: StoreClient) -> None:
    session = client.open_session(LAYOUT, 1024)
    with (
        StoreClient.connect(daemon.socket, daemon.broker, "other") as other,
        pytest.raises(StoreError, match="NOT_FOUND"),
    ):
        other.close_session(session)
    client.close_session(session)


@pytest.mark.parametrize(
    "rings",
    [
        [],
        [RingGeometry(3, 8, 64)],
        [RingGeometry(8, 0, 64)],
        [RingGeometry(1 << 30, 1, 1)],
        [RingGeometry(8, 8, 8)] * 65,
    ],
)
def test_impossible_memory_is_refused_and_can_be_asked_for_again(
    client: StoreClient, rings: list[RingGeometry]
) -> None:
    with pytest.raises(StoreError, match="INVALID_ARGUMENT"):
        client.register_worker(1, 1 << 16, 1 << 16, rings)
    client.register_worker(1, 1 << 16, 1 << 16, [RingGeometry(8, 8, 64)]).close()
    with pytest.raises(StoreError, match="FAILED_PRECONDITION"):
        client.register_worker(1, 1 << 16, 1 << 16, [RingGeometry(8, 8, 64)])


def test_a_workers_wait_is_bounded(client: StoreClient) -> None:
    ring = [RingGeometry(8, 8, 64)]
    with pytest.raises(StoreError, match=r"INVALID_ARGUMENT.*600000"):
        client.register_worker(1, 1 << 16, 1 << 16, ring, wait_ms=600_001)
    client.register_worker(1, 1 << 16, 1 << 16, ring, wait_ms=600_000).close()


def test_health_speaks_for_each_service(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", "kvstore.v1.StoreService", "kvstore.v1.AdminService"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_shows_the_admin_service_to_whoever_may_call_it(daemon: Daemon, channel: grpc.Channel) -> None:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    def services(metadata: tuple[tuple[str, str], ...]) -> list[str]:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        (answer,) = stub.ServerReflectionInfo(asked, timeout=5, metadata=metadata)
        return [service.name for service in answer.list_services_response.service]

    assert code_of(lambda: services(())) == "UNAUTHENTICATED"
    connection = BrokerConnection(daemon.broker, "curious", 5.0)
    assert "kvstore.v1.AdminService" in services((("kvstore-token", connection.token),))
    connection.close()


def test_an_errors_request_id_is_in_the_log(daemon: Daemon, client: StoreClient) -> None:
    with pytest.raises(StoreError) as raised:
        client.close_session("nonsense")
    assert raised.value.request_id
    assert f"request={raised.value.request_id}" in daemon.log_tail(50)


def test_metrics_are_the_stores_own_counters(daemon: Daemon, client: StoreClient) -> None:
    from urllib.request import urlopen

    client.open_session(LAYOUT, 1024)
    with urlopen(f"http://{daemon.ready['metrics']}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert "kvstore_sessions 1.0" in text
    assert "kvstore_nvme_read_bytes_total 0.0" in text


def openssl(directory: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True, timeout=60)


def make_certificates(directory: Path) -> None:
    """A CA, and of it a certificate for the server, for an operator (`client`) and for somebody else (`guest`)."""
    openssl(directory, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.crt",
            "-days", "2", "-subj", "/CN=test-ca")  # fmt: skip
    names = {"server": ("localhost", "localhost"), "client": ("ops", "ops.example"), "guest": ("guest", "ops.guest")}
    for name, (common, alternative) in names.items():
        openssl(directory, "req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.csr",
                "-subj", f"/CN={common}", "-addext", f"subjectAltName=DNS:{alternative}")  # fmt: skip
        openssl(directory, "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key",
                "-CAcreateserial", "-out", f"{name}.crt", "-days", "2", "-copy_extensions", "copy")  # fmt: skip


@pytest.mark.parametrize("subject", ["ops", "ops.example"])
def test_tcp_serves_operators_by_the_name_in_their_certificate(tmp_path: Path, subject: str) -> None:
    make_certificates(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ca = (tmp_path / "ca.crt").read_bytes()
    address = f"localhost:{port}"
    tls = (f"--tcp=127.0.0.1:{port}", f"--tls={tmp_path}", f"--tls-subjects=other,{subject}")
    with Daemon(tmp_path, options=("--copy-threads=1", *tls)):
        with grpc.secure_channel(address, grpc.ssl_channel_credentials(ca)) as anonymous:
            admin = admin_grpc.AdminServiceStub(anonymous)
            assert code_of(lambda: admin.GetStatus(admin_pb.GetStatusRequest(), timeout=5)) == "UNAVAILABLE"
        with AdminClient.connect_tls(address, tmp_path) as client:
            assert client.get_status().state == "serving"
            assert list(client.list_packs()) == []
            assert list(client.verify()) == []
            store = pb_grpc.StoreServiceStub(client._channel)
            assert code_of(lambda: store.OpenSession(open_request(), timeout=5)) == "PERMISSION_DENIED"
            with pytest.raises(StoreError, match="no token"):
                _ = client.token
        assert kvctl.main(["--tcp", address, "--tls", str(tmp_path), "status"]) == 0
        for name in ("crt", "key"):
            (tmp_path / f"guest.{name}").replace(tmp_path / f"client.{name}")
        with AdminClient.connect_tls(address, tmp_path) as guest, pytest.raises(StoreError) as raised:
            guest.get_status()
        assert (raised.value.code, raised.value.reason) == ("PERMISSION_DENIED", "SUBJECT_REFUSED")
        assert "ops.guest" in raised.value.message
        (tmp_path / "client.key").unlink()
        with pytest.raises(StoreError, match=r"client\.key"):
            AdminClient.connect_tls(address, tmp_path)


def test_reasons_tell_causes_apart_that_share_a_code(tmp_path: Path) -> None:
    options = ("--sessions-max=1", "--nvme-bytes=1MiB", "--copy-threads=1", "--worker-bytes-max=32MiB")
    with Daemon(tmp_path, options=options) as daemon, StoreClient.connect(daemon.socket, daemon.broker) as client:

        def refused(act: Callable[[], object]) -> tuple[str, str]:
            with pytest.raises(StoreError) as raised:
                act()
            return raised.value.code, raised.value.reason

        pack = PackRef(b"p" * 32, b"b" * 16, 0, 256)
        reservation = PackReservation(0, 256, b"d" * 32)
        session = client.open_session(LAYOUT, 1024)
        seen = [
            refused(lambda: client.close_session("nonsense")),
            refused(lambda: client.unbind_slot(3)),
            refused(lambda: client.commit_pack(session, [7])),
            refused(lambda: client.attach_packs(session, [pack])),
            refused(lambda: client.reserve_pack(session, [reservation])),
            refused(lambda: client.open_session(LAYOUT, 1024)),
            refused(lambda: client.register_worker(1, 64 << 20, 4096, [RingGeometry(8, 8, 64)])),
        ]
        client.register_worker(1, 4096, 4096, [RingGeometry(8, 8, 64)]).close()
        seen.append(refused(lambda: client.reserve_pack(session, [reservation])))
        client.serve_rings()
        chain = [PackReservation(index * 256, 256, bytes([index]) * 32) for index in range(4)]
        seen.append(refused(lambda: client.reserve_pack(session, chain)))
        connection = BrokerConnection(daemon.broker, "short", 5.0)
        connection.close()
        client._connection.token = connection.token
        # The broker sees a moment later that the connection has ended.
        ended = ("UNAUTHENTICATED", "TOKEN_UNKNOWN")
        until(lambda: refused(lambda: client.close_session(session)) == ended, "the end of a token")
    assert seen == [
        ("NOT_FOUND", "SESSION_UNKNOWN"),
        ("NOT_FOUND", "SLOT_NOT_BOUND"),
        ("NOT_FOUND", "UPLOAD_UNKNOWN"),
        ("NOT_FOUND", "PACK_NOT_STORED"),
        ("FAILED_PRECONDITION", "NOT_REGISTERED"),
        ("RESOURCE_EXHAUSTED", "LIMIT_REACHED"),
        ("RESOURCE_EXHAUSTED", "LIMIT_REACHED"),
        ("FAILED_PRECONDITION", "RINGS_NOT_SERVED"),
        ("RESOURCE_EXHAUSTED", "NO_ROOM"),
    ]


@pytest.mark.parametrize(
    ("number", "code", "reason"),
    [
        (errno.ENOSPC, "RESOURCE_EXHAUSTED", "DISK_FULL"),
        (errno.ENOMEM, "RESOURCE_EXHAUSTED", "NO_MEMORY"),
        (errno.EMFILE, "RESOURCE_EXHAUSTED", "NO_DESCRIPTORS"),
        (errno.EIO, "INTERNAL", "INTERNAL"),
    ],
)
def test_what_a_system_call_lacked_is_not_always_room_on_the_disk(number: int, code: str, reason: str) -> None:
    failure, _ = rpc._failure(OSError(number, os.strerror(number)))
    assert (failure.code, failure.reason) == (code, reason)


def test_users_share_what_there_is_equally() -> None:
    registry = Registry(Limits.shared(2, sessions=8, slots=8, worker_bytes=1 << 30, machine_bytes=2 << 30))
    hog, other = registry.add_worker(1000, 1, "hog"), registry.add_worker(1001, 2, "other")

    def full(act: Callable[[], object]) -> str:
        with pytest.raises(StoreError) as raised:
            act()
        assert raised.value.code == "RESOURCE_EXHAUSTED"
        return raised.value.violations[0].subject

    for _ in range(4):
        registry.open(hog, LAYOUT, 256)
    assert full(lambda: registry.open(hog, LAYOUT, 256)) == "sessions_max of user id 1000"
    assert full(lambda: registry.grant(hog, 5, 1)) == "slots_max of user id 1000"
    assert full(lambda: registry.grant(hog, 1, (1 << 30) + 1)) == "worker_bytes_max"
    registry.grant(hog, 4, 1 << 30)
    second = registry.add_worker(1000, 3, "second")
    assert full(lambda: registry.grant(second, 0, 1)) == "memory of user id 1000"
    for _ in range(4):  # nothing of it is at the other's cost
        registry.open(other, LAYOUT, 256)
    registry.grant(other, 4, 1 << 30)
    registry.remove_worker(hog)
    registry.grant(second, 4, 1 << 30)


def test_an_order_of_records_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, StoreClient.connect(daemon.socket, daemon.broker) as client:
        client.register_worker(1, 4096, 4096, [RingGeometry(8, 8, 64)]).close()
        client.serve_rings()
        session = client.open_session(LAYOUT, 1024)
        reservation = PackReservation(0, 256, b"d" * 32, record_order=LEARNT)
        with pytest.raises(StoreError, match=f"record_order {LEARNT}: 0..{LEARNT - 1}") as raised:
            client.reserve_pack(session, [reservation])
        assert raised.value.code == "INVALID_ARGUMENT"
