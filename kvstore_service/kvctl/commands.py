"""kvctl's commands: each asks the daemon, shows the answer and returns the exit status."""

import argparse
import contextlib
import json
import os
import select
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from google.rpc import code_pb2
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvstore_service._proto.admin_service_pb2 import EvictedPack, OpWaits, PackSummary, RetierResponse, SlotWaits
from kvstore_service.client import AdminClient
from kvstore_service.client.access_trace import write_trace
from kvstore_service.kvctl.output import ID_DIGITS, Output, Row, plain
from kvstore_service.shared.types import PACK_ID_BYTES, StoreError, format_size, printable

EVICT_BATCH = 8192  # packs that one call names
POLL_S = 0.2

Command = Callable[[AdminClient, Output, argparse.Namespace], int]


def status(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    values = plain(client.get_status())
    counters = values.pop("counters")
    del values["times"]  # for `top`
    if output.as_json:
        values["counters"] = counters
        output.values("", values)
        return 0
    output.values("kvstored", values)
    output.values("counters", dict(sorted(counters.items())))
    return 0


def sessions(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    output.rows("sessions", [plain(item) for item in client.list_sessions()])
    return 0


def describe(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    found = client.describe_session(arguments.session)
    session = {
        **plain(found.session),
        "fingerprint": found.fingerprint.hex(),
        "declared_max": found.declared_max_tokens,
    }
    packs_of = [plain(item) for item in found.packs]
    if output.as_json:
        output.values("", {**session, "packs": packs_of})
        return 0
    output.values("session", session)
    output.rows("packs", packs_of)
    return 0


def packs(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    output.stream("packs", map(plain, client.list_packs(**_filters(arguments))))
    return 0


def _filters(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "tenant": arguments.tenant or "",
        "damaged": arguments.damaged,
        "pinned": arguments.pinned,
        "unused": arguments.unused,
        "idle_s": arguments.older_than,
    }


def pinning(pinned: bool) -> Command:
    def command(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
        wanted, done = _pack_ids(client, arguments.packs), "pinned" if pinned else "unpinned"
        if pinned:
            client.pin(wanted, arguments.ttl)
        else:
            client.unpin(wanted)
        if output.as_json:
            output.values("", {done: [name.hex() for name in wanted]})
        else:
            output.console.print(f"{len(wanted)} packs {done}")
        return 0

    return command


def evict(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    """1 if a pack stays that should have gone."""
    chosen = {item.pack_id: item for item in client.packs_named(_pack_ids(client, arguments.packs))}
    if arguments.unused:
        chosen |= {item.pack_id: item for item in client.list_packs(unused=True, idle_s=arguments.older_than)}
    if arguments.dry_run:
        if arguments.descendants:
            chosen = _with_descendants(client, chosen)
        output.stream("packs that would be evicted", map(plain, chosen.values()))
        return 0
    # Packs go before those that they continue, over all calls.
    wanted = sorted(chosen, key=lambda name: -chosen[name].first_token)
    results: list[EvictedPack] = []
    try:
        with _progress("evict", output) as progress:
            for first in range(0, len(wanted), EVICT_BATCH):
                before, batch = len(results), wanted[first : first + EVICT_BATCH]
                for answer in client.evicting(batch, arguments.descendants):
                    results += answer.packs
                    total = before + answer.total + len(wanted) - first - len(batch)
                    progress(len(results), total, sum(item.freed_bytes for item in answer.packs))
    except BaseException:
        _show_evicted(output, results, ended=False)
        raise
    return _show_evicted(output, results, ended=True)


def _with_descendants(client: AdminClient, chosen: Mapping[bytes, PackSummary]) -> dict[bytes, PackSummary]:
    """`chosen`, and the packs that continue them."""
    following: defaultdict[bytes, list[PackSummary]] = defaultdict(list)
    for item in client.list_packs():
        following[item.parent].append(item)
    found, left = dict(chosen), list(chosen)
    while left:
        more = {item.pack_id: item for item in following[left.pop()] if item.pack_id not in found}
        found |= more
        left += more
    return found


def _show_evicted(output: Output, results: Sequence[EvictedPack], ended: bool) -> int:
    """1 if a pack stays that should have gone, or may: not `ended`, the step under way is not among the results."""
    stayed = [
        {"pack_id": item.pack_id.hex(), "code": code_pb2.Code.Name(item.code), "reason": item.message}
        for item in results
        if item.code
    ]
    freed = sum(item.freed_bytes for item in results)
    gone = len(results) - len(stayed)
    if output.as_json:
        output.values("", {"evicted": gone, "freed_bytes": freed, "stayed": stayed, "ended": ended})
        return 1 if stayed or not ended else 0
    rest = "" if ended else "; then it was cut short: the packs of one more step may have gone, the others stay"
    output.console.print(f"{gone} packs evicted, {format_size(freed)} freed, {len(stayed)} stayed{rest}")
    if stayed:
        output.rows("packs that stayed", stayed)
    return 1 if stayed or not ended else 0


def audit(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    """1 if a check fails."""
    checks = [plain(check) for check in client.audit()]
    output.rows("checks", checks)
    return 0 if all(check["ok"] for check in checks) else 1


def drain(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    """1 if sessions are still open after --wait."""
    client.drain()
    deadline = min(time.monotonic() + arguments.wait, client.deadline_s)
    while (left := client.get_status().sessions) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if output.as_json:
        output.values("", {"state": "draining", "sessions": left})
    else:
        output.console.print(f"draining: new work is refused until the daemon is started anew; {left} sessions open")
    return 1 if left and arguments.wait else 0


def token(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    """Until Ctrl-C, SIGTERM or the end of stdin: the token ends with the connection. UNAVAILABLE if the daemon does."""
    if output.as_json:
        output.values("", {"token": client.token})
    else:
        print(client.token)
    sys.stdout.flush()
    asked = [sys.stdin] if sys.stdin else []
    while (left_s := client.deadline_s - time.monotonic()) > 0:
        ready, _, _ = select.select(asked, [], [], min(left_s, POLL_S))
        if ready and not os.read(sys.stdin.fileno(), 4096):
            break
        if client.gone:
            raise StoreError("UNAVAILABLE", "the daemon has ended, and with it the token")
    return 0


def workers(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    output.rows("workers", [plain(item) for item in client.list_workers()])
    return 0


def uploads(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    output.stream("uploads", map(plain, client.list_uploads()))
    return 0


def kill(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    gone = client.kill_worker(arguments.worker)
    if output.as_json:
        output.values("", plain(gone))
    else:
        output.console.print(f"worker {gone.name}, pid {gone.pid}, of {gone.tenant}: its connection is ended")
    return 0


def watch(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    """One line per event until Ctrl-C or --timeout. DEADLINE_EXCEEDED if it ends without one."""
    try:
        for event in client.watch(arguments.kinds):
            row = plain(event)
            if output.as_json:
                print(json.dumps(row), flush=True)
            elif event.kind != "watch":
                at = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(event.at_s))
                lost = f" ({event.dropped} events lost)" if event.dropped else ""
                parts = (at, event.kind, event.tenant, event.pack_id.hex()[:ID_DIGITS], event.detail)
                print(printable(" ".join(part for part in parts if part)) + lost, flush=True)
    except StoreError as error:
        if error.code != "DEADLINE_EXCEEDED" or arguments.timeout is None:
            raise
    return 0


def trace(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    """1 if the daemon had to drop some."""
    answers = client.trace(arguments.seconds)
    try:
        records, dropped = write_trace(Path(arguments.file), answers)
    except OSError as error:
        raise StoreError("FAILED_PRECONDITION", f"{arguments.file}: {error.strerror}; choose another file") from error
    if output.as_json:
        output.values("", {"accesses": records, "dropped": dropped})
    else:
        lost = f"; {dropped} more were dropped: they came faster than they could be read" if dropped else ""
        output.console.print(f"{records} accesses in {arguments.file}{lost}")
    return 1 if dropped else 0


def explain(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    found = client.explained(arguments.subject)
    findings = [plain(item) for item in found.findings]
    if output.as_json:
        slots = [
            {**plain(item), "ops": [plain(op) for op in item.ops], "lanes": [plain(lane) for lane in item.lanes]}
            for item in found.slots
        ]
        output.values("", {"findings": findings, "slots": slots})
        return 0
    output.rows("findings", findings)
    for item in found.slots:
        _show_waits(output, item)
    return 0


def _show_waits(output: Output, item: SlotWaits) -> None:
    """Means over the runs, but for the slowest."""
    name = f"slot {item.worker_id}/{item.slot}"
    output.console.print()
    output.rows(f"{name}: microseconds of a run", [_waits(op) for op in item.ops])
    stalled = [
        {
            "layer": lane.layer,
            "head": lane.lane,
            "stalls": lane.stalls,
            "stalled_ms": lane.stalled_ns / 1e6,
            "mean_us": lane.stalled_ns / 1e3 / lane.stalls,
            "slowest_us": lane.slowest_ns / 1e3,
        }
        for lane in item.lanes
    ]
    if stalled:
        output.console.print()
        output.rows(f"{name}: longest waits for disk and frames", stalled)


def _waits(op: OpWaits) -> Row:
    def mean_us(total_ns: int) -> float:
        return total_ns / 1e3 / op.runs

    looked = op.extent_hits + op.extent_misses
    return {
        "op": op.op,
        "runs": op.runs,
        "failed": op.failed,
        "queue": mean_us(op.queue_ns),
        "pins": mean_us(op.pins_ns),
        "disk": mean_us(op.disk_ns),
        "copy": mean_us(op.copy_ns),
        "commit": mean_us(op.commit_ns),
        "slowest": op.slowest_ns / 1e3,
        "hits": f"{100 * op.extent_hits / looked:.1f} %" if looked else "-",
        "read_per_moved": f"{op.read_bytes / op.moved_bytes:.2f}" if op.moved_bytes else "-",
    }


def quota(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    if arguments.size is not None or arguments.dram is not None:
        client.set_quota(arguments.tenant, arguments.size, arguments.dram)
    rows = [plain(item) for item in client.list_quotas()]
    output.rows("quotas", [row for row in rows if arguments.tenant in (None, row["tenant"])])
    return 0


def config(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    found = client.get_config()
    output.rows(
        "config",
        [{"key": key, "value": value, "origin": found.origins[key]} for key, value in sorted(found.values.items())],
    )
    return 0


def verify(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    """1 if any pack is damaged."""
    wanted = _pack_ids(client, arguments.packs)
    damaged: list[Row] = []
    total_bytes = checked = 0
    with _progress("verify", output) as progress:
        for answer in client.verify(wanted):
            checked, total_bytes = answer.done, total_bytes + answer.bytes
            progress(answer.done, answer.total, answer.bytes)
            if answer.bad_blocks or answer.error:
                reason = answer.error or f"{len(answer.bad_blocks)} bad blocks"
                damaged.append({"pack_id": answer.pack_id.hex(), "damage": reason})
    if output.as_json:
        output.values("", {"packs": checked, "bytes": total_bytes, "damaged": damaged})
    else:
        output.console.print(f"{checked} packs, {format_size(total_bytes)}, {len(damaged)} damaged")
        if damaged:
            output.rows("damaged packs", damaged)
    return 1 if damaged else 0


def retier(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    """1 if a pack stays for another reason than that somebody has it, or that another order is not worth it."""
    rows: list[Row] = []
    failed = rewritten = 0
    with _progress("retier", output) as progress:
        for answer in client.retier(_pack_ids(client, arguments.packs), arguments.dry_run):
            progress(answer.done, answer.total, answer.bytes)
            rewritten += not answer.code
            failed += answer.code not in (code_pb2.OK, code_pb2.FAILED_PRECONDITION, code_pb2.ABORTED)
            rows.append(_retiered(answer))
    if output.as_json:
        output.values("", {"rewritten": 0 if arguments.dry_run else rewritten, "packs": rows})
    else:
        done = "would be rewritten" if arguments.dry_run else "rewritten"
        output.console.print(f"{rewritten} of {len(rows)} packs {done}")
        output.rows("packs", rows)
    return 1 if failed else 0


def _retiered(answer: RetierResponse) -> Row:
    """Expected microseconds of the disk for a thousand records, before and after."""
    code = code_pb2.Code.Name(answer.code)
    return {
        "pack_id": answer.pack_id.hex(),
        "runs": round(answer.runs, 1),
        "before_us": round(answer.before_us, 1),
        "after_us": round(answer.after_us, 1),
        "bytes": answer.bytes,
        "stays": f"{code}: {answer.message}" if answer.code else "",
    }


@contextlib.contextmanager
def _progress(verb: str, output: Output) -> Iterator[Callable[[int, int, int], None]]:
    """A bar on stderr, for people. Yields what is told how many are done, of how many,
    and the bytes that came with it."""
    columns = (
        TextColumn(verb),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[size]}"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=output.as_json or not console.is_terminal) as bar:
        task, size_bytes = bar.add_task(verb, total=None, size=""), 0

        def show(done: int, total: int, more_bytes: int) -> None:
            nonlocal size_bytes
            size_bytes += more_bytes
            bar.update(task, total=total, completed=done, size=format_size(size_bytes))

        yield show


def _pack_ids(client: AdminClient, beginnings: Sequence[str]) -> list[bytes]:
    """The packs that are meant, once each. NOT_FOUND for a beginning of none or of several."""
    wanted: dict[bytes, None] = {}
    for text in beginnings:
        digits = text.lower()
        possible = digits and len(digits) <= 2 * PACK_ID_BYTES and not set(digits) - set("0123456789abcdef")
        matches = client.packs_beginning(digits) if possible else []
        if len(matches) != 1:
            count = "several" if matches else "no"
            raise StoreError("NOT_FOUND", f"{count} packs begin with {text!r}; see kvctl packs --format json")
        wanted[matches[0].pack_id] = None
    return list(wanted)
