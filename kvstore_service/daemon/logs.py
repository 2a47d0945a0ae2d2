"""Structured logs on stderr: one event a line, as text or JSON, with the id of the request that it belongs to.

2026-11-21T02:13:31.042Z INFO kvstored.store worker registered name=worker-0 pid=4711 request=9f2c4be1a0d37755
"""

import json
import logging
import re
import sys
import threading
from collections import Counter
from collections.abc import Hashable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")

SPARSE_LINES = 5  # of one key in one period
SPARSE_KEYS = 256  # those beyond share one

# Of the call that this thread serves; its errors carry the same id in trailing metadata.
request_id: ContextVar[str] = ContextVar("request_id", default="")


def event(log: logging.Logger, level: int, message: str, **fields: object) -> None:
    """A line of fixed words, with what differs from event to event as fields."""
    log.log(level, message, extra={"fields": fields})


class Sparse:
    """Events that anybody can cause as often as they like: of those with the same key a few lines in every `period_s`,
    and at its end one that says how many there were besides. Thread-safe."""

    def __init__(self, log: logging.Logger, period_s: float = 5.0) -> None:
        self._log = log
        self._period_s = period_s
        self._lock = threading.Lock()
        self._seen: Counter[Hashable] = Counter()
        self._left_out: dict[Hashable, tuple[int, str, dict[str, object]]] = {}  # the latest of each key

    def event(self, key: Hashable, level: int, message: str, **fields: object) -> None:
        if not self._log.isEnabledFor(level):
            return
        with self._lock:
            if not self._seen:
                period = threading.Timer(self._period_s, self._end)
                period.daemon = True
                period.start()
            if key not in self._seen and len(self._seen) >= SPARSE_KEYS:
                key = None
            self._seen[key] += 1
            if self._seen[key] > SPARSE_LINES:
                self._left_out[key] = (level, message, fields)
                return
        event(self._log, level, message, **fields)

    def _end(self) -> None:
        with self._lock:
            seen, self._seen = self._seen, Counter()
            left_out, self._left_out = self._left_out, {}
        for key, (level, message, fields) in left_out.items():
            event(self._log, level, message, **fields, unlogged=seen[key] - SPARSE_LINES)


def start(form: str, level: str) -> None:
    """Everything that is logged from now on goes to stderr. `form` is of FORMATS, `level` of LEVELS."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    for library in ("asyncio", "grpc"):  # at debug they have a line for every call of their own
        logging.getLogger(library).setLevel(max(logging.INFO, logging.getLogger().level))


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, the event's fields, and `trace` for an exception."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """time LEVEL logger message key=value ...; values with blanks are quoted as in JSON. A trace follows on its own."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {key}={_quoted(value)}" for key, value in _fields(record).items())
        # A text from outside must not be able to start a line of its own.
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        line = f"{_time(record)} {record.levelname} {record.name} {message}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = dict(getattr(record, "fields", {}))
    if (current := request_id.get()) and "request" not in fields:
        fields["request"] = current
    return fields


def _quoted(value: object) -> str:
    text = f"{value:.1f}" if isinstance(value, float) else str(value)
    return text if re.fullmatch(r"[\w.:/,@%+-]+", text, re.ASCII) else json.dumps(text)
