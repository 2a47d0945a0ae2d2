"""kvctl: what an operator asks of the node's daemon.

0: done. 1: a failure, or damage found, or a pack that could not be evicted. 2: wrong usage.
"""

import argparse
import itertools
import json
import math
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import shtab
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.rpc import code_pb2
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvstore_service.client import AdminClient
from kvstore_service.shared.settings import ConfigError, Parser, default_broker, default_socket
from kvstore_service.shared.types import PACK_ID_BYTES, StoreError, format_size, parse_size

ID_DIGITS = 16
ALIGNED = 200  # rows that say how wide the columns are
EVICT_BATCH = 500
CALL_S = 10.0
TIMES = ("created_s", "last_used_s", "at_s")
POLL_S = 0.2

Row = dict[str, Any]


class Output:
    """Tables for people, one JSON document for programs."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)

    def rows(self, title: str, rows: Sequence[Row]) -> None:
        if self.as_json:
            print(json.dumps(rows, indent=2))
            return
        if not rows:
            self.console.print(f"no {title}")
            return
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for name, value in rows[0].items():
            table.add_column(name, justify="right" if isinstance(value, int | float) else "left", overflow="fold")
        for row in rows:
            table.add_row(*(_cell(name, value) for name, value in row.items()))
        self.console.print(table)

    def stream(self, title: str, rows: Iterable[Row]) -> None:
        """Like `rows`, for any number of them: each is shown when it comes."""
        if self.as_json:
            self._stream_json(rows)
            return
        rows = iter(rows)
        first = [{name: _cell(name, value) for name, value in row.items()} for row in itertools.islice(rows, ALIGNED)]
        if not first:
            self.console.print(f"no {title}")
            return
        widths = {name: max(len(name), *(len(row[name]) for row in first)) for name in first[0]}
        print(title)
        print(" ".join(name.ljust(width) for name, width in widths.items()).rstrip())
        later = ({name: _cell(name, value) for name, value in row.items()} for row in rows)
        for row in itertools.chain(first, later):
            print(" ".join(row[name].ljust(width) for name, width in widths.items()).rstrip())

    def _stream_json(self, rows: Iterable[Row]) -> None:
        separator = "[\n"
        for row in rows:
            print(separator + json.dumps(row), end="")
            separator = ",\n"
        print("[]" if separator == "[\n" else "\n]")

    def values(self, title: str, values: Row) -> None:
        if self.as_json:
            print(json.dumps(values, indent=2))
            return
        table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=False)
        for name, value in values.items():
            table.add_row(name, _cell(name, value))
        self.console.print(table)


def status(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    values = _plain(client.get_status())
    counters = values.pop("counters")
    if output.as_json:
        values["counters"] = counters
        output.values("", values)
        return 0
    output.values("kvstored", values)
    output.values("counters", dict(sorted(counters.items())))
    return 0


def sessions(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    output.rows("sessions", [_plain(item) for item in client.list_sessions()])
    return 0


def describe(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    found = client.describe_session(arguments.session)
    session = {
        **_plain(found.session),
        "fingerprint": found.fingerprint.hex(),
        "declared_max": found.declared_max_tokens,
    }
    packs_of = [_plain(item) for item in found.packs]
    if output.as_json:
        output.values("", {**session, "packs": packs_of})
        return 0
    output.values("session", session)
    output.rows("packs", packs_of)
    return 0


def packs(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    output.stream("packs", map(_plain, client.list_packs(**_filters(arguments))))
    return 0


def _filters(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "tenant": _tenant(arguments.tenant) if arguments.tenant else "",
        "damaged": arguments.damaged,
        "pinned": arguments.pinned,
        "unused": arguments.unused,
        "idle_s": arguments.older_than,
    }


def _pinning(pinned: bool) -> "Command":
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
        output.stream("packs that would be evicted", map(_plain, chosen.values()))
        return 0
    # Packs go before those that they continue, over all calls.
    wanted = sorted(chosen, key=lambda name: -chosen[name].first_token)
    results = [
        result
        for first in range(0, len(wanted), EVICT_BATCH)
        for result in client.evict(wanted[first : first + EVICT_BATCH], arguments.descendants)
    ]
    stayed = [
        {"pack_id": item.pack_id.hex(), "code": code_pb2.Code.Name(item.code), "reason": item.message}
        for item in results
        if item.code
    ]
    freed = sum(item.freed_bytes for item in results)
    gone = len(results) - len(stayed)
    if output.as_json:
        output.values("", {"evicted": gone, "freed_bytes": freed, "stayed": stayed})
    else:
        output.console.print(f"{gone} packs evicted, {format_size(freed)} freed, {len(stayed)} stayed")
        if stayed:
            output.rows("packs that stayed", stayed)
    return 1 if stayed else 0


def audit(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    """1 if a check fails."""
    checks = [_plain(check) for check in client.audit()]
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
    """Until Ctrl-C, SIGTERM or the end of stdin: the token ends with this connection."""
    print(client.token, flush=True)
    while (left_s := client.deadline_s - time.monotonic()) > 0:
        ready, _, _ = select.select([sys.stdin], [], [], min(left_s, 3600.0))
        if ready and not os.read(sys.stdin.fileno(), 4096):
            break
    return 0


def workers(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    output.rows("workers", [_plain(item) for item in client.list_workers()])
    return 0


def uploads(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    output.stream("uploads", map(_plain, client.list_uploads()))
    return 0


def kill(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    gone = client.kill_worker(arguments.worker)
    if output.as_json:
        output.values("", _plain(gone))
    else:
        output.console.print(f"worker {gone.name}, pid {gone.pid}, of {gone.tenant}: its connection is ended")
    return 0


def watch(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    """One line per event until Ctrl-C or --timeout."""
    try:
        for event in client.watch(arguments.kinds):
            row = _plain(event)
            if output.as_json:
                print(json.dumps(row), flush=True)
            elif event.kind != "watch":
                at = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(event.at_s))
                lost = f" ({event.dropped} events lost)" if event.dropped else ""
                parts = (at, event.kind, event.tenant, event.pack_id.hex()[:ID_DIGITS], event.detail)
                print(" ".join(part for part in parts if part) + lost, flush=True)
    except StoreError as error:
        if error.code != "DEADLINE_EXCEEDED":
            raise
    return 0


def explain(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    output.rows("findings", [_plain(item) for item in client.explain(arguments.subject)])
    return 0


def quota(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    if arguments.size is not None or arguments.dram is not None:
        client.set_quota(_tenant(arguments.tenant), arguments.size, arguments.dram)
    rows = [_plain(item) for item in client.list_quotas()]
    output.rows("quotas", [row for row in rows if not arguments.tenant or row["tenant"] == _tenant(arguments.tenant)])
    return 0


def _tenant(text: str) -> str:
    return f"uid-{text}" if text.isdecimal() else text


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
    columns = (
        TextColumn("verify"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[size]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=output.as_json) as progress:
        task = progress.add_task("verify", total=None, size="")
        for answer in client.verify(wanted):
            checked, total_bytes = answer.done, total_bytes + answer.bytes
            progress.update(task, total=answer.total, completed=answer.done, size=format_size(total_bytes))
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


Command = Callable[[AdminClient, Output, argparse.Namespace], int]


def _common(suppress: bool) -> Parser:
    """The flags that may stand before the command and behind it; behind it they have no defaults."""

    def default(value: Any) -> Any:
        return argparse.SUPPRESS if suppress else value

    flags = Parser(add_help=False)
    flags.add_argument(
        "--socket", default=default(default_socket()), help=f"gRPC socket of kvstored (default: {default_socket()})"
    )
    flags.add_argument(
        "--broker", default=default(None), help="its broker socket (default: broker.sock beside the gRPC socket)"
    )
    flags.add_argument(
        "--tcp", default=default(None), metavar="HOST:PORT", help="ask another machine's daemon over TLS (needs --tls)"
    )
    flags.add_argument(
        "--tls", default=default(None), metavar="DIR", help="directory with ca.crt, client.crt and client.key"
    )
    flags.add_argument("--format", choices=("table", "json"), default=default("table"), help="(default: table)")
    flags.add_argument(
        "--timeout", type=_seconds, default=default(None), metavar="S",
        help=f"deadline of the whole command (default: {CALL_S:g} for each of its calls)",
    )  # fmt: skip
    return flags


def parser() -> argparse.ArgumentParser:
    flags = Parser(
        prog="kvctl", description="Asks the node's kvstored.", allow_abbrev=False, parents=[_common(suppress=False)]
    )
    commands = flags.add_subparsers(metavar="COMMAND", required=True)
    common = _common(suppress=True)

    def add(name: str, command: Command, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False, parents=[common])
        sub.set_defaults(command=command)
        return sub

    def add_packs(sub: argparse.ArgumentParser, count: str, text: str = "") -> None:
        sub.add_argument("packs", nargs=count, metavar="PACK", help=f"pack ids or unique beginnings of them{text}")

    add("status", status, "state, sizes and counters")
    add("sessions", sessions, "open sessions")
    add("describe", describe, "one session and its packs").add_argument("session")
    listing = add("packs", packs, "stored packs")
    listing.add_argument("--tenant", default="", metavar="UID", help="only this user's")
    listing.add_argument("--damaged", action="store_true", help="only those that failed a check")
    listing.add_argument("--pinned", action="store_true", help="only pinned ones")
    listing.add_argument("--unused", action="store_true", help="only those that no session uses and nobody pinned")
    listing.add_argument(
        "--older-than", type=_age, default=0.0, metavar="AGE", help="only those not used for 30m, 12h, 7d"
    )
    pinning = add("pin", _pinning(True), "protect packs from eviction, durably")
    add_packs(pinning, "+")
    pinning.add_argument(
        "--ttl", type=_age, default=0.0, metavar="AGE", help="the pin ends by itself after 30m, 12h, 7d"
    )
    add_packs(add("unpin", _pinning(False), "let packs be evicted again"), "+")
    removal = add("evict", evict, "remove packs with their sidecars from the store")
    add_packs(removal, "*")
    removal.add_argument("--descendants", action="store_true", help="also the packs that continue them")
    removal.add_argument("--unused", action="store_true", help="also every pack that no session uses and nobody pinned")
    removal.add_argument(
        "--older-than", type=_age, default=0.0, metavar="AGE", help="of --unused only those not used for 30m, 12h, 7d"
    )
    removal.add_argument("--dry-run", action="store_true", help="only show which packs would go")
    add_packs(add("verify", verify, "read every block and check its CRC"), "*", " (default: all)")
    add("audit", audit, "compare what must be equal: catalogue and files, references, runs, frames")
    add("config", config, "the daemon's configuration and where each value came from")
    add("drain", drain, "refuse new work from now on; SIGTERM then ends the daemon").add_argument(
        "--wait", type=_seconds, default=0.0, metavar="S", help="until no session is open, at most S seconds"
    )
    add("workers", workers, "peers of the broker: workers, and operators, who have no memory")
    add("uploads", uploads, "packs that are being written")
    add("kill", kill, "end a worker's connection and all that it holds").add_argument(
        "worker", metavar="WORKER", help="its id, pid or name"
    )
    add("watch", watch, "commits, evictions, damage, workers, quotas, drains as they happen").add_argument(
        "kinds", nargs="*", metavar="KIND", help="only these: commit damage drain evict quota upload worker"
    )
    add("explain", explain, "why a prompt, a pack or a session is found or not, fast or slow").add_argument(
        "subject", nargs="?", default="", metavar="SUBJECT",
        help="a session, or the beginning of a pack's id or of a prompt's last digest (default: the latest lookups)",
    )  # fmt: skip
    bound = add("quota", quota, "what users have and may have, on disk and in DRAM; set it with SIZE and --dram")
    bound.add_argument("tenant", nargs="?", default="", metavar="UID")
    bound.add_argument("size", nargs="?", type=_quota_size, metavar="SIZE", help="on disk: such as 8GiB, or none")
    bound.add_argument("--dram", type=_quota_size, metavar="SIZE", help="of the DRAM tier: such as 1GiB, or none")
    add("token", token, "print a token for other gRPC clients (grpcurl); it is valid while this command runs")
    completion = commands.add_parser("completion", help="print the completion script of a shell", allow_abbrev=False)
    completion.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    return flags


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: write seconds, 0 or more")
    return value


def _quota_size(text: str) -> int:
    try:
        size_bytes = 0 if text == "none" else parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if text != "none" and size_bytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write a size above 0, or none")
    return size_bytes


def _age(text: str) -> float:
    match = re.fullmatch(r"(\d+)([smhd])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: write an age such as 90s, 30m, 12h or 7d")
    return int(match[1]) * {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}[match[2]]


def _usage_error(arguments: argparse.Namespace) -> str:
    if arguments.command is evict and not (arguments.packs or arguments.unused):
        return "evict needs packs or --unused"
    if arguments.command is evict and arguments.older_than and not arguments.unused:
        return "--older-than chooses among --unused; give both"
    if bool(arguments.tcp) != bool(arguments.tls):
        return "--tcp and --tls belong together; give both"
    return "--timeout 0: write seconds above 0" if arguments.timeout == 0 else ""
    return "--timeout 0: write seconds above 0" if arguments.timeout == 0 else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    flags = parser()
    try:
        arguments = flags.parse_args(argv)
        if "shell" in arguments:
            print(shtab.complete(flags, arguments.shell))
            return 0
        if problem := _usage_error(arguments):
            flags.error(problem)
    except ConfigError as error:
        print(f"kvctl: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with _connected(arguments) as client:
            command: Command = arguments.command
            return command(client, Output(arguments.format == "json"), arguments)
    except StoreError as error:
        print(f"kvctl: {error.message}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's last flush fails too
        return 1
    except KeyboardInterrupt:
        return 130


def _connected(arguments: argparse.Namespace) -> AdminClient:
    deadline_s = time.monotonic() + (math.inf if arguments.timeout is None else arguments.timeout)
    call_s = arguments.timeout or CALL_S
    if arguments.tcp:
        client = AdminClient.connect_tls(arguments.tcp, arguments.tls, call_s)
    else:
        broker = arguments.broker or _broker_beside(arguments.socket)
        client = AdminClient.connect(arguments.socket, broker, call_s)
    client.deadline_s = deadline_s
    return client


def _broker_beside(socket: str) -> str:
    if socket == default_socket():
        return default_broker()
    return socket.rpartition("/")[0] + "/broker.sock" if "/" in socket else "broker.sock"


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


def _plain(message: Message) -> Row:
    """Every field, ids as hex, numbers as numbers."""
    fields = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    row: Row = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        row[field.name] = value.hex() if isinstance(value, bytes) else fields[field.name]
        if isinstance(value, int) and not isinstance(value, bool):
            row[field.name] = value
    if "counters" in row:
        row["counters"] = dict(message.counters)  # type: ignore[attr-defined]
    return row


def _cell(name: str, value: Any) -> str:
    if isinstance(value, int) and (name == "bytes" or name.endswith("_bytes")):
        return format_size(value)
    if isinstance(value, float):
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(value)) if name in TIMES else f"{value:.1f}"
    if isinstance(value, list):
        return ",".join(map(str, value))
    text = str(value)
    return text[:ID_DIGITS] if name in ("pack_id", "build", "parent") else text


if __name__ == "__main__":
    sys.exit(main())
