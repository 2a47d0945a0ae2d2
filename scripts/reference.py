"""Writes the tables of docs/operations.md that come from the code: settings, metrics, commands.

python scripts/reference.py [--check]
"""

import argparse
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from decode_worker.config import KEYS as WORKER_KEYS
from decode_worker.config import WorkerConfig
from kvstore_service import kvctl
from kvstore_service.daemon.config import KEYS as DAEMON_KEYS
from kvstore_service.daemon.front.metrics import COUNTERS, GAUGES, HISTOGRAMS, LIMITS, OTHERS, PER_USER
from kvstore_service.shared.settings import Key

PAGE = Path(__file__).parents[1] / "docs" / "operations.md"
# Defaults that depend on who asks are shown for root and without an environment.
ROOT = {"data_dir": "/var/lib/headgate", "socket": "/run/headgate/store.sock", "broker": "/run/headgate/broker.sock"}


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def daemon() -> str:
    def default(key: Key) -> str:
        return ROOT.get(key.name) or (str(key.default()) if key.default else "")

    return table(
        ("key", "default", "meaning"), ((f"`{key.name}`", f"`{default(key)}`", key.help) for key in DAEMON_KEYS)
    )


def worker() -> str:
    defaults = {name: value for name, value in vars(WorkerConfig).items() if not name.startswith("_")} | ROOT

    def default(name: str) -> str:
        value = defaults.get(name)
        return "" if value is None else f"`{value}`"

    return table(("key", "default", "meaning"), ((f"`{key.name}`", default(key.name), key.help) for key in WORKER_KEYS))


def metrics() -> str:
    rows = [(f"`kvstore_{name}`", "gauge", text) for name, text in GAUGES.items()]
    rows += [(f"`kvstore_{name}_total`", "counter", text) for name, text in COUNTERS.items()]
    rows += [(f"`kvstore_limit_{name}`", "gauge", f"limit {text}") for name, text in LIMITS.items()]
    rows += [(f'`kvstore_{name}{{uid="N"}}`', "gauge", text) for name, text in PER_USER.items()]
    rows += [(f'`kvstore_{name}{{class="NAME"}}`', "histogram", text) for name, text in HISTOGRAMS.items()]
    rows += [(f"`{name if '*' in name else 'kvstore_' + name}`", "gauge", text) for name, text in OTHERS.items()]
    return table(("metric", "kind", "meaning"), rows)


def commands() -> str:
    (found,) = (a for a in kvctl.parser()._actions if isinstance(a, argparse._SubParsersAction))
    rows = []
    for choice in found._choices_actions:
        usage = found.choices[choice.dest].format_usage().removeprefix("usage: ").split()
        own = " ".join(usage[2:])
        shown = re.sub(r"^\[-h\]|\[--(socket|broker|timeout) \w+\]|\[--format {table,json}\]", "", own)
        rows.append((f"`kvctl {choice.dest} {' '.join(shown.split())}`".replace(" `", "`"), choice.help or ""))
    return table(("command", "what it does"), rows)


TABLES = {"settings of kvstored": daemon, "settings of the worker": worker, "metrics": metrics, "kvctl": commands}


def filled(text: str) -> str:
    for name, make in TABLES.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"{PAGE.name} lacks the marks of the table {name!r}")
        head, rest = text.split(begin)
        text = f"{head}{begin}\n\n{make()}\n\n{end}{rest.split(end)[1]}"
    return text


def main() -> int:
    os.environ["COLUMNS"] = "400"  # argparse folds its usage otherwise
    text = PAGE.read_text()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(filled(text))
        return 0
    if text != filled(text):
        print("docs/operations.md differs from the code; run python scripts/reference.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
