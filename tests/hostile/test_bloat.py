"""What callers send, ask for again and attach takes little of the daemon's memory, whatever it is."""

import asyncio
import contextlib
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore_service._proto import store_service_pb2 as pb
from kvstore_service.client import AdminClient, SidecarKey, StoreClient, StoreError
from kvstore_service.client.connection import BrokerConnection
from kvstore_service.daemon.front import lanes
from kvstore_service.daemon.front.call import Caller
from kvstore_service.daemon.front.replies import REPLIES_BYTES_MAX, Replies
from kvstore_service.daemon.store.prefixes import _walk
from kvstore_service.daemon.store.registry import SESSION_PACKS_MAX, Limits, Registry
from kvstore_service.daemon.store.sessions import Sessions
from kvstore_service.daemon.store.slots import Slots
from kvstore_service.daemon.store.state import State
from kvstore_service.shared.types import PackRef, PackRow, PrefixCandidate
from tests.hostile import calls
from tests.hostile.slow_peer import SlowPeer
from tests.hostile.victim import Victim
from tests.support.daemon_process import Daemon
from tests.support.world import LAYOUT

WORKERS, CALLS_EACH = 4, 4
REQUEST_BYTES = (4 << 20) - 4096
MOST_BYTES = 160 << 20  # requests under way, one of them decoded, and what malloc keeps: 16 to 110 MiB are seen
STRANGERS, STREAMS = 6, 64
STRANGERS_BYTES = 64 << 20  # about 20 are seen; 500 if requests of health were read
SIDECAR_BYTES = 192 << 20
SESSIONS_BYTES = 32 << 20
LOOKUP_BYTES = 8 << 20  # about 2 are seen; 64 if each pack's chain were a list


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    directory: Path = tmp_path_factory.mktemp("bloat")
    with Daemon(directory) as running:
        yield running


@contextlib.contextmanager
def grows_little(daemon: Daemon, most_bytes: int) -> Iterator[None]:
    """By its peak, shared memory that it touches included."""
    Path(f"/proc/{daemon.pid}/clear_refs").write_text("5")  # the peak is now what is resident
    before = psutil.Process(daemon.pid).memory_info().rss
    yield
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    (peak_kib,) = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")]
    assert (peak_kib << 10) - before < most_bytes


