"""Prometheus on loopback: the store's own counters, read when they are asked for."""

from collections.abc import Callable, Iterable
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstore_service.types import StoreError

GAUGES = frozenset({
    "frames", "frames_used", "frame_bytes", "packs_open", "uploads_open", "workers", "rings", "bound_slots",
    "packs", "pack_bytes", "stored_bytes", "packs_damaged", "uploads_reserved", "sessions", "draining",
})  # fmt: skip


class StoreCollector(Collector):
    """kvstore_NAME for what rises and falls, kvstore_NAME_total for what only rises."""

    def __init__(self, counters: Callable[[], dict[str, int]]) -> None:
        self._counters = counters

    def collect(self) -> Iterable[Metric]:
        for name, value in sorted(self._counters().items()):
            family = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
            yield family(f"kvstore_{name}", f"{name.replace('_', ' ')} of the store", value=value)


class MetricsServer:
    """Serves `address` (HOST:PORT; port 0 = any) until closed; `off` serves nothing."""

    def __init__(self, address: str, counters: Callable[[], dict[str, int]]) -> None:
        self.address = "off"
        self._server: WSGIServer | None = None
        if address == "off":
            return
        host, _, port = address.rpartition(":")
        registry = CollectorRegistry()
        registry.register(StoreCollector(counters))
        try:
            self._server, self._thread = start_http_server(int(port), host.strip("[]"), registry)
        except OSError as error:
            raise StoreError(
                "FAILED_PRECONDITION", f"metrics_addr={address}: {error.strerror}; give another port, or off"
            ) from error
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(timeout=5.0)
            self._server = None
