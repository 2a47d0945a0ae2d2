"""What holds for every call of the daemon: a token, a deadline, one answer per idempotency key, and typed errors."""

import errno
import hashlib
import logging
import re
import secrets
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from kvstore_service.daemon import logs
from kvstore_service.daemon.store.registry import Registry, Worker
from kvstore_service.shared.types import StoreError

TOKEN_ENTRY = "kvstore-token"
REQUEST_ID_ENTRY = "kvstore-request-id"
DEADLINE_S_MAX = 24 * 3600.0
REPLIES_MAX = 256  # per worker
MESSAGE_BYTES_MAX = 4 << 20
ITEMS_MAX = 16384  # of a repeated message
IDEMPOTENCY_KEY_MAX = 128
ERROR_LETTERS_MAX = 1000
_OPEN = "/grpc.health.v1."
_WORKERS = "/kvstore.v1.StoreService/"
_ADMIN = "/kvstore.v1.AdminService/"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_T = TypeVar("_T")

log = logging.getLogger("kvstored.rpc")


def caller(context: grpc.ServicerContext, registry: Registry) -> Worker:
    """The worker whose token the call carries. UNAUTHENTICATED."""
    token = dict(context.invocation_metadata()).get(TOKEN_ENTRY)
    if not token:
        raise StoreError("UNAUTHENTICATED", f"metadata {TOKEN_ENTRY} is missing; the broker hands it out")
    return registry.worker(token)


