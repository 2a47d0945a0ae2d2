"""An authenticated peer that sends nonsense: typed refusals, a daemon that goes on, and an honest worker's bytes."""

import os
import random
import time
from pathlib import Path

import grpc
import psutil
import pytest
from google.protobuf.descriptor import MethodDescriptor

from kvstore_service._proto import store_service_pb2 as pb
from kvstore_service.client import AdminClient, RingGeometry, SidecarKey, StoreClient, StoreError
from kvstore_service.client.connection import BrokerConnection
from kvstore_service.daemon.front.fields import ITEMS_MAX
from kvstore_service.daemon.front.replies import IDEMPOTENCY_KEY_MAX
from kvstore_service.daemon.front.rpc import MESSAGE_BYTES_MAX
from tests.hostile import calls
from tests.hostile.calls import METHODS, code_of, path_of
from tests.hostile.victim import Victim
from tests.support.daemon_process import Daemon

PAYLOADS = 90  # per method
GROWTH_BYTES_MAX = 256 << 20
TYPED = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "ABORTED", "UNAVAILABLE"}
HELD = ("packs", "pack_bytes", "stored_bytes", "packs_damaged", "bound_slots", "uploads_open", "uploads_reserved")


@pytest.fixture(scope="module")
def channel(daemon: Daemon) -> grpc.Channel:
    return grpc.insecure_channel(f"unix:{daemon.socket}")


