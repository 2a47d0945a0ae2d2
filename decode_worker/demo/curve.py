"""What a generation costs over the length of its context, as figures and as a table."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from decode_worker.demo.generation import ALWAYS_SELECTS, FULL, POLICIES, Result
from decode_worker.figures import Figure
from kvstore_service.shared.types import format_size

COLUMNS = ("context", "policy", "ms/token", "tokens/s", "× full", "device", "attended", "hits", "records/token")


def figures(results: Sequence[Result]) -> list[Figure]:
    """Time and device bytes against `full`, records moved against the policy that selects always, of the same run."""
    by_case = {(result.context, result.policy): result for result in results}
    found: list[Figure] = []
    for r in results:
        full, always = by_case[r.context, FULL], by_case[r.context, ALWAYS_SELECTS]
        device, whole = r.footprint.held_bytes, full.footprint.held_bytes
        if r is full:
            found += [Figure.of_runs(r.name, r.ms, "ms/token"), Figure(f"{r.name}.held_bytes", whole, "B")]
            found.append(Figure(f"generation.{r.context // 1024}k.nvme_read_bytes", r.nvme_read_bytes, "B"))
            continue
        ratio = r.moved / always.moved if always.moved else None
        found += [
            Figure.of_runs(r.name, r.ms, "ms/token", FULL, full.ms),
            Figure(f"{r.name}.held_bytes", device, "B", FULL, whole, device / whole),
            Figure(f"{r.name}.hit_ratio", r.hit_ratio, "hits / lookups, first step too"),
            Figure(f"{r.name}.attended", r.attended, "of the tokens, mean of offloaded heads"),
            Figure(f"{r.name}.records_moved", r.moved, "records/token", ALWAYS_SELECTS, always.moved, ratio),
        ]
    return found


def print_curve(results: Sequence[Result]) -> None:
    """The table for people."""
    table = Table(
        title="A long generation: random weights of shape B8, random K and V, all KV in DRAM, batch 1",
        title_justify="left",
        caption="device: window, labels, index; hits: with first steps; `infinigen` selects at every step",
        caption_justify="left",
    )
    for column in (
        "context",
        "policy",
        "ms/token",
        "tokens/s",
        "× full",
        "device",
        "attended",
        "hits",
        "records/token",
    ):
        table.add_column(column, justify="left" if column == "policy" else "right")
    whole = {r.context: statistics.median(r.ms) for r in results if r.policy == FULL}
    for r in results:
        ms = statistics.median(r.ms)
        table.add_row(
            f"{r.context:,}", r.policy, f"{ms:.1f}", f"{1000 / ms:.1f}", f"{whole[r.context] / ms:.2f}",
            format_size(r.footprint.held_bytes), f"{r.attended:.1%}",
            "" if r.policy == FULL else f"{r.hit_ratio:.0%}", f"{r.moved:,.0f}", end_section=r.policy == POLICIES[-1],
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 140).print(table)