class Replies:
    """The latest answers of each worker's mutations, by idempotency key. A repeated call gets the first one's answer,
    and waits for it if it is still under way; failures are not kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: dict[str, OrderedDict[tuple[str, str], tuple[bytes, Future[Message]]]] = {}

    def once(self, token: str, method: str, request: Any, act: Callable[[], Message], timeout_s: float) -> Message:
        digest = hashlib.sha256(request.SerializeToString(deterministic=True)).digest()
        name = (method, request.idempotency_key)
        with self._lock:
            answers = self._answers.setdefault(token, OrderedDict())
            first = answers.get(name)
            if first is None:
                future: Future[Message] = Future()
                answers[name] = (digest, future)
                while len(answers) > REPLIES_MAX:
                    answers.popitem(last=False)
        if first is not None:
            return _repeat(first, digest, timeout_s)
        try:
            future.set_result(act())
        except BaseException as error:
            with self._lock:
                answers.pop(name, None)
            future.set_exception(error)
            raise
        return future.result()

    def forget(self, worker: Worker) -> None:
        with self._lock:
            self._answers.pop(worker.token, None)


def _repeat(first: tuple[bytes, Future[Message]], digest: bytes, timeout_s: float) -> Message:
    if first[0] != digest:
        raise StoreError("INVALID_ARGUMENT", "the idempotency key was used with another request")
    try:
        return first[1].result(timeout_s)
    except FutureTimeout:
        raise StoreError("DEADLINE_EXCEEDED", "the first call with this idempotency key is still under way") from None


class Gate(grpc.ServerInterceptor):
    """Stands before every method but health's. Who calls is settled before the request is decoded: of a refused call
    nothing but its metadata is read."""

    def __init__(
        self, registry: Registry, replies: Replies, worker_uids: frozenset[int], admin_uids: frozenset[int]
    ) -> None:
        self._registry = registry
        self._replies = replies
        self._worker_uids = worker_uids
        self._admin_uids = admin_uids

    def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        handler = continuation(details)
        if handler is None or details.method.startswith(_OPEN):
            return handler
        kind = "_".join(
            "stream" if many else "unary" for many in (handler.request_streaming, handler.response_streaming)
        )
        wrap = self._stream if handler.response_streaming else self._unary
        guarded = wrap(details.method, getattr(handler, kind), _decoder(handler))
        # Without a deserialiser gRPC hands the bytes on as they came.
        return getattr(grpc, f"{kind}_rpc_method_handler")(guarded, None, handler.response_serializer)

    def _unary(
        self, method: str, behaviour: Callable[..., Message], decode: Callable[[Any], Any]
    ) -> Callable[..., Message]:
        def call(received: Any, context: grpc.ServicerContext) -> Message:
            def act() -> Message:
                token = self._check(method, context)
                request = decode(received)
                key = getattr(request, "idempotency_key", "")
                if len(key) > IDEMPOTENCY_KEY_MAX:
                    raise StoreError(
                        "INVALID_ARGUMENT", f"an idempotency key has at most {IDEMPOTENCY_KEY_MAX} letters"
                    )
                if key:
                    timeout_s = min(context.time_remaining(), DEADLINE_S_MAX)
                    return self._replies.once(token, method, request, lambda: behaviour(request, context), timeout_s)
                return behaviour(request, context)

            return _answered(method, context, act)

        return call

    def _stream(
        self, method: str, behaviour: Callable[..., Iterator[Message]], decode: Callable[[Any], Any]
    ) -> Callable[..., Iterator[Message]]:
        def call(received: Any, context: grpc.ServicerContext) -> Iterator[Message]:
            def begin() -> Iterator[Message]:
                self._check(method, context)
                return iter(behaviour(decode(received), context))

            responses = _answered(method, context, begin, part=True)
            while True:
                response = _answered(method, context, lambda: next(responses, None), part=True)
                if response is None:
                    return
                yield response

        return call

    def _check(self, method: str, context: grpc.ServicerContext) -> str:
        remaining_s = context.time_remaining()
        if remaining_s is None or remaining_s > DEADLINE_S_MAX:
            raise StoreError("INVALID_ARGUMENT", "a deadline is mandatory; give one of at most a day")
        if not context.peer().startswith("unix"):
            # Beyond the machine the peer is known by its certificate, and descriptors cannot reach it.
            if method.startswith(_WORKERS):
                raise StoreError("PERMISSION_DENIED", "StoreService is not served over TCP")
            return f"tls {context.peer()}"
        peer = caller(context, self._registry)
        if method.startswith(_WORKERS) and peer.uid not in self._worker_uids:
            raise StoreError("PERMISSION_DENIED", f"user id {peer.uid} is not in allow_uids")
        if method.startswith(_ADMIN) and peer.uid not in self._admin_uids:
            raise StoreError("PERMISSION_DENIED", f"user id {peer.uid} is not in admin_uids")
        return peer.token


def _decoder(handler: grpc.RpcMethodHandler) -> Callable[[Any], Any]:
    """From what came over the wire to what the handler takes: one request, or an iterator of them. INVALID_ARGUMENT."""

    def decode(received: bytes) -> Message:
        try:
            request: Message = handler.request_deserializer(received)
        except DecodeError as error:
            raise StoreError("INVALID_ARGUMENT", f"the request cannot be decoded: {error}") from None
        for field, items in request.ListFields():
            if field.message_type is not None and not isinstance(items, Message) and len(items) > ITEMS_MAX:
                raise StoreError("INVALID_ARGUMENT", f"{len(items)} {field.name}; at most {ITEMS_MAX}")
        return request

    return (lambda many: map(decode, many)) if handler.request_streaming else decode


def _answered(method: str, context: grpc.ServicerContext, act: Callable[[], _T], part: bool = False) -> _T:
    """The result of `act`, or the call aborted with its error's status; one log line either way, or, for `part` of a
    stream, if it fails."""
    logs.request_id.set(_request_id(context))
    started_s = time.monotonic()

    def log_call(level: int, message: str, **fields: object) -> None:
        logs.event(log, level, message, method=method, took_ms=(time.monotonic() - started_s) * 1e3, **fields)

    try:
        result = act()
        if not part:
            log_call(logging.DEBUG, "answered")
        return result
    except StoreError as error:
        failure = error
        level = logging.INFO
    except sqlite3.Error as error:
        full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        failure = StoreError("RESOURCE_EXHAUSTED" if full else "INTERNAL", f"the catalogue failed: {error}")
        level = logging.ERROR
    except OSError as error:
        failure = StoreError("RESOURCE_EXHAUSTED" if error.errno in _FULL else "INTERNAL", str(error))
        level = logging.ERROR
    except Exception as error:
        if not context.is_active():
            raise  # the peer has left, and nobody waits for a status
        log.exception("call failed")
        failure = StoreError("INTERNAL", f"{type(error).__name__}: {error}")
        level = logging.ERROR
    if len(failure.message) > ERROR_LETTERS_MAX:  # they quote what a peer sent
        failure.message = failure.message[:ERROR_LETTERS_MAX] + "..."
    log_call(level, "refused", code=failure.code, reason=failure.message)
    context.set_trailing_metadata(((REQUEST_ID_ENTRY, logs.request_id.get()),))
    context.abort_with_status(rpc_status.to_status(_status(failure)))
    raise AssertionError("abort returned")


def _request_id(context: grpc.ServicerContext) -> str:
    given = dict(context.invocation_metadata()).get(REQUEST_ID_ENTRY, "")
    return given if re.fullmatch(r"[\w.-]{1,64}", given) else secrets.token_hex(8)


def _status(error: StoreError) -> status_pb2.Status:
    """The error as google.rpc.Status with ErrorInfo, QuotaFailure and RetryInfo."""
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.code, domain="kvstore")]
    if error.violations:
        violations = [
            error_details_pb2.QuotaFailure.Violation(subject=item.subject, description=item.description)
            for item in error.violations
        ]
        details.append(error_details_pb2.QuotaFailure(violations=violations))
    if error.retry_after_s is not None:
        seconds, part = divmod(error.retry_after_s, 1)
        delay = duration_pb2.Duration(seconds=int(seconds), nanos=int(part * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    return status_pb2.Status(code=code_pb2.Code.Value(error.code), message=error.message, details=packed)
