"""Which policy keeps in DRAM what decoding comes back to? Traces of real runs, replayed by the daemon's own policies.

Traces, each of a daemon that had everything in DRAM:

    demo      the shipped model answers questions on its own documentation, each in a fresh session
    drifting  a random model, whose tokens are fed ten times in a row: queries change slowly
    random    the same, every token another one

Each is replayed at DRAM tiers of parts of the document's extents. `hit_ratio.POLICY.TRACE.PART` stands beside the best
static placement of that trace, which knows it beforehand and never misses what it holds; `hit_vs_best_static` and
`hit_vs_belady` are the means of these ratios over the parts. `most_used_so_far` is no policy of the daemon's: it holds
what was used most since the start, whose counts no tier could keep. The first quarter of each trace only warms the
tier. An access is an extent that a ticket wanted, whatever it wanted of it; byte for byte nothing is said. What
binding a session reads passes through the tier and is not counted: `restored` is its part of the accesses.

`hit_ratio.stalled` and `waiting_tickets` are of the default policy when half of the tier is for whole segments that
stall most (bench/stalled.py), beside the default policy alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from bench.document import scratch
from bench.parts import count
from bench.placement import Hits, Keys, belady, best_static, most_used_so_far
from bench.stalled import replay_with_stalled_kept, waiting_tickets
from bench.traces import Trace, demo, synthetic
from decode_worker.figures import Figure, print_json, print_table
from decode_worker.synthetic.checkpoint import B8, Shape
from kvstore_service._native import TIER_POLICIES, replay

WARM = 0.25  # of a trace


@dataclass(frozen=True)
class Settings:
    """`parts`: of the document's extents that the DRAM tier has, in percent."""

    parts: tuple[float, ...] = (50, 25, 12.5)
    shape: Shape = field(default_factory=lambda: B8)
    tokens: int = 16 << 10
    steps: int = 120
    budget: float = 0.0156
    demo_tokens: int = 8 << 10
    demo_questions: int = 10
    demo_budget: float = 0.1


def main() -> int:
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m bench.tiers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(TRACES), help="traces, such as demo,random")
    parser.add_argument("--steps", type=count, default=default.steps, help="of drifting and random")
    parser.add_argument("--questions", type=count, default=default.demo_questions, help="of demo")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where traces are kept, as TRACE.npz, and taken from")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    if unknown := set(a.only.split(",")) - set(TRACES):
        parser.error(f"--only {','.join(sorted(unknown))}: the traces are {', '.join(TRACES)}")
    figures = measure(Settings(steps=a.steps, demo_questions=a.questions), a.only.split(","), a.keep)
    print_json(figures) if a.json else print_table("Policies of the DRAM tier", figures)
    return 0


def measure(settings: Settings, names: Sequence[str], keep: Path | None = None) -> list[Figure]:
    figures: list[Figure] = []
    for name in names:
        started = time.monotonic()
        trace = _kept(name, keep) or _recorded(name, settings, keep)
        figures += compare(trace, settings.parts)
        print(
            f"{name}: {len(trace.accesses)} accesses, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True
        )
    return figures


def compare(trace: Trace, parts: Sequence[float]) -> list[Figure]:
    """Every policy of the daemon on one trace."""
    keys, first = trace.keys, int(len(trace.accesses) * WARM)
    decoding = trace.accesses["bulk"] == 0
    counted = decoding & (np.arange(len(keys)) >= first)
    deciders: dict[str, Callable[[int, Keys], Hits]] = {name: partial(replay, name) for name in TIER_POLICIES}
    deciders["most_used_so_far"] = lambda frames, keys: most_used_so_far(keys, frames)
    sizes = {f"{part:g}": max(1, int(trace.extents * part / 100)) for part in parts}
    bounds = {
        "best static": {part: best_static(keys[counted], frames).mean() for part, frames in sizes.items()},
        "belady": {
            part: belady(keys[decoding], frames)[np.count_nonzero(decoding[:first]) :].mean()
            for part, frames in sizes.items()
        },
    }
    figures = [
        Figure(f"accesses.{trace.name}", len(keys), f"of {len(np.unique(keys))} of {trace.extents} extents"),
        Figure(f"restored.{trace.name}", float(1 - decoding.mean()), "of the accesses"),
        *(
            Figure(f"hit_ratio.{bound.replace(' ', '_')}.{trace.name}.{part}", float(ratio), "of the accesses")
            for bound, ratios in bounds.items()
            for part, ratio in ratios.items()
        ),
    ]
    for name, decide in deciders.items():
        found = {part: float(decide(frames, keys)[counted].mean()) for part, frames in sizes.items()}
        for part, ratio in found.items():
            static = float(bounds["best static"][part])
            label = f"hit_ratio.{name}.{trace.name}.{part}"
            figures.append(Figure(label, ratio, "of the accesses", "best static", static, ratio / static))
        for bound, ratios in bounds.items():
            mean = statistics.mean(found[part] / float(ratios[part]) for part in found)
            figures.append(Figure(f"hit_vs_{bound.replace(' ', '_')}.{name}.{trace.name}", mean, f"of {bound}'s hits"))
    return figures + list(_stalled(trace, sizes, first, counted))


def _stalled(trace: Trace, sizes: Mapping[str, int], first: int, counted: Hits) -> Iterator[Figure]:
    default = TIER_POLICIES[0]
    for part, frames in sizes.items():
        alone = replay(default, frames, trace.keys).astype(bool)
        kept = replay_with_stalled_kept(trace, default, frames, first)
        theirs, ours = float(alone[counted].mean()), float(kept[counted].mean())
        yield Figure(f"hit_ratio.stalled.{trace.name}.{part}", ours, "of the accesses", default, theirs, ours / theirs)
        theirs, ours = waiting_tickets(trace, alone, first), waiting_tickets(trace, kept, first)
        label = f"waiting_tickets.{trace.name}.{part}"
        yield Figure(label, ours, "of the tickets", default, theirs, ours / theirs if theirs else None)


# --- traces ---


def _demo(settings: Settings, directory: Path) -> Trace:
    return demo(directory, settings.demo_tokens, settings.demo_questions, settings.demo_budget)


def _synthetic(name: str, fresh: float, settings: Settings, directory: Path) -> Trace:
    return synthetic(directory, name, settings.shape, settings.tokens, settings.steps, fresh, settings.budget)


TRACES: dict[str, Callable[[Settings, Path], Trace]] = {
    "demo": _demo,
    "drifting": partial(_synthetic, "drifting", 0.1),
    "random": partial(_synthetic, "random", 1.0),
}


def _recorded(name: str, settings: Settings, keep: Path | None) -> Trace:
    with scratch() as directory:
        trace = TRACES[name](settings, Path(directory))
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        np.savez(keep / f"{name}.npz", accesses=trace.accesses, extents=trace.extents)
    return trace


def _kept(name: str, keep: Path | None) -> Trace | None:
    if keep is None or not (file := keep / f"{name}.npz").is_file():
        return None
    with np.load(file) as arrays:
        return Trace(name, arrays["accesses"], int(arrays["extents"]))


if __name__ == "__main__":
    raise SystemExit(main())
