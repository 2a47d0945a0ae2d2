"""kvctl: what an operator asks of the node's daemon."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvstore_service.client import AdminClient
from kvstore_service.settings import default_broker, default_socket
from kvstore_service.types import StoreError, format_size

ID_DIGITS = 16

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


def config(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    found = client.get_config()
    output.rows(
        "config",
        [{"key": key, "value": value, "origin": found.origins[key]} for key, value in sorted(found.values.items())],
    )
    return 0


def verify(client: AdminClient, output: Output, arguments: argparse.Namespace) -> int:
    """1 if any pack is damaged."""
    wanted = [_pack_id(client, text) for text in arguments.packs]
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


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(prog="kvctl", description="Asks the node's kvstored.", allow_abbrev=False)
    flags.add_argument("--socket", default=default_socket(), help="gRPC socket of kvstored (default: %(default)s)")
    flags.add_argument("--broker", help="its broker socket (default: broker.sock beside the gRPC socket)")
    flags.add_argument("--format", choices=("table", "json"), default="table")
    flags.add_argument("--timeout", type=float, default=10.0, metavar="S", help="deadline of a call (default: 10)")
    commands = flags.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, command: Command, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        return sub

    add("status", status, "state, sizes and counters")
    add("sessions", sessions, "open sessions")
    add("describe", describe, "one session and its packs").add_argument("session")
    add("packs", packs, "stored packs")
    add("verify", verify, "read every block and check its CRC").add_argument(
        "packs", nargs="*", metavar="PACK", help="pack ids or unique beginnings of them (default: all)"
    )
    add("config", config, "the daemon's configuration and where each value came from")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """0, 1 for a failure (or damage found), 2 for wrong usage."""
    arguments = parser().parse_args(argv)
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
    except (grpc.RpcError, KeyboardInterrupt) as error:
        print(f"kvctl: {error!r}", file=sys.stderr)
        return 1


def _broker_beside(socket: str) -> str:
    if socket == default_socket():
        return default_broker()
    return socket.rpartition("/")[0] + "/broker.sock" if "/" in socket else "broker.sock"


def _pack_id(client: AdminClient, text: str) -> bytes:
    matches = [item.pack_id for item in client.list_packs() if item.pack_id.hex().startswith(text.lower())]
    if len(matches) != 1:
        raise StoreError("NOT_FOUND", f"{len(matches)} packs begin with {text!r}; give more digits, see kvctl packs")
    return matches[0]


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
