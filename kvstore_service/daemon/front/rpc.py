"""The gate before every call: who calls and until when is judged by the metadata, before a byte of the request is
awaited; then one answer per idempotency key, and typed errors.

A call passes  1. identity and deadline  2. its place among the calls in flight  3. its caller's turn
               4. its request, which has to come soon  5. a thread of its lane.
Steps 1 to 4 hold no thread.
"""

import asyncio
import errno
import logging
import re
import secrets
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc
from google.protobuf import any_pb2, descriptor_pool, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from kvstore_service.daemon import logs
from kvstore_service.daemon.front import fields, health
from kvstore_service.daemon.front.call import ANYBODY, Call, Caller
from kvstore_service.daemon.front.lanes import OPERATORS, STREAMS, WORKERS, Lane, Place
from kvstore_service.daemon.front.replies import Replies
from kvstore_service.daemon.store.registry import Registry
from kvstore_service.shared.types import StoreError, printable

TOKEN_ENTRY = "kvstore-token"
REQUEST_ID_ENTRY = "kvstore-request-id"
DEADLINE_S_MAX = 24 * 3600.0
MESSAGE_BYTES_MAX = 4 << 20
ERROR_LETTERS_MAX = 1000
DOMAIN = "kvstore"
_WORKERS = "/kvstore.v1.StoreService/"
_ADMIN = "/kvstore.v1.AdminService/"
_FULL = {
    errno.ENOSPC: "DISK_FULL",
    errno.EDQUOT: "DISK_FULL",
    errno.EMFILE: "NO_DESCRIPTORS",
    errno.ENFILE: "NO_DESCRIPTORS",
    errno.ENOMEM: "NO_MEMORY",
}

log = logging.getLogger("kvstored.rpc")
refusals = logs.Sparse(log)

_Guarded = Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext], Awaitable[None]]