def payloads(method: MethodDescriptor, rng: random.Random) -> list[bytes]:
    """Random bytes, right messages with extreme values, and such messages with bytes changed."""
    if method.name == "Drain":
        return [calls.GARBAGE]  # it has no fields: whatever can be decoded drains
    made = [rng.randbytes(rng.randrange(1, 200)) for _ in range(PAYLOADS // 3)]
    for _ in range(PAYLOADS // 3):
        items = rng.choice((0, 1, 2, 17))
        good = calls.fill(calls.request_of(method), calls.extreme(rng), items).SerializeToString()
        bad = bytearray(good)
        for _ in range(min(len(bad), 4)):
            bad[rng.randrange(len(bad))] = rng.randrange(256)
        made += [good, bytes(bad)]
    return made


def held(daemon: Daemon) -> dict[str, int]:
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        counters = admin.get_status().counters
    return {name: counters[name] for name in HELD}


def until_held(daemon: Daemon, wanted: dict[str, int]) -> None:
    """What a worker left goes soon after its connection has ended."""
    deadline = time.monotonic() + 10
    while (now := held(daemon)) != wanted:
        assert time.monotonic() < deadline, f"{now}, before {wanted}"


@pytest.mark.timeout(240)
def test_nonsense_is_refused_and_changes_nothing(daemon: Daemon, channel: grpc.Channel, victim: Victim) -> None:
    seed = int(os.environ.get("HEADGATE_TEST_SEED", random.randrange(1 << 32)))
    print(f"HEADGATE_TEST_SEED={seed}")
    rng = random.Random(seed)
    process = psutil.Process(daemon.pid)
    before, rss_bytes = held(daemon), process.memory_info().rss
    files = sorted(path.relative_to(daemon.data_dir.parent) for path in daemon.data_dir.parent.rglob("*"))
    ends: dict[str, set[str]] = {}
    for method in sorted(METHODS, key=calls.admin):
        connection = BrokerConnection(daemon.broker, "nonsense", 10.0)
        for payload in payloads(method, rng):
            end = code_of(channel, method, payload, calls.token(connection.token))
            assert end in TYPED, f"{path_of(method)} {end} for {payload[:200].hex()}\n{daemon.log_tail(30)}"
            ends.setdefault(path_of(method), set()).add(end)
        connection.close()
        if not calls.admin(method):  # an operator's calls may end things
            until_held(daemon, before)
    assert process.memory_info().rss - rss_bytes < GROWTH_BYTES_MAX
    assert all("INVALID_ARGUMENT" in ends[path_of(method)] for method in METHODS), ends
    after = sorted(path.relative_to(daemon.data_dir.parent) for path in daemon.data_dir.parent.rglob("*"))
    assert [path for path in after if path not in files and path.suffix != ".pack"] == []
    assert "Traceback" not in daemon.log_path.read_text()
    victim.check()


def store_method(name: str) -> MethodDescriptor:
    return next(method for method in METHODS if method.name == name)


@pytest.mark.parametrize(
    ("name", "request_", "code"),
    [
        ("OpenSession", b"\x0a" + b"\xff" * MESSAGE_BYTES_MAX, "RESOURCE_EXHAUSTED"),
        ("BindSlot", pb.BindSlotRequest(windows=[pb.LaneWindow()] * (ITEMS_MAX + 1)), "INVALID_ARGUMENT"),
        ("BindSlot", pb.BindSlotRequest(windows=[pb.LaneWindow()] * 2_000_000), "INVALID_ARGUMENT"),
        ("AbortPack", pb.AbortPackRequest(idempotency_key="k" * (IDEMPOTENCY_KEY_MAX + 1)), "INVALID_ARGUMENT"),
        ("DescribeSession", b"\x0a" + b"\x80\x80\x80\x01" + b"/" * (1 << 21), "INVALID_ARGUMENT"),
        ("LookupPrefix", pb.LookupPrefixRequest(fingerprint=b"f" * (2 << 20)), "INVALID_ARGUMENT"),
    ],
    ids=["too long", "too many", "far too many", "long key", "long name", "long bytes"],
)
def test_sizes_are_bounded(daemon: Daemon, channel: grpc.Channel, name: str, request_: object, code: str) -> None:
    process = psutil.Process(daemon.pid)
    before_bytes = process.memory_info().rss
    payload = request_ if isinstance(request_, bytes) else request_.SerializeToString()  # type: ignore[attr-defined]
    connection = BrokerConnection(daemon.broker, "large", 10.0)
    for _ in range(3):
        assert code_of(channel, store_method(name), payload, calls.token(connection.token)) == code
    connection.close()
    assert process.memory_info().rss - before_bytes < GROWTH_BYTES_MAX


def test_declared_memory_costs_the_daemon_nothing(daemon: Daemon, channel: grpc.Channel) -> None:
    """Rings of gigabytes are only promised: touching them all at once was a way to end the daemon."""
    process = psutil.Process(daemon.pid)
    before_bytes = process.memory_info().rss
    ring = pb.RingGeometry(tickets=1024, runs_max=65535, pairs_max=1)  # completions of a GiB
    request = pb.RegisterWorkerRequest(slots=1, window_bytes=1 << 30, staging_bytes=1 << 30, rings=[ring])
    connection = BrokerConnection(daemon.broker, "greedy", 10.0)
    end = code_of(channel, store_method("RegisterWorker"), request.SerializeToString(), calls.token(connection.token))
    assert end == "OK"
    assert process.memory_info().rss - before_bytes < 64 << 20
    for rings in ([pb.RingGeometry(tickets=4096, runs_max=65535, pairs_max=1 << 24)], [ring] * 64):
        request = pb.RegisterWorkerRequest(slots=1, window_bytes=1, staging_bytes=1, rings=rings)
        other = BrokerConnection(daemon.broker, "greedier", 10.0)
        end = code_of(channel, store_method("RegisterWorker"), request.SerializeToString(), calls.token(other.token))
        assert end == "RESOURCE_EXHAUSTED"
        other.close()
    connection.close()


def test_a_window_of_more_bytes_than_there_are_is_refused(daemon: Daemon, channel: grpc.Channel) -> None:
    """Of a pull window 17/16 of its bytes are mapped. Counted in 64 bits, the least of those that do not fit wrap to a
    page; a worker that was granted one could have the daemon store wherever it liked."""
    for window_bytes in ((1 << 64) // 68 * 64 + 64, (1 << 63) + 64, (1 << 64) - 1):
        ring = pb.RingGeometry(tickets=2, runs_max=1, pairs_max=1)
        for kinds in (["pull"], ["shm"]):
            request = pb.RegisterWorkerRequest(
                slots=1, window_bytes=window_bytes, staging_bytes=4096, rings=[ring], window_kinds=kinds
            )
            connection = BrokerConnection(daemon.broker, "huge", 10.0)
            token = calls.token(connection.token)
            assert code_of(channel, store_method("RegisterWorker"), request.SerializeToString(), token) in (
                "RESOURCE_EXHAUSTED",
                "INVALID_ARGUMENT",
            )
            connection.close()


def test_names_that_are_paths_stay_names(daemon: Daemon, victim: Victim) -> None:
    outside = set(daemon.data_dir.parent.iterdir())
    for kind in ("../../outside", "/etc/passwd", "a\0b", "..", "x" * 64):
        key = SidecarKey(victim.pack.pack_id, victim.pack.build, kind, b"../" * 16)
        victim.client.put_sidecar(key, kind.encode())
        assert victim.client.get_sidecar(key) == kind.encode()
    for kind in ("map", "", "x" * 65):
        with pytest.raises(StoreError, match="INVALID_ARGUMENT"):
            victim.client.put_sidecar(SidecarKey(victim.pack.pack_id, victim.pack.build, kind), b"x")
    assert set(daemon.data_dir.parent.iterdir()) == outside
    names = [path.name for path in (daemon.data_dir / "sidecars").iterdir()]
    assert all(Path(name).suffix == ".sidecar" and name[:64].isalnum() for name in names)


def test_a_refusal_is_one_plain_line(daemon: Daemon) -> None:
    """Also where it quotes what was asked for."""
    kinds = ["\x1b[2J", "\u202e\nall is well", "x" * 128] * 9
    refusal = pytest.raises(StoreError, match="the worker can map")
    with StoreClient.connect(daemon.socket, daemon.broker) as client, refusal as refused:
        client.register_worker(1, 4096, 4096, [RingGeometry(2, 1, 1)], window_kinds=kinds)
    assert refused.value.message.isprintable()
    assert "\\x1b[2J, \\u202e\\nall is well" in refused.value.message
