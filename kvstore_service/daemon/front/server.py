"""The gRPC server: grpc.aio in an event loop and a thread of its own, for callers that are neither."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import grpc

from kvstore_service.daemon.front.rpc import MESSAGE_BYTES_MAX, Gate

CONNECTIONS_MAX = 512
STREAMS_MAX = 128  # of one connection: twice the calls that a worker may have in flight
PENDING_MAX = 256  # calls that the event loop has not seen yet; beyond, they are refused unseen (CANCELLED)
BURST = 4  # calls that are taken from one connection before others have their turn
METADATA_BYTES_MAX = 4 << 10  # of one call; ours are a few hundred
UNREAD_BYTES = 4 << 10  # of one stream, before its request is asked for
HANDSHAKE_MS = 5_000
IDLE_MS = 60_000  # a connection without a call; clients come back by themselves
START_S = 10.0

_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.http2.bdp_probe", 0),  # it would let every stream send 4 MiB that nobody reads yet
    ("grpc.http2.lookahead_bytes", UNREAD_BYTES),
    ("grpc.max_concurrent_streams", STREAMS_MAX),
    ("grpc.server.max_pending_requests", PENDING_MAX),
    ("grpc.server.max_pending_requests_hard_limit", PENDING_MAX),
    ("grpc.http2.max_requests_per_read", BURST),
    ("grpc.max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    ("grpc.max_connection_idle_ms", IDLE_MS),
)


class Server:
    """`equip(server)` adds the services; `gate()` and it run in the loop's thread."""

    def __init__(
        self, gate: Callable[[], Gate], equip: Callable[[grpc.aio.Server], None], connections_max: int
    ) -> None:
        self._make_gate = gate
        self._equip = equip
        self._connections_max = min(CONNECTIONS_MAX, connections_max)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rpc-loop", daemon=True)
        self._server: grpc.aio.Server | None = None
        self._gate: Gate | None = None

    def listen(self, addresses: dict[str, grpc.ServerCredentials | None]) -> None:
        """Takes every address, with TLS where credentials stand. RuntimeError where it cannot."""
        self._thread.start()
        self._await(self._listen(addresses)).result(START_S)

    def serve(self) -> None:
        assert self._server is not None
        self._await(self._server.start()).result(START_S)

    def stop(self, grace_s: float) -> None:
        """Ends what is in flight after `grace_s`, and returns when no handler runs any more. Idempotent."""
        if not self._thread.is_alive():
            self._loop.close()  # of a server that never listened
            return
        if self._server is not None:
            self._await(self._server.stop(grace_s)).result(grace_s + 5.0)
        if self._gate is not None:
            self._gate.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5.0)

    async def _listen(self, addresses: dict[str, grpc.ServerCredentials | None]) -> None:
        self._gate = self._make_gate()
        limit = ("grpc.max_allowed_incoming_connections", self._connections_max)
        server = self._server = grpc.aio.server(interceptors=[self._gate], options=(*_OPTIONS, limit))
        self._equip(server)
        for address, credentials in addresses.items():
            if credentials is None:
                server.add_insecure_port(address)
            else:
                server.add_secure_port(address, credentials)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _await(self, coroutine: Any) -> "Future[None]":
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
