"""kvctl: what an operator asks of the node's daemon.

0: done. 1: a failure, or damage found, or a pack that could not be evicted. 2: wrong usage.
"""

import argparse
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
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
from kvstore_service.shared.types import StoreError, format_size

ID_DIGITS = 16
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
    output.rows("packs", [_plain(item) for item in client.list_packs()])
    return 0


def _pinning(pinned: bool) -> "Command":
    def command(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
        wanted, done = _pack_ids(client, arguments.packs), "pinned" if pinned else "unpinned"
        (client.pin if pinned else client.unpin)(wanted)
        if output.as_json:
            output.values("", {done: [name.hex() for name in wanted]})
        else:
            output.console.print(f"{len(wanted)} packs {done}")
        return 0

    return command


def evict(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    """1 if a pack stays that should have gone."""
    wanted = _pack_ids(client, arguments.packs)
    if arguments.unused:
        newest_s = time.time() - arguments.older_than
        wanted += [
            item.pack_id
            for item in client.list_packs()
            if not (item.references or item.pinned or item.created_s > newest_s or item.pack_id in wanted)
        ]
    if arguments.dry_run:
        chosen = [_plain(item) for item in client.list_packs() if item.pack_id in wanted]
        output.rows("packs that would be evicted", chosen)
        return 0
    results = client.evict(wanted, arguments.descendants) if wanted else []
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
    deadline = time.monotonic() + arguments.wait
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
    sys.stdin.read()
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
    flags.add_argument("--format", choices=("table", "json"), default=default("table"), help="(default: table)")
    flags.add_argument(
        "--timeout", type=_seconds, default=default(10.0), metavar="S", help="deadline of a call (default: 10)"
    )
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
    add("packs", packs, "stored packs")
    add_packs(add("pin", _pinning(True), "protect packs from eviction, durably"), "+")
    add_packs(add("unpin", _pinning(False), "let packs be evicted again"), "+")
    removal = add("evict", evict, "remove packs with their sidecars from the store")
    add_packs(removal, "*")
    removal.add_argument("--descendants", action="store_true", help="also the packs that continue them")
    removal.add_argument("--unused", action="store_true", help="also every pack that no session uses and nobody pinned")
    removal.add_argument(
        "--older-than", type=_age, default=0.0, metavar="AGE", help="of --unused only those older: 30m, 12h, 7d"
    )
    removal.add_argument("--dry-run", action="store_true", help="only show which packs would go")
    add_packs(add("verify", verify, "read every block and check its CRC"), "*", " (default: all)")
    add("audit", audit, "compare what must be equal: catalogue and files, references, runs, frames")
    add("config", config, "the daemon's configuration and where each value came from")
    add("drain", drain, "refuse new work from now on; SIGTERM then ends the daemon").add_argument(
        "--wait", type=_seconds, default=0.0, metavar="S", help="until no session is open, at most S seconds"
    )
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
    return "--timeout 0: write seconds above 0" if not arguments.timeout else ""


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
    broker = arguments.broker or _broker_beside(arguments.socket)
    try:
        with AdminClient.connect(arguments.socket, broker, arguments.timeout) as client:
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


def _broker_beside(socket: str) -> str:
    if socket == default_socket():
        return default_broker()
    return socket.rpartition("/")[0] + "/broker.sock" if "/" in socket else "broker.sock"


def _pack_ids(client: AdminClient, beginnings: Sequence[str]) -> list[bytes]:
    """The packs that are meant, once each. NOT_FOUND for a beginning of none or of several."""
    known = [item.pack_id for item in client.list_packs()] if beginnings else []
    wanted: dict[bytes, None] = {}
    for text in beginnings:
        matches = [name for name in known if name.hex().startswith(text.lower())]
        if len(matches) != 1:
            count = len(matches) or "no"
            raise StoreError("NOT_FOUND", f"{count} packs begin with {text!r}; see kvctl packs --format json")
        wanted[matches[0]] = None
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
        return f"{value:.1f}"
    if isinstance(value, list):
        return ",".join(map(str, value))
    text = str(value)
    return text[:ID_DIGITS] if name in ("pack_id", "build", "parent") else text


if __name__ == "__main__":
    sys.exit(main())
