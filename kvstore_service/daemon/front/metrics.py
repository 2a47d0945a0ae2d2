"""Prometheus on loopback: the store's own counters, read when they are asked for."""

from collections.abc import Callable, Iterable
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstore_service.shared.types import StoreError

# What rises and falls, then what only rises; the names of `kvctl status` and, with kvstore_ before them, of Prometheus.
GAUGES = {
    "bound_slots": "slots bound to a session",
    "draining": "1 while new work is refused",
    "frame_bytes": "bytes of one frame (an extent) of the DRAM tier",
    "frames": "frames of the DRAM tier",
    "frames_pinned": "frames that a run or a read holds",
    "frames_used": "frames that hold an extent",
    "pack_bytes": "bytes of committed packs",
    "packs": "committed packs",
    "packs_damaged": "packs that failed a check and are not served",
    "packs_open": "packs whose file is open: in use or kept for their frames",
    "rings": "rings of registered workers",
    "sessions": "open sessions",
    "stored_bytes": "bytes of committed packs and sidecars; nvme_bytes is the limit",
    "uploads_open": "uploads in the data plane",
    "uploads_reserved": "uploads between ReservePack and CommitPack",
    "workers": "workers with registered memory",
}
COUNTERS = {
    "bytes_copied": "bytes copied into windows",
    "commit_exists": "commits that found the pack committed by another",
    "commits": "packs committed",
    "crc_errors": "blocks that failed their checksum",
    "evictions": "frames taken from one extent for another",
    "extent_hits": "extents that a run found whole in DRAM",
    "extent_misses": "extents that a run had to read from disk",
    "leftovers_removed": "unfinished files removed at the start",
    "lookup_damaged": "lookups' candidates that are stored but damaged",
    "lookup_errors": "prefix lookups that failed",
    "lookup_hits": "prefix lookups that found a pack",
    "lookup_misses": "prefix lookups that found none",
    "lookup_tokens_found": "tokens of the prefixes found",
    "lookups": "prefix lookups",
    "nvme_read_bytes": "bytes read from packs",
    "nvme_read_ops": "reads of packs",
    "nvme_write_bytes": "bytes written to packs",
    "packs_evicted": "packs removed by an operator",
    "packs_evicted_bytes": "bytes that this freed",
    "promotes_dropped": "hints to read ahead that were not followed",
    "records_copied": "records copied into windows",
    "reserve_exists": "reservations that found the pack committed already",
    "reserve_in_progress": "reservations that found the pack being written by another worker",
    "runs": "runs (one slot and lane of a ticket) begun",
    "runs_error": "runs that failed or were given up",
    "runs_ok": "runs done",
    "runs_stale": "runs of a binding that has ended",
    "sleeps": "times that a copy thread went to sleep",
    "store_bytes": "bytes of records taken from staging",
    "tickets": "tickets taken from rings",
    "uploads_expired": "uploads aborted because their worker had made no progress",
    "wakes": "times that a copy thread woke a worker",
    "warm_bytes": "bytes read ahead by importance hints, part of nvme_read_bytes",
}


class StoreCollector(Collector):
    """kvstore_NAME for what rises and falls, kvstore_NAME_total for what only rises."""

    def __init__(self, counters: Callable[[], dict[str, int]]) -> None:
        self._counters = counters

    def collect(self) -> Iterable[Metric]:
        values = self._counters()
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"kvstore_{name}", text, value=values[name])
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"kvstore_{name}", text, value=values[name])


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
