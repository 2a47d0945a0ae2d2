"""What kvctl shows: tables for people, JSON for programs."""

import itertools
import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from kvstore_service.shared.types import format_size, printable

ID_DIGITS = 16
ALIGNED = 200  # rows that say how wide the columns are
TIMES = ("created_s", "last_used_s", "at_s")

Row = dict[str, Any]


class Output:
    """Tables for people, one JSON document for programs."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        width = None if sys.stdout.isatty() else 160
        self.console = Console(width=width, highlight=False, markup=False, emoji=False)

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


def plain(message: Message) -> Row:
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
    text = printable(",".join(map(str, value)) if isinstance(value, list) else str(value))
    return text[:ID_DIGITS] if name in ("pack_id", "build", "parent") else text