def empty_items(session: str) -> bytes:
    """Two bytes each, and some hundred once they are decoded."""
    return pb.HintImportanceRequest(session_id=session).SerializeToString() + b"\x12\x00" * (REQUEST_BYTES // 2)


def numbers(session: str) -> bytes:
    counts = pb.PackImportance(hot_records=[16383] * (REQUEST_BYTES // 2))
    return pb.HintImportanceRequest(session_id=session, packs=[counts]).SerializeToString()


@pytest.mark.parametrize("request_of", [empty_items, numbers])
def test_requests_of_very_many_items(daemon: Daemon, request_of: Callable[[str], bytes]) -> None:
    with contextlib.ExitStack() as stack:
        tokens, requests = [], []
        for number in range(WORKERS):
            client = stack.enter_context(StoreClient.connect(daemon.socket, daemon.broker, f"many-{number}", 30.0))
            tokens.append(calls.token(client._connection.token))
            requests.append(request_of(client.open_session(LAYOUT, 1024)))
        with grows_little(daemon, MOST_BYTES):
            asked = []
            for token, request in zip(tokens, requests, strict=True):
                channel = stack.enter_context(grpc.insecure_channel(f"unix:{daemon.socket}"))
                hint = channel.stream_stream("/kvstore.v1.StoreService/HintImportance")
                asked += [hint(iter([request]), timeout=30, metadata=token) for _ in range(CALLS_EACH)]
            for call in asked:
                with pytest.raises(grpc.RpcError) as raised:
                    list(call)
                assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_requests_that_are_not_read_yet_are_not_taken(daemon: Daemon) -> None:
    """Behind calls whose requests do not come, others of the same caller wait outside of the daemon."""
    waiting = lanes.WORKERS.caller_calls - 2 * lanes.WORKERS.caller_threads
    with (
        contextlib.closing(BrokerConnection(daemon.broker, "pushing", 10.0)) as connection,
        grpc.insecure_channel(f"unix:{daemon.socket}") as channel,
        grows_little(daemon, MOST_BYTES),
    ):
        lookup = channel.stream_stream("/kvstore.v1.StoreService/LookupPrefix")
        late = [calls.Late() for _ in range(lanes.WORKERS.caller_threads)]
        metadata = calls.token(connection.token)
        asked = [lookup(request, timeout=3, metadata=metadata) for request in late]
        asked += [lookup(iter([bytes(REQUEST_BYTES)]), timeout=3, metadata=metadata) for _ in range(waiting)]
        for call in asked:
            with pytest.raises(grpc.RpcError):
                list(call)
        for request in late:
            request.end()


@pytest.mark.parametrize("method", ["/grpc.health.v1.Health/Check", "/kvstore.v1.StoreService/LookupPrefix"])
def test_strangers_that_push_slowly(daemon: Daemon, method: str) -> None:
    """No request is read before its caller is known, nor one of health at all: what strangers send, again and again,
    stays outside of the daemon. Whoever has a token is served meanwhile."""
    with (
        contextlib.ExitStack() as stack,
        StoreClient.connect(daemon.socket, daemon.broker, "honest", 30.0) as client,
        grpc.insecure_channel(f"unix:{daemon.socket}") as channel,
        ThreadPoolExecutor(STRANGERS) as pool,
    ):
        peers = [stack.enter_context(contextlib.closing(SlowPeer(daemon.socket, method))) for _ in range(STRANGERS)]
        with grows_little(daemon, STRANGERS_BYTES):
            pushing = [pool.submit(peer.push, STREAMS, REQUEST_BYTES) for peer in peers]
            while not all(future.done() for future in pushing):
                client.lookup_prefix(LAYOUT.fingerprint, [])
            for future in pushing:
                future.result()
        assert all(peer.ended for peer in peers)
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5.0)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_requests_of_a_user_that_come_at_once_are_few() -> None:
    """However many callers they have."""
    reading, most = 0, 0

    async def read() -> bytes:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        await asyncio.sleep(0.01)
        reading -= 1
        return b""

    async def call(lane: lanes.Lane, number: int) -> None:
        async with lane.place(Caller(f"caller {number % 16}", 7)) as place:
            await place.receive(read)

    async def crowd() -> None:
        lane = lanes.Lane("test", lanes.WORKERS)
        await asyncio.gather(*(call(lane, number) for number in range(64)))
        lane.close()

    asyncio.run(asyncio.wait_for(crowd(), 30.0))
    assert most == lanes.WORKERS.user_requests


def test_replies_are_bounded_by_their_bytes() -> None:
    replies = Replies()
    for number in range(64):
        replies.once("caller", "method", f"key {number}", b"request", lambda: bytes(60_000), 1.0)
    kept = [answer.future.result() for answer in replies._answers["caller"].values()]
    assert kept
    assert sum(map(len, kept)) <= REPLIES_BYTES_MAX
    assert replies.once("caller", "method", "key 63", b"request", lambda: b"anew", 1.0) == bytes(60_000)


def test_a_caller_that_has_left_leaves_no_replies() -> None:
    """Its last call may come to its turn after its end."""
    replies = Replies()
    replies.forget("caller")

    def refuse() -> bytes:
        raise StoreError("UNAUTHENTICATED", "the worker's broker connection has ended")

    with pytest.raises(StoreError):
        replies.once("caller", "method", "key", b"request", refuse, 1.0)
    assert not replies._answers


def test_sessions_share_what_they_hold_of_a_pack() -> None:
    registry = Registry(Limits(8, 8, 8, 8, 1 << 30, 1 << 30))
    worker = registry.add_worker(7, 1, "worker")

    def row(build: bytes) -> PackRow:
        return PackRow(PackRef(bytes(32), build, 0, 256), bytes(32), LAYOUT, worker.tenant, 4096, created_s=1.0)

    sessions = [registry.open(worker, LAYOUT, 1024) for _ in range(3)]
    for session, build in zip(sessions, (b"a" * 16, b"a" * 16, b"b" * 16), strict=True):
        registry.append(session, [row(build)])
    first, second, third = (session.packs[0] for session in sessions)
    assert first is second
    assert third.ref.build == b"b" * 16  # it has been written anew meanwhile
    for session in sessions:
        registry.close(session)
    assert registry.references_total() == 0
    assert not registry._rows


def test_packs_are_counted_in_every_session_that_has_them() -> None:
    """Forks and attachments cost a few bytes a pack, of which a user has no more than its share."""
    limits = Limits.shared(2, 64, 8, 1 << 30, 1 << 30)
    registry = Registry(limits)
    state = SimpleNamespace(registry=registry, acting=lambda worker, new: contextlib.nullcontext())
    sessions = Sessions(cast(State, state), cast(Slots, None))
    worker, other = (registry.add_worker(uid, 1, "worker") for uid in (7, 8))
    half = SESSION_PACKS_MAX // 4
    row = PackRow(PackRef(bytes(32), bytes(16), 0, 256), bytes(32), LAYOUT, worker.tenant, 4096)
    origin = registry.open(worker, LAYOUT, 1024)
    registry.append(origin, [row] * half)
    fork = sessions.fork(worker, origin.session_id)
    refusal = rf"packs in sessions of user id 7: {2 * half} of {2 * half} are in use, {half} more"
    with pytest.raises(StoreError, match=refusal):
        sessions.fork(worker, origin.session_id)
    assert list(worker.sessions) == [origin.session_id, fork.session_id]
    registry.append(registry.open(other, LAYOUT, 1024), [row] * 2 * half)
    registry.close(fork)
    sessions.fork(worker, origin.session_id)
    assert registry.references_total() == SESSION_PACKS_MAX
    assert sum(sys.getsizeof(session.packs) for session in registry.all()) < SESSIONS_BYTES
    for session in registry.all():
        registry.close(session)
    assert registry.references_total() == 0
    registry.append(registry.open(worker, LAYOUT, 1024), [row] * 2 * half)


def test_a_lookup_takes_memory_for_each_pack_once() -> None:
    """Not for every pack before it too: a chain of as many packs as a lookup may name took a gigabyte."""
    count, block = 4096, 256

    def row(index: int) -> PackRow:
        return PackRow(PackRef(index.to_bytes(32), bytes(16), index * block, block), bytes(32), LAYOUT, "uid-7", 4096)

    rows = {index.to_bytes(32): row(index) for index in range(count)}
    candidates = [PrefixCandidate(index * block, block, index.to_bytes(32)) for index in range(count)]
    tracemalloc.start()
    try:
        chain = _walk(candidates, lambda parent, item: item.token_digest, rows.get)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert chain == list(rows.values())
    assert peak_bytes < LOOKUP_BYTES


def test_large_sidecars_are_checked_in_pieces(daemon: Daemon) -> None:
    """Put again, and verified: their content is nobody's request."""
    with (
        StoreClient.connect(daemon.socket, daemon.broker, "indexer", 60.0) as client,
        AdminClient.connect(daemon.socket, daemon.broker, 60.0) as admin,
    ):
        victim = Victim(client, number=51)
        key = SidecarKey(victim.pack.pack_id, victim.pack.build, "large")
        content = bytes(SIDECAR_BYTES)
        client.put_sidecar(key, content)
        with grows_little(daemon, SIDECAR_BYTES // 2):
            client.put_sidecar(key, content)
            assert not any(found.bad_blocks or found.error for found in admin.verify([victim.pack.pack_id]))
        assert client.get_sidecar(key) == content
        victim.close()
