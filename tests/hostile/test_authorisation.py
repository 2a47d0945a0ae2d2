"""Every method of both services against everyone who may not call it: refused before the request is looked at.

Garbage as the request shows it: whoever is refused hears why, not that the bytes are no message.
"""

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor

from kvstore_service.client import AdminClient, StoreClient
from kvstore_service.client.connection import BrokerConnection
from tests.hostile import calls
from tests.hostile.calls import GARBAGE, METHODS, code_of, path_of
from tests.hostile.sanitized import ROOT
from tests.hostile.stranger import tried
from tests.hostile.victim import Victim
from tests.service.test_rpc import make_certificates
from tests.support.daemon_process import Daemon

TENANT_UID, OUTSIDER_UID, GROUP = 12345, 23456, 34567
# With another's ids these find nothing or do nothing: they make something new, or ask about one's own.
HARMLESS = {"RegisterWorker", "ServeRings", "UnregisterWorker", "OpenSession", "LookupPrefix", "AbortPack"}

# These succeed or fail by the session alone.
OF_A_SESSION = {"BindSlot", "ForkSession", "CloseSession"}

every_method = pytest.mark.parametrize("method", METHODS, ids=path_of)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    make_certificates(directory)
    return directory


@pytest.fixture(scope="module")
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, certificates: Path, port: int) -> Iterator[Daemon]:
    options = (
        "--nvme-bytes=1GiB", "--copy-threads=1", f"--tcp=127.0.0.1:{port}", f"--tls={certificates}",
        "--tls-subjects=ops",
        f"--allow-uids={os.getuid()},{TENANT_UID}", f"--socket-group={GROUP}", "--log-level=debug",
    )  # fmt: skip
    shared = Daemon(tmp_path_factory.mktemp("shared"), options=options)
    shared.run_dir.chmod(0o711)
    with shared as running:
        yield running


@pytest.fixture(scope="module")
def channel(daemon: Daemon) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        yield channel


@pytest.fixture(scope="module")
def stale(daemon: Daemon) -> calls.Metadata:
    """The token of a worker that has gone."""
    connection = BrokerConnection(daemon.broker, "short", 5.0)
    connection.close()
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        deadline = time.monotonic() + 10
        while f"name=short pid={os.getpid()}" not in daemon.log_tail(100):
            assert time.monotonic() < deadline
            admin.get_status()
    return calls.token(connection.token)


def stranger(
    daemon: Daemon, uid: int, names: dict[str, str | int] | None = None, group: int = GROUP
) -> dict[str, dict[str, str]]:
    """What a process of another user achieves."""
    if os.getuid() != 0:
        pytest.skip("needs root, to start a process as another user")
    order = {"uid": uid, "gid": group, "socket": daemon.socket, "broker": daemon.broker, "names": names}
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.stranger"],
        input=json.dumps(order), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, dict[str, str]] = json.loads(done.stdout)
    return answer


@every_method
def test_no_token_or_one_that_is_none(channel: grpc.Channel, stale: calls.Metadata, method: MethodDescriptor) -> None:
    for metadata in ((), calls.token(""), calls.token("0" * 64), calls.token("x" * 3000), stale):
        for payload in (GARBAGE, calls.request_of(method).SerializeToString()):
            assert code_of(channel, method, payload, metadata) == "UNAUTHENTICATED"


@every_method
def test_no_deadline(daemon: Daemon, channel: grpc.Channel, method: MethodDescriptor) -> None:
    connection = BrokerConnection(daemon.broker, "endless", 5.0)
    answers = channel.stream_stream(path_of(method))(iter([GARBAGE]), metadata=calls.token(connection.token))
    with pytest.raises(grpc.RpcError, match="a deadline is mandatory"):
        list(answers)
    connection.close()


@every_method
def test_bytes_that_are_no_message(daemon: Daemon, channel: grpc.Channel, method: MethodDescriptor) -> None:
    """The other side of the matrix: from a peer that may call, the same bytes are an invalid argument."""
    connection = BrokerConnection(daemon.broker, "clumsy", 5.0)
    assert code_of(channel, method, GARBAGE, calls.token(connection.token)) == "INVALID_ARGUMENT"
    connection.close()


def test_a_user_outside_allow_uids(daemon: Daemon) -> None:
    result = stranger(daemon, OUTSIDER_UID)
    assert "PERMISSION_DENIED" in result["broker"]
    assert "allow_uids" in result["broker"]
    assert result["codes"] == {path_of(method): "UNAUTHENTICATED" for method in METHODS}


