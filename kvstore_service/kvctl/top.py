"""kvctl top: what the daemon does now, from two looks at what it counts."""

import argparse
import itertools
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore_service._proto.admin_service_pb2 import GetStatusResponse, Quota, Times
from kvstore_service.client import AdminClient
from kvstore_service.client.call import CONNECTION_BROKEN
from kvstore_service.kvctl.output import Output, Row
from kvstore_service.shared.types import StoreError, format_size

NAP_S = 0.2
OWNERS_SHOWN = 16
CLASSES = {
    "ticket_gather": "gather",
    "ticket_range": "range",
    "ticket_store": "store",
    "read_decode": "read, decode",
    "read_bulk": "read, bulk",
    "read_ahead": "read ahead",
}


@dataclass(frozen=True)
class Look:
    at_s: float  # monotonic
    status: GetStatusResponse
    quotas: Mapping[str, Quota]
    sessions: Mapping[str, int]  # by tenant

    @classmethod
    def at(cls, client: AdminClient) -> "Look":
        status = client.get_status()
        at_s = time.monotonic()
        sessions: Counter[str] = Counter()
        for worker in client.list_workers():
            sessions[worker.tenant] += worker.sessions
        return cls(at_s, status, {item.tenant: item for item in client.list_quotas()}, sessions)


def top(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    """Until Ctrl-C or --timeout, or once. UNAVAILABLE if the daemon ends."""
    redraws = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not arguments.once
    before = _look(client)
    number = 0
    while (until_s := before.at_s + arguments.every) <= client.deadline_s:
        while (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, NAP_S))
            if not arguments.tcp and client.gone:
                raise _ended()
        now = _look(client)
        seen = view(before, now)
        if output.as_json:
            print(json.dumps(seen), flush=True)
        else:
            _show(text(seen), number, redraws)
        if arguments.once:
            break
        before, number = now, number + 1
    return 0


def _look(client: AdminClient) -> Look:
    try:
        return Look.at(client)
    except StoreError as error:
        if error.reason != CONNECTION_BROKEN:
            raise
        raise _ended() from error


def _ended() -> StoreError:
    return StoreError("UNAVAILABLE", "the daemon has ended; start it again, see its log")


def _show(lines: Sequence[str], number: int, redraws: bool) -> None:
    if redraws:
        columns, rows = shutil.get_terminal_size()
        shown = "".join(f"{line[: columns - 1]}\x1b[K\n" for line in lines[: rows - 1])
        print(("" if number else "\x1b[2J") + "\x1b[H" + shown + "\x1b[J", end="", flush=True)
    else:
        print(("\n" if number else "") + "\n".join(lines), flush=True)


def view(before: Look, now: Look) -> Row:
    """Rates and shares between two looks; None where nothing happened that would have one."""
    took_s = max(now.at_s - before.at_s, 1e-9)
    new, old = now.status.counters, before.status.counters

    def gained(name: str) -> int:
        return max(0, new[name] - old[name])

    def rate(name: str) -> float:
        return gained(name) / took_s

    looked = gained("extent_hits") + gained("extent_misses")
    reads = gained("nvme_read_ops")
    return {
        "at_s": time.time(),
        "interval_s": took_s,
        "version": now.status.version,
        "state": now.status.state,
        "uptime_s": now.status.uptime_s,
        "tickets_per_s": rate("tickets"),
        "times": {
            name: _timed(before.status.times[kind], now.status.times[kind], took_s) for kind, name in CLASSES.items()
        },
        "dram_hit_ratio": gained("extent_hits") / looked if looked else None,
        "frames": new["frames"],
        "frames_used": new["frames_used"],
        "frames_pinned": new["frames_pinned"],
        "evictions_per_s": rate("evictions"),
        "starved_per_s": rate("runs_starved"),
        "moved_bytes_per_s": sum(_moved(before, now).values()) / took_s,
        "read_bytes_per_s": rate("nvme_read_bytes"),
        "reads_per_s": rate("nvme_read_ops"),
        "read_mean_bytes": gained("nvme_read_bytes") / reads if reads else None,
        "written_bytes_per_s": rate("nvme_write_bytes"),
        "runs_in_flight": max(0, new["runs"] - new["runs_ok"] - new["runs_error"] - new["runs_stale"]),
        "runs_failed_per_s": rate("runs_error"),
        "packs_evicted_per_s": rate("packs_evicted"),
        "workers": new["workers"],
        "sessions": new["sessions"],
        "bound_slots": new["bound_slots"],
        "uploads": new["uploads_open"],
        "owners": _owners(before, now, took_s),
    }


