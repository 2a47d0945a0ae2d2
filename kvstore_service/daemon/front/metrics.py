"""What Prometheus sees: the store's own counters, read when they are asked for."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvstore_service.daemon.front.latencies import Histogram

# What rises and falls, then what only rises; the names of `kvctl status` and, with kvstore_ before them, of Prometheus.
GAUGES = {
    "arena_bytes": "bytes of an arena",
    "arenas": "parts of the DRAM tier that a user with pull windows has alone",
    "bound_slots": "slots bound to a session",
    "draining": "1 while new work is refused",
    "frame_bytes": "bytes of one frame (an extent) of the DRAM tier",
    "frames": "frames of the DRAM tier",
    "frames_pinned": "frames that a run or a read holds",
    "frames_used": "frames that hold an extent",
    "pack_bytes": "bytes of committed packs",
    "packs": "committed packs",
    "packs_damaged": "packs that failed a check and are not served",
    "learning_bytes": "memory for samples of what runs want; learn_bytes is the limit",
    "packs_open": "packs whose file is open: in use or kept for their frames",
    "rings": "rings that are served",
    "sessions": "open sessions",
    "stored_bytes": "bytes of committed packs and sidecars; nvme_bytes is the limit",
    "uploads_open": "uploads in the data plane",
    "uploads_reserved": "uploads between ReservePack and CommitPack",
    "workers": "workers with registered memory",
}
COUNTERS = {
    "bytes_copied": "bytes copied into windows",
    "calls_late": "commands that a copy thread did not end within 5 s",
    "commit_exists": "commits that found the pack committed by another",
    "commits": "packs committed",
    "crc_errors": "blocks that failed their checksum",
    "events_dropped": "events that slow watchers lost",
    "evictions": "frames taken from one extent for another",
    "extent_hits": "extents that a run found whole in DRAM",
    "extent_misses": "extents that a run had to read from disk",
    "hints_dropped": "hints to read ahead that were refused: too many of their user, or no memory",
    "leftovers_removed": "unfinished files removed at the start",
    "files_quarantined": "files that the start moved to quarantine/, unknown to a new or older catalogue",
    "sidecars_dropped": "sidecars that were damaged or lost, and are no more",
    "lookup_damaged": "lookups' candidates that are stored but damaged",
    "lookup_errors": "prefix lookups that failed",
    "lookup_hits": "prefix lookups that found a pack",
    "lookup_misses": "prefix lookups that found none",
    "lookup_tokens_found": "tokens of the prefixes found",
    "lookups": "prefix lookups",
    "nvme_read_bytes": "bytes read from packs",
    "nvme_read_ops": "reads of packs",
    "nvme_through_bytes": "bytes between wanted blocks that were read and dropped, part of nvme_read_bytes",
    "nvme_write_bytes": "bytes written to packs",
    "packs_evicted": "packs removed",
    "packs_evicted_bytes": "bytes that this freed",
    "packs_evicted_operator": "packs removed by an operator",
    "packs_evicted_room": "packs removed by the daemon itself, for others",
    "packs_retiered": "packs rewritten in a learnt order",
    "pulls_late": "workers that did not read in time what their tickets were answered with; their rings are poisoned",
    "portions": "plans made for runs, a run being copied portion by portion",
    "promotes_dropped": "hints of decode steps that were not followed: too old, or colder than what is held",
    "records_copied": "records copied into windows",
    "records_pulled": "records that workers were told to read in the DRAM tier",
    "reserve_exists": "reservations that found the pack committed already",
    "reserve_in_progress": "reservations that found the pack being written by another worker",
    "runs": "runs (one slot and lane of a ticket) begun",
    "runs_error": "runs that failed or were given up",
    "runs_late": "runs given up at their deadline, before their worker's wait ended",
    "runs_ok": "runs done",
    "runs_stale": "runs of a binding that has ended",
    "runs_starved": "times that a run waited for a frame or for planning memory",
    "polls": "short naps of a copy thread while a device steps, which cannot wake it",
    "seed_bytes": "bytes of new packs put into the DRAM tier as they were written, by their grades",
    "sleeps": "times that a copy thread went to sleep",
    "store_bytes": "bytes of records taken from staging",
    "tickets": "tickets taken from rings",
    "uploads_expired": "uploads aborted because their worker had made no progress",
    "uses_lost": "uses of packs that a full disk did not let be kept; eviction goes by the others",
    "wakes": "times that a copy thread woke a worker",
    "warm_bytes": "bytes read ahead by hints of importance and of decode steps, part of nvme_read_bytes",
    "worker_faults": "unexpected exceptions in copy threads; those of a ring cost its worker its registration",
}
LIMITS = {
    "dram_bytes": "of the DRAM tier",
    "nvme_bytes": "for stored_bytes",
    "sessions_max": "for sessions",
    "slots_max": "for bound_slots",
    "workers_max": "for workers",
}
PER_USER = {
    "user_dram_bytes": "frames of the DRAM tier that hold a user id's packs, in bytes",
    "user_sessions": "open sessions of a user id",
    "user_stored_bytes": "bytes of a user id's committed packs and sidecars",
    "user_worker_bytes": "memory of a user id's workers: windows, staging, rings, bindings",
    "user_workers": "workers of a user id",
}
HISTOGRAMS = {
    "call_seconds": "calls that were answered, by class: lookup, commit, bind, sidecar, other",
    "plane_seconds": "work of the data plane, by class: tickets from their taking to their last cell, disk reads",
}
OTHERS = {
    "build_info": "1, with the version as label",
    "process_*": "memory, processor time, descriptors and start of the daemon's process",
}
USERS_SHOWN_MAX = 64  # user ids that get series of their own; the rest are summed as `other`


@dataclass(frozen=True)
class Measures:
    """Where the figures come from. `users`: {user id: {name of PER_USER: value}}; `plane` and `calls`: histograms."""

    counters: Callable[[], Mapping[str, int]]
    limits: Mapping[str, int]
    users: Callable[[], Mapping[int, Mapping[str, int]]]
    calls: Callable[[], Mapping[str, Histogram]]
    plane: Callable[[], Mapping[str, Histogram]]
    version: str


def registry(measures: Measures) -> CollectorRegistry:
    made = CollectorRegistry()
    made.register(StoreCollector(measures))
    ProcessCollector(registry=made)
    return made


class StoreCollector(Collector):
    """kvstore_NAME for what rises and falls, kvstore_NAME_total for what only rises."""

    def __init__(self, measures: Measures) -> None:
        self._measures = measures

    def collect(self) -> Iterable[Metric]:
        values = self._measures.counters()
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"kvstore_{name}", text, value=values[name])
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"kvstore_{name}", text, value=values[name])
        for name, text in LIMITS.items():
            yield GaugeMetricFamily(f"kvstore_limit_{name}", f"limit {text}", value=self._measures.limits[name])
        yield from self._of_users()
        yield _histogram("call_seconds", self._measures.calls())
        yield _histogram("plane_seconds", self._measures.plane())
        yield InfoMetricFamily("kvstore_build", OTHERS["build_info"], value={"version": self._measures.version})

    def _of_users(self) -> Iterable[Metric]:
        users = self._measures.users()
        shown = sorted(users)[:USERS_SHOWN_MAX]
        for name, text in PER_USER.items():
            family = GaugeMetricFamily(f"kvstore_{name}", text, labels=["uid"])
            for uid in shown:
                family.add_metric([str(uid)], users[uid][name])
            if len(users) > len(shown):
                family.add_metric(["other"], sum(users[uid][name] for uid in users if uid not in shown))
            yield family


def _histogram(name: str, measured: Mapping[str, Histogram]) -> Metric:
    family = HistogramMetricFamily(f"kvstore_{name}", HISTOGRAMS[name], labels=["class"])
    for kind, (bounds_us, counts, sum_us) in sorted(measured.items()):
        reached, buckets = 0, []
        for bound, count in zip([*(str(bound_us / 1e6) for bound_us in bounds_us), "+Inf"], counts, strict=True):
            reached += count
            buckets.append((bound, reached))
        family.add_metric([kind], buckets, sum_us / 1e6)
    return family