def test_a_user_outside_the_sockets_group(daemon: Daemon) -> None:
    result = stranger(daemon, OUTSIDER_UID, group=OUTSIDER_UID)
    assert "UNAVAILABLE" in result["broker"]
    assert set(result["codes"].values()) == {"UNAVAILABLE"}


def test_sockets_of_one_user_are_closed_to_others(tmp_path: Path) -> None:
    with Daemon(tmp_path) as private:
        private.run_dir.chmod(0o711)
        result = stranger(private, OUTSIDER_UID)
    assert "UNAVAILABLE" in result["broker"]
    assert set(result["codes"].values()) == {"UNAVAILABLE"}


def reached(codes: dict[str, str]) -> dict[str, str]:
    """The workers' calls that found something."""
    workers = {path: code for path, code in codes.items() if "StoreService" in path}
    assert len(workers) > 10
    return {
        path: code for path, code in workers.items() if code != "NOT_FOUND" and path.rsplit("/", 1)[1] not in HARMLESS
    }


def test_another_tenant_with_the_first_ones_ids(daemon: Daemon) -> None:
    with StoreClient.connect(daemon.socket, daemon.broker, "victim") as client:
        victim = Victim(client)
        result = stranger(daemon, TENANT_UID, victim.names())
        assert result["broker"] == ""
        assert reached(result["codes"]) == {}
        assert result["codes"]["/kvstore.v1.StoreService/AbortPack"] == "OK"
        administration = [code for path, code in result["codes"].items() if "AdminService" in path]
        assert administration
        assert set(administration) == {"PERMISSION_DENIED"}
        # With a session of its own, what it lacks is the other's packs, uploads, slots and transfers.
        own = reached(result["own"])
        assert own.keys() <= {f"/kvstore.v1.StoreService/{name}" for name in OF_A_SESSION}
        assert own["/kvstore.v1.StoreService/BindSlot"] == "FAILED_PRECONDITION"
        assert result["found"] == 0
        victim.check()
        victim.close()


def test_another_worker_of_the_same_tenant(daemon: Daemon, channel: grpc.Channel) -> None:
    """Shares packs; sessions, slots, uploads and transfers are each worker's own."""
    with StoreClient.connect(daemon.socket, daemon.broker, "victim") as client:
        victim = Victim(client, number=11)
        connection = BrokerConnection(daemon.broker, "twin", 5.0)
        codes = tried(channel, calls.token(connection.token), victim.names())
        assert codes.pop("/kvstore.v1.StoreService/GetSidecar") == "OK"
        assert codes.pop("/kvstore.v1.StoreService/ReservePack") == "FAILED_PRECONDITION"  # it has no memory
        assert reached(codes) == {}
        connection.close()
        victim.check()
        victim.close()


def test_plain_tcp_and_tls_without_a_certificate(certificates: Path, daemon: Daemon, port: int) -> None:
    ca = (certificates / "ca.crt").read_bytes()
    forged = calls.token("0" * 64)
    for channel in (
        grpc.insecure_channel(f"localhost:{port}"),
        grpc.secure_channel(f"localhost:{port}", grpc.ssl_channel_credentials(ca)),
    ):
        with channel:
            assert {code_of(channel, method, GARBAGE, forged) for method in METHODS} == {"UNAVAILABLE"}


def test_raw_bytes_to_the_tls_port_get_nothing(daemon: Daemon, port: int) -> None:
    for sent in (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\0" * 4096, b"GET / HTTP/1.1\r\n\r\n", os.urandom(65536)):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as peer:
            try:
                peer.sendall(sent)
                peer.shutdown(socket.SHUT_WR)
                received = peer.recv(4096)
            except OSError as error:  # it hung up before all was sent
                if error.errno in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN):
                    continue
                raise
            assert received[:1] in (b"", b"\x15"), received  # nothing, or a TLS alert


def test_a_certificate_opens_admin_service_alone(certificates: Path, daemon: Daemon, port: int) -> None:
    ca, key, certificate = ((certificates / name).read_bytes() for name in ("ca.crt", "client.key", "client.crt"))
    with (
        contextlib.closing(BrokerConnection(daemon.broker, "remote", 5.0)) as connection,
        grpc.secure_channel(f"localhost:{port}", grpc.ssl_channel_credentials(ca, key, certificate)) as channel,
    ):
        for method in METHODS:
            expected = "INVALID_ARGUMENT" if calls.admin(method) else "PERMISSION_DENIED"
            assert code_of(channel, method, GARBAGE, calls.token(connection.token)) == expected, path_of(method)
