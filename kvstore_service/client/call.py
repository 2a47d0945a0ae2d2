"""What both clients are made of: a broker connection, a channel, and the one place where gRPC's errors are typed."""

import atexit
import contextlib
import math
import random
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import grpc
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from kvstore_service.client.connection import BrokerConnection
from kvstore_service.shared.types import StoreError, Violation

CONNECTION_BROKEN = "CONNECTION_BROKEN"
COMMIT_TIMEOUT_S = 120.0
ALIVE_S = 0.1
LATE_S = 0.5  # that gRPC may take to say that a deadline has passed
RECONNECT_S = 0.05
CLOSE_S = 1.0


# A connection of its own: a shared one may still be backing off from a daemon that was gone.
CHANNEL_OPTIONS = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]


def local_channel(socket: str) -> grpc.Channel:
    return grpc.insecure_channel(f"unix:{socket}", options=CHANNEL_OPTIONS)


class Client:
    """Thread-safe. What it holds in the daemon lives until `close`."""

    def __init__(self, channel: grpc.Channel, connection: BrokerConnection | None, timeout_s: float) -> None:
        """Takes both over. `connection` says who calls; on another machine the channel's certificate does."""
        self._timeout_s = timeout_s
        self._connection = connection
        self._channel = channel
        self._alive: Callable[[], None] | None = None
        self._count_lock = threading.Lock()
        self._closed = False
        self.rpc_count = 0
        self.deadline_s = math.inf  # monotonic; no call lasts longer, whatever its own deadline
        _clients.add(self)

    @property
    def draining(self) -> bool:
        """Whether the daemon refuses new work; asks it. UNAVAILABLE if it does not answer."""
        request = health_pb2.HealthCheckRequest(service="")
        answer = self._call(health_pb2_grpc.HealthStub(self._channel).Check, request)
        return bool(answer.status != health_pb2.HealthCheckResponse.SERVING)

    @property
    def gone(self) -> bool:
        """Whether the daemon has ended this client's connection, and freed what it held. Costs no call.

        Of another machine's daemon nothing is held, and it counts as gone when it does not answer."""
        return self._connection is None or self._connection.ended

    def require_serving(self) -> None:
        """UNAVAILABLE unless the daemon answers and takes new work."""
        if self.draining:
            raise StoreError("UNAVAILABLE", "the daemon is draining", reason="DRAINING")

    def guard(self, alive: Callable[[], None]) -> None:
        """Asks `alive` before and, ten times a second, during every later call: what it raises ends the call."""
        self._alive = alive

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Ends the connection; the daemon then frees all that this client held. Idempotent."""
        if not self._closed:
            self._closed = True
            # It waits for every call's end, which never comes to one that an interrupt kept from getting its thread.
            closing = threading.Thread(target=self._channel.close, daemon=True)
            closing.start()
            closing.join(CLOSE_S)
            if self._connection is not None:
                self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _metadata(self, request_id: str) -> tuple[tuple[str, str], ...]:
        token = () if self._connection is None else (("kvstore-token", self._connection.token),)
        return (*token, ("kvstore-request-id", request_id))

    def _call(self, method: Any, request: Any, timeout_s: float | None = None) -> Any:
        """One call with a deadline. Within it the call is made again if the daemon was too busy to take it, or if the
        connection broke and the daemon lives; a mutation's idempotency key sees to it that it is done once."""
        request_id = secrets.token_hex(8)
        deadline_s = min(self.deadline_s, time.monotonic() + (timeout_s or self._timeout_s))
        if "idempotency_key" in request.DESCRIPTOR.fields_by_name:
            request.idempotency_key = secrets.token_hex(16)
        while True:
            with self._count_lock:
                self.rpc_count += 1
            try:
                with self._typed_errors(request_id):
                    left_s = max(0.0, deadline_s - time.monotonic())
                    return self._made(method, request, left_s, request_id)
            except StoreError as error:
                wait_s = self._pause_s(error)
                if wait_s is None or time.monotonic() + wait_s >= deadline_s:
                    raise
                time.sleep(wait_s)

    def _made(self, method: Any, request: Any, timeout_s: float, request_id: str) -> Any:
        """One call, guarded if somebody guards this client."""
        metadata = self._metadata(request_id)
        if self._alive is None:
            return method(request, timeout=timeout_s, metadata=metadata)
        self._alive()
        deadline_s = time.monotonic() + timeout_s
        return _guarded(method.future(request, timeout=timeout_s, metadata=metadata), self._alive, deadline_s)

    def _pause_s(self, error: StoreError) -> float | None:
        """How long to wait before the same call again; None if it would not help."""
        if error.reason == "OVERLOADED" and error.retry_after_s is not None:
            return error.retry_after_s * (1.0 + random.random())  # so that those who were refused together part
        return RECONNECT_S if error.reason == CONNECTION_BROKEN and not self.gone else None

    @contextlib.contextmanager
    def _typed_errors(self, request_id: str) -> Iterator[None]:
        if self._closed:
            raise StoreError("FAILED_PRECONDITION", "the client is closed")
        try:
            yield
        except grpc.RpcError as error:
            raise _store_error(error, request_id) from error


def _guarded(call: Any, alive: Callable[[], None], deadline_s: float) -> Any:
    """gRPC's deadline comes by a thread of its own, which an interrupt in the middle of a call can leave blocked."""
    try:
        while True:
            try:
                return call.result(timeout=ALIVE_S)
            except grpc.FutureTimeoutError:
                alive()
                if time.monotonic() > deadline_s + LATE_S:
                    raise StoreError("DEADLINE_EXCEEDED", "the call's deadline has passed") from None
    except BaseException:
        call.cancel()
        raise


_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A channel that is open when the interpreter ends can hold it up."""
    for client in list(_clients):
        client.close()


def _store_error(error: grpc.RpcError, request_id: str) -> StoreError:
    """gRPC's error with what google.rpc's details add to it."""
    retry_after_s: float | None = None
    reason = ""
    violations: list[Violation] = []
    status = rpc_status.from_call(error) if isinstance(error, grpc.Call) else None
    for detail in status.details if status is not None else ():
        quota, retry = error_details_pb2.QuotaFailure(), error_details_pb2.RetryInfo()
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(quota):
            violations.extend(Violation(item.subject, item.description) for item in quota.violations)
        elif detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    code = error.code().name if isinstance(error, grpc.Call) else "UNKNOWN"
    message = error.details() if isinstance(error, grpc.Call) else str(error)
    if code == "UNAVAILABLE" and status is None:
        # gRPC's own word; the daemon's, such as a disk's error, comes with its status
        message, reason = f"the connection to the daemon failed: {message}", CONNECTION_BROKEN
    if code == "CANCELLED" and status is None:  # by gRPC itself, before the daemon saw the call
        code, message, reason = "UNAVAILABLE", "the daemon has more calls than it can take", CONNECTION_BROKEN
    if code == "DEADLINE_EXCEEDED" and status is None:  # the client's own clock, for which gRPC has many words
        message = "the call's deadline has passed"
    return StoreError(code, message or code, retry_after_s, violations, request_id, reason)