def _timed(before: Times, now: Times, took_s: float) -> Row:
    counts = [max(0, b - a) for a, b in itertools.zip_longest(before.counts, now.counts, fillvalue=0)]
    return {
        "per_s": sum(counts) / took_s,
        "p50_us": quantile(now.bounds_us, counts, 0.5),
        "p99_us": quantile(now.bounds_us, counts, 0.99),
        # Each of the sum's microseconds is one that something was under way.
        "in_flight": max(0, now.sum_us - before.sum_us) / 1e6 / took_s,
    }


def quantile(bounds_us: Sequence[int], counts: Sequence[int], part: float) -> float | None:
    """As Prometheus has it: even within a bucket; what lies beyond the last bound counts as that."""
    rank, below, lower = part * sum(counts), 0, 0
    if not rank:
        return None
    for bound, count in zip(bounds_us, counts, strict=False):
        if count and below + count >= rank:
            return lower + (bound - lower) * (rank - below) / count
        below, lower = below + count, bound
    return float(bounds_us[-1])


def _moved(before: Look, now: Look) -> dict[str, int]:
    """Bytes that went to each tenant's workers."""
    nothing = Quota()
    return {
        tenant: max(0, quota.moved_bytes - before.quotas.get(tenant, nothing).moved_bytes)
        for tenant, quota in now.quotas.items()
    }


def _owners(before: Look, now: Look, took_s: float) -> list[Row]:
    """The busiest first."""
    moved = _moved(before, now)
    all_moved, all_dram = sum(moved.values()), sum(quota.dram_used_bytes for quota in now.quotas.values())
    rows: list[Row] = [
        {
            "tenant": tenant,
            "moved_bytes_per_s": moved[tenant] / took_s,
            "moved_share": moved[tenant] / all_moved if all_moved else None,
            "dram_bytes": quota.dram_used_bytes,
            "dram_share": quota.dram_used_bytes / all_dram if all_dram else None,
            "stored_bytes": quota.stored_bytes,
            "sessions": now.sessions.get(tenant, 0),
        }
        for tenant, quota in now.quotas.items()
    ]
    return sorted(rows, key=lambda row: (-row["moved_bytes_per_s"], -row["dram_bytes"], row["tenant"]))


def text(seen: Row) -> list[str]:
    """What a terminal shows of a view."""
    at = time.strftime("%H:%M:%S", time.localtime(seen["at_s"]))
    request = "" if seen["read_mean_bytes"] is None else f" of {_size(seen['read_mean_bytes'])}"
    in_flight = sum(seen["times"][name]["in_flight"] for kind, name in CLASSES.items() if kind.startswith("read"))
    lines = [
        f"kvstored {seen['version']} {seen['state']}, up {seen['uptime_s']:.0f} s; {at}, "
        f"over {seen['interval_s']:.1f} s",
        "",
        f"{'':<13}{'per second':>12}{'p50 us':>10}{'p99 us':>10}",
        *(
            f"{name:<13}{item['per_s']:>12.1f}{_number(item['p50_us']):>10}{_number(item['p99_us']):>10}"
            for name, item in seen["times"].items()
        ),
        "",
        f"DRAM      {_percent(seen['dram_hit_ratio'])} hits; {seen['frames_used']} of {seen['frames']} frames used, "
        f"{seen['frames_pinned']} pinned; {seen['evictions_per_s']:.1f} evictions/s; "
        f"{_size(seen['moved_bytes_per_s'])}/s to workers",
        f"NVMe      reads {_size(seen['read_bytes_per_s'])}/s in {seen['reads_per_s']:.1f} requests/s{request}, "
        f"{in_flight:.1f} in flight; writes {_size(seen['written_bytes_per_s'])}/s",
        f"queue     {seen['runs_in_flight']} runs in flight; {seen['tickets_per_s']:.1f} tickets/s; "
        f"{seen['starved_per_s']:.1f} waits for frames/s; {seen['runs_failed_per_s']:.1f} failures/s",
        f"sessions  {seen['sessions']} of {seen['workers']} workers, {seen['bound_slots']} slots bound, "
        f"{seen['uploads']} uploads; {seen['packs_evicted_per_s']:.1f} packs evicted/s",
        "",
        f"{'owner':<12}{'moved/s':>12}{'share':>8}{'in DRAM':>12}{'share':>8}{'on disk':>12}{'sessions':>10}",
        *(
            f"{row['tenant']:<12}{_size(row['moved_bytes_per_s']):>12}{_percent(row['moved_share']):>8}"
            f"{_size(row['dram_bytes']):>12}{_percent(row['dram_share']):>8}{_size(row['stored_bytes']):>12}"
            f"{row['sessions']:>10}"
            for row in seen["owners"][:OWNERS_SHOWN]
        ),
    ]
    hidden = len(seen["owners"]) - OWNERS_SHOWN
    return [*lines, f"and {hidden} more"] if hidden > 0 else lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _percent(value: Any) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _size(value: float) -> str:
    return format_size(round(value))
