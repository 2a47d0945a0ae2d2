"""Metrics over HTTP on loopback: an event loop in a thread of its own, so that silent peers hold no thread."""

import asyncio
import os
import threading

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from kvstore_service.shared.types import StoreError

CONNECTIONS_MAX = 64  # the oldest gives way to one more
REQUEST_S = 5.0
ANSWER_S = 10.0
HEAD_BYTES_MAX = 8192
START_S = 10.0


class MetricsServer:
    """Serves `address` (HOST:PORT; port 0 = any) until closed; `off` serves nothing."""

    def __init__(self, address: str, registry: CollectorRegistry) -> None:
        """FAILED_PRECONDITION if it cannot listen there."""
        self.address = "off"
        self._registry = registry
        self._open: dict[asyncio.Task[None], None] = {}
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        if address == "off":
            return
        host, _, port = address.rpartition(":")
        self._thread = threading.Thread(target=self._loop.run_forever, name="metrics", daemon=True)
        self._thread.start()
        try:
            listening = asyncio.run_coroutine_threadsafe(self._listen(host.strip("[]"), int(port)), self._loop)
            self.address = f"{host}:{listening.result(START_S)}"
        except OSError as error:
            self.close()
            reason = os.strerror(error.errno) if error.errno else error  # asyncio's own text is longer
            raise StoreError(
                "FAILED_PRECONDITION", f"metrics_addr={address}: {reason}; give another port, or off"
            ) from error

    def close(self) -> None:
        """Idempotent."""
        if self._thread is not None:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(ANSWER_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=ANSWER_S)
            self._thread = None
        if not self._loop.is_running():
            self._loop.close()

    async def _listen(self, host: str, port: int) -> int:
        self._server = await asyncio.start_server(self._answer, host, port, limit=HEAD_BYTES_MAX)
        found: int = self._server.sockets[0].getsockname()[1]
        return found

    async def _end(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = None
        if len(self._open) > CONNECTIONS_MAX:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.cancel()
        try:
            async with asyncio.timeout(REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
            writer.write(self._response(head.split(b"\r\n", 1)[0]))
            async with asyncio.timeout(ANSWER_S):
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass  # a peer that says nothing, too much, or leaves
        finally:
            self._open.pop(task, None)
            writer.close()

    def _response(self, request: bytes) -> bytes:
        method, _, rest = request.partition(b" ")
        if method != b"GET":
            return _http("405 Method Not Allowed", b"GET only\n")
        if rest.split(b" ")[0].split(b"?")[0] not in (b"/metrics", b"/"):
            return _http("404 Not Found", b"metrics are at /metrics\n")
        return _http("200 OK", generate_latest(self._registry), CONTENT_TYPE_LATEST)


def _http(status: str, body: bytes, content_type: str = "text/plain; charset=utf-8") -> bytes:
    lines = (f"HTTP/1.1 {status}", f"Content-Type: {content_type}", f"Content-Length: {len(body)}", "Connection: close")
    return "\r\n".join((*lines, "", "")).encode() + body
