"""Measured figures, in the one JSON form that the demo and every benchmark print."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Figure:
    """A figure and, where there is one, its rival or physical limit from the same run; `ratio` = value / rival_value.

    Without a value the figure was not run, and `unit` says why."""

    name: str
    value: float | None
    unit: str
    rival: str | None = None
    rival_value: float | None = None
    ratio: float | None = None
    runs: int = 1
    min: float | None = None
    max: float | None = None

    @classmethod
    def not_run(cls, name: str, reason: str) -> Figure:
        return cls(name, None, f"not run: {reason}", runs=0)

    @classmethod
    def of_runs(
        cls,
        name: str,
        values: Sequence[float],
        unit: str,
        rival: str | None = None,
        rival_values: Sequence[float] | None = None,
    ) -> Figure:
        """Medians; the ratio is the median of the paired ratios."""
        value, low, high = statistics.median(values), min(values), max(values)
        if rival is None or not rival_values:
            return cls(name, value, unit, runs=len(values), min=low, max=high)
        ratio = statistics.median(a / b for a, b in zip(values, rival_values, strict=True))
        return cls(name, value, unit, rival, statistics.median(rival_values), ratio, len(values), low, high)


def report(figures: Sequence[Figure]) -> dict[str, object]:
    """One JSON object: where, from which commit, when, by which command, and the figures."""
    return {
        "machine": machine(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "figures": [asdict(figure) for figure in figures],
    }


def print_json(figures: Sequence[Figure]) -> None:
    print(json.dumps(report(figures), indent=2))


def print_table(title: str, figures: Sequence[Figure]) -> None:
    """The same for people: name, value, unit, and the rival of the same run."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in ("figure", "value", "unit", "min", "max", "rival", "rival value", "ratio"):
        table.add_column(column, justify="left" if column in ("figure", "unit", "rival") else "right")
    for f in figures:
        table.add_row(
            f.name, _show(f.value), f.unit, _show(f.min), _show(f.max),
            f.rival or "", _show(f.rival_value), _show(f.ratio),
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def machine() -> str:
    """Processor, cores and memory in words."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {memory_gib:.0f} GiB, Linux {platform.release()}"


def commit() -> str:
    """The checkout's commit, `unknown` outside one."""
    try:
        found = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip()


def _show(value: float | None) -> str:
    if value is None:
        return ""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.3g}" if abs(value) < 10 else f"{value:,.1f}"