class Gate(grpc.aio.ServerInterceptor):
    """Stands before every method. Belongs to one event loop."""

    def __init__(
        self,
        registry: Registry,
        replies: Replies,
        worker_uids: frozenset[int],
        admin_uids: frozenset[int],
        tls_subjects: frozenset[str],
        observe: Callable[[str, float], None] = lambda method, took_s: None,
    ) -> None:
        """`observe(method, seconds)` is called for every call that was answered."""
        self._registry = registry
        self._replies = replies
        self._worker_uids = worker_uids
        self._admin_uids = admin_uids
        self._tls_subjects = tls_subjects
        self._observe = observe
        self._workers = Lane("rpc", WORKERS)
        self._operators = Lane("operator", OPERATORS)
        self._streams = Lane("stream", STREAMS)

    def close(self) -> None:
        """After the server has stopped; returns when no handler runs any more."""
        for lane in (self._workers, self._operators, self._streams):
            lane.close()

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(details)
        if handler is None or details.method == health.METHODS + "Watch":
            return None  # UNIMPLEMENTED
        # To gRPC every method is one of streams of bytes: it then reads a request when it is asked to, not before.
        return grpc.stream_stream_rpc_method_handler(self._guarded(details.method, handler))

    def _guarded(self, method: str, handler: grpc.RpcMethodHandler) -> _Guarded:
        if method.startswith(health.METHODS):
            return self._open(method, handler)
        many = handler.request_streaming or handler.response_streaming
        lane = self._streams if many else self._workers if method.startswith(_WORKERS) else self._operators

        async def guarded(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
            call = Call(method, _request_id(context), time.monotonic(), ANYBODY)
            try:
                call.deadline_s += _time_remaining(context)
                call.caller = self._judge(method, context)
                async with lane.place(call.caller) as place, asyncio.timeout(call.time_remaining()):
                    if handler.request_streaming:
                        await _converse(call, handler, requests, context)
                    else:
                        request = await place.receive(lambda: self._only(lane, requests))
                        answer = self._stream if handler.response_streaming else self._unary
                        await answer(call, handler, request, context, place)
                took_s = time.monotonic() - call.began_s
                self._observe(method, took_s)
                logs.event(log, logging.DEBUG, "answered", **_fields(call))
            except asyncio.CancelledError:
                call.cancelled = True
                if call.undo is not None:
                    lane.submit(call.take_back)
                raise
            except grpc.aio.AbortError:
                raise
            except TimeoutError:
                await _refuse(call, StoreError("DEADLINE_EXCEEDED", "the call's deadline has passed"), context)
            except Exception as error:
                await _refuse(call, error, context)

        return guarded

    def _open(self, method: str, handler: grpc.RpcMethodHandler) -> _Guarded:
        """Health, which anybody may call. Its answer depends on nothing that is asked, so its request is not awaited:
        whatever strangers send takes no more memory than gRPC gives a call that nobody reads, and no thread."""

        async def answer(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
            call = Call(method, _request_id(context), time.monotonic(), ANYBODY)
            await context.write(handler.response_serializer(handler.unary_unary(None, call)))
            self._observe(method, time.monotonic() - call.began_s)
            logs.event(log, logging.DEBUG, "answered", **_fields(call))

        return answer

    async def _only(self, lane: Lane, requests: AsyncIterator[bytes]) -> bytes:
        """The one request of a call. DEADLINE_EXCEEDED if it does not come, INVALID_ARGUMENT if there is none."""
        timeout_s = lane.limits.request_s
        try:
            async with asyncio.timeout(timeout_s):
                return await anext(requests)
        except TimeoutError:
            raise StoreError(
                "DEADLINE_EXCEEDED", f"no request came within {timeout_s:g} s", reason="REQUEST_MISSING"
            ) from None
        except StopAsyncIteration:
            raise StoreError("INVALID_ARGUMENT", "the call has no request") from None

    async def _unary(
        self, call: Call, handler: grpc.RpcMethodHandler, request: bytes, context: Any, place: Place
    ) -> None:
        def answer() -> bytes:
            logs.request_id.set(call.request_id)
            call.require_active()
            message = _decoded(call, handler, request)

            def act() -> bytes:
                answered: bytes = handler.response_serializer(handler.unary_unary(message, call))
                return answered

            if key := getattr(message, "idempotency_key", ""):
                call.stands = lambda: not self._replies.withdraw(call.caller.name, call.method, key)
                return self._replies.once(call.caller.name, call.method, key, request, act, call.time_remaining())
            return act()

        try:
            answered = await place.run(answer)
        except asyncio.CancelledError:
            call.cancelled = True  # seen by the handler, which may still run
            raise
        await context.write(answered)

    async def _stream(
        self, call: Call, handler: grpc.RpcMethodHandler, request: bytes, context: Any, place: Place
    ) -> None:
        """Holds a thread only while the next answer is made, none while the peer does not read."""
        responses: Iterator[Message] | None = None

        def following() -> bytes | None:
            nonlocal responses
            logs.request_id.set(call.request_id)
            if responses is None:
                responses = iter(handler.unary_stream(_decoded(call, handler, request), call))
            response = next(responses, None)
            return None if response is None else handler.response_serializer(response)

        try:
            while (answered := await place.run(following)) is not None:
                await context.write(answered)
        except asyncio.CancelledError:
            call.cancelled = True
            raise

    def _judge(self, method: str, context: grpc.aio.ServicerContext) -> Caller:
        """By the metadata alone. UNAUTHENTICATED, PERMISSION_DENIED."""
        if not context.peer().startswith("unix"):
            # Beyond the machine the peer is known by its certificate, and descriptors cannot reach it.
            if method.startswith(_WORKERS):
                raise StoreError("PERMISSION_DENIED", "StoreService is not served over TCP")
            return Caller(f"tls {self._subject(context)}", -1)
        token = dict(context.invocation_metadata() or ()).get(TOKEN_ENTRY)
        if not token:
            raise StoreError(
                "UNAUTHENTICATED", f"metadata {TOKEN_ENTRY} is missing; the broker hands it out", reason="TOKEN_MISSING"
            )
        peer = self._registry.worker(str(token))
        if method.startswith(_WORKERS):
            if peer.uid not in self._worker_uids:
                raise StoreError("PERMISSION_DENIED", f"user id {peer.uid} is not in allow_uids", reason="UID_REFUSED")
            if peer.operator:
                raise StoreError("PERMISSION_DENIED", "an operator is no worker; say hello as one")
        if method.startswith(_ADMIN) and peer.uid not in self._admin_uids:
            raise StoreError("PERMISSION_DENIED", f"user id {peer.uid} is not in admin_uids", reason="UID_REFUSED")
        return Caller(peer.token, peer.uid, peer)

    def _subject(self, context: grpc.aio.ServicerContext) -> str:
        """Which of the names of the peer's certificate may administer. PERMISSION_DENIED."""
        known: dict[str, list[bytes]] = context.auth_context() or {}
        names = [
            name.decode(errors="replace")
            for key in ("x509_common_name", "x509_subject_alternative_name")
            for name in known.get(key, ())
        ]
        for name in names:
            if name in self._tls_subjects:
                return name
        raise StoreError(
            "PERMISSION_DENIED",
            f"certificate of {names}: none of its names is in tls_subjects",
            reason="SUBJECT_REFUSED",
        )


def _time_remaining(context: grpc.aio.ServicerContext) -> float:
    remaining_s: float | None = context.time_remaining()
    if remaining_s is None or remaining_s > DEADLINE_S_MAX:
        raise StoreError(
            "INVALID_ARGUMENT", "a deadline is mandatory; give one of at most a day", reason="DEADLINE_MISSING"
        )
    return remaining_s


async def _converse(call: Call, handler: grpc.RpcMethodHandler, requests: AsyncIterator[bytes], context: Any) -> None:
    """A stream of requests: reflection, which answers at once and in the event loop."""

    async def decoded() -> AsyncIterator[Message]:
        async for request in requests:
            yield _decoded(call, handler, request)

    async for response in handler.stream_stream(decoded(), context):
        await context.write(handler.response_serializer(response))


def _decoded(call: Call, handler: grpc.RpcMethodHandler, received: bytes) -> Message:
    method = descriptor_pool.Default().FindMethodByName(call.method.strip("/").replace("/", "."))
    fields.check_size(received, method.input_type)
    try:
        request: Message = handler.request_deserializer(received)
    except DecodeError as error:
        raise StoreError("INVALID_ARGUMENT", f"the request cannot be decoded: {error}") from None
    fields.check(request)
    return request


async def _refuse(call: Call, error: Exception, context: Any) -> None:
    """Ends the call with the error's status, and logs it."""
    failure, level = _failure(error)
    if level == logging.ERROR and failure.code == "INTERNAL":
        logs.request_id.set(call.request_id)
        log.exception("call failed", exc_info=error)
    if len(failure.message) > ERROR_LETTERS_MAX:  # they quote what a peer sent
        failure.message = failure.message[:ERROR_LETTERS_MAX] + "..."
    failure.message = printable(failure.message)
    key = (call.caller.uid, call.method, failure.code, failure.reason)
    refusals.event(key, level, "refused", code=failure.code, reason=failure.message, **_fields(call))
    error.__traceback__ = None  # its frames hold the request, and a future in them holds the error
    details = ("grpc-status-details-bin", _status(failure).SerializeToString())
    await context.abort(grpc.StatusCode[failure.code], failure.message, (details, (REQUEST_ID_ENTRY, call.request_id)))


def _failure(error: Exception) -> tuple[StoreError, int]:
    """What the caller hears of an error, and the level at which it is logged."""
    if isinstance(error, StoreError):
        return error, logging.INFO
    reason, text = "", f"{type(error).__name__}: {error}"
    if isinstance(error, sqlite3.Error):
        text = f"the catalogue failed: {error}"
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            reason = "DISK_FULL"
    elif isinstance(error, OSError):
        reason, text = _FULL.get(error.errno or 0, ""), str(error)
    return StoreError("RESOURCE_EXHAUSTED" if reason else "INTERNAL", text, reason=reason), logging.ERROR


def _fields(call: Call) -> dict[str, object]:
    """Of its line in the log."""
    took_ms = (time.monotonic() - call.began_s) * 1e3
    return {"method": call.method, "took_ms": took_ms, "request": call.request_id}


def _request_id(context: grpc.aio.ServicerContext) -> str:
    given = dict(context.invocation_metadata() or ()).get(REQUEST_ID_ENTRY, "")
    return given if isinstance(given, str) and re.fullmatch(r"[\w.-]{1,64}", given) else secrets.token_hex(8)


def _status(error: StoreError) -> status_pb2.Status:
    """The error as google.rpc.Status with ErrorInfo, QuotaFailure and RetryInfo."""
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)]
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
