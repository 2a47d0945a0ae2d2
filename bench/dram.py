"""What does it cost that DRAM holds only a part of the KV? Shape B8, random K and V, three quarters of the heads hit.

One document is stored in daemons whose DRAM has 100, 50, 25 and 12.5 % of its KV; they take turns, step by step. Parts
(`--only`):

    steps     `dram_step_ms.PERCENT.BUDGET`, budgets in percent; `dram25_share.BUDGET` (and 50, 12.5): the time of the
              limit / the step's, where the limit is the longer of the step with all in DRAM and of the bytes that were
              moved at the rate at which fio reads 64 KiB at random from the same packs
    first     `first_step_ratio.PERCENT`: the first step of a session that attaches to the stored packs / the median of
              the steps behind it; `.labels`: where those of the session before are kept
    checksum  `checksum_share.decode.PERCENT` and `.cold.PERCENT`: what one thread takes for the checksums of the bytes
              that were read, as a part of a step and of reading the whole document, most of it from the disk
    shared    `shared_step_ratio.2`: a step whose tickets two copy threads share, with a ring for each, / one whose
              tickets one of them serves; every head misses, and all KV is in DRAM

Tokens are random: what misses exchanges most of its set. The quarter of the heads that misses is always the same one,
so DRAM for a quarter of the KV comes to hold nearly all that is ever wanted: `dram_read_per_moved` says how much it
did, and 12.5 % is the harder case.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.comparison import Run, Samples, column, in_turn
from bench.decoder import HITS, SEED, Document, read_all
from bench.document import counters, scratch
from bench.fio import random_reads_per_s
from bench.parts import count, some_of
from bench.rivals import NotRun
from decode_worker.figures import Figure, print_json, print_table
from decode_worker.records import RecordFormat
from decode_worker.synthetic.checkpoint import B8, Shape, random_checkpoint
from kvstore_service._native import block_crcs

ALL, PART = 100.0, 25.0
FIO = "fio"
FIO_BYTES, FIO_DEPTH, FIO_S = 64 << 10, 32, 1.0
CHECKED_BYTES = 32 << 20
BUILD_BYTES = 16
RINGS = 2


@dataclass(frozen=True)
class Settings:
    """`percents`: of the KV, in DRAM; all of it first. `part_budget`: of `first` and `checksum`."""

    percents: tuple[float, ...] = (ALL, 50, 25, 12.5)
    budgets: tuple[float, ...] = (0.0156, 0.1)
    part_budget: float = 0.1
    shape: Shape = field(default_factory=lambda: B8)
    tokens: int = 32 << 10
    steps: int = 6
    repeats: int = 5
    later_steps: int = 8
    threads: int = 1


def main() -> int:
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m bench.dram", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=some_of(PARTS), default=tuple(PARTS), help="parts, such as steps,first")
    parser.add_argument("--tokens", type=count, default=default.tokens, help="131072 needs 5 GiB of disk")
    parser.add_argument("--steps", type=count, default=default.steps, help="of a sample")
    parser.add_argument("--repeats", type=count, default=default.repeats)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    figures = measure(Settings(tokens=a.tokens, steps=a.steps, repeats=a.repeats), a.only)
    print_json(figures) if a.json else print_table("A part of the KV in DRAM", figures)
    return 0


Documents = Mapping[float, Document]


def measure(settings: Settings, parts: Sequence[str]) -> list[Figure]:
    figures: list[Figure] = []
    with scratch() as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        checkpoint = random_checkpoint(directory / "model", settings.shape, SEED)
        documents = {
            percent: stack.enter_context(
                Document(
                    checkpoint, directory / f"{percent:g}", settings.tokens, dram_share=percent / 100,
                    budget=settings.part_budget, layer0="offloaded", threads=settings.threads,
                )
            )
            for percent in settings.percents
        }  # fmt: skip
        for part in parts:
            started = time.monotonic()
            figures += PARTS[part](settings, documents, directory)
            print(f"{part}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return figures


# --- parts ---


def steps(settings: Settings, documents: Documents, directory: Path) -> list[Figure]:
    figures: list[Figure] = []
    for budget in settings.budgets:
        decoders = {percent: each.decoder("qsac", HITS["hit75"], budget=budget) for percent, each in documents.items()}
        runs: dict[str, Run] = {_name(percent): decoder.run for percent, decoder in decoders.items()}
        packs = sorted((directory / _name(ALL)).rglob("*.pack"))
        missing = None
        try:
            _fio(packs)
            runs[FIO] = lambda _, packs=packs: {"rate": _fio(packs)}  # type: ignore[misc]
        except NotRun as error:
            missing = str(error)
        samples = in_turn(runs, settings.steps, settings.repeats)
        figures += _steps(settings, samples, f"{100 * budget:g}", missing)
        for decoder in decoders.values():
            decoder.close()
    return figures


def _steps(settings: Settings, samples: Samples, at: str, missing: str | None) -> Iterator[Figure]:
    whole = samples[_name(ALL)]
    in_dram = column(whole, "step")
    yield Figure.of_runs(f"hit_ratio.{at}", column(whole, "hit_ratio"), "label hits / lookups")
    yield Figure.of_runs(f"dram_step_ms.{_name(ALL)}.{at}", in_dram, "ms")
    for percent in map(_name, settings.percents[1:]):
        ours = samples[percent]
        times = column(ours, "step")
        moved = [records * _record_bytes(settings) for records in column(ours, "moved")]
        read = column(ours, "nvme_read")
        yield Figure.of_runs(f"dram_step_ms.{percent}.{at}", times, "ms", "all in DRAM", in_dram)
        yield Figure.of_runs(f"dram_read_per_moved.{percent}.{at}", _paired(read, moved), "B/B")
        if missing is not None:
            yield Figure.not_run(f"dram{percent}_share.{at}", missing)
            continue
        disk = [1000 * bytes_ / sample["rate"] for bytes_, sample in zip(moved, samples[FIO], strict=True)]
        limit = [max(pair) for pair in zip(in_dram, disk, strict=True)]
        yield Figure.of_runs(f"moved_at_fio_ms.{percent}.{at}", disk, "ms")
        yield Figure.of_runs(f"dram{percent}_share.{at}", _paired(limit, times), "of the limit's speed")


def first(settings: Settings, documents: Documents, directory: Path) -> list[Figure]:
    decoders = {
        f"{_name(percent)}{suffix}": documents[percent].decoder("qsac", HITS["hit75"], labels=labels)
        for percent in documents
        if percent in (ALL, PART)
        for suffix, labels in (("", "off"), (".labels", "kept"))
    }
    ratios: dict[str, list[float]] = {name: [] for name in decoders}
    times: dict[str, list[float]] = {name: [] for name in decoders}
    for _ in range(settings.repeats):
        for name, decoder in decoders.items():
            decoder.attach()
            its_first, *later = (decoder.run(1)["step"] for _ in range(1 + settings.later_steps))
            times[name].append(its_first)
            ratios[name].append(its_first / statistics.median(later))
    for decoder in decoders.values():
        decoder.close()
    return [
        figure
        for name, of in ratios.items()
        for figure in (
            Figure.of_runs(f"first_step_ms.{name}", times[name], "ms"),
            Figure.of_runs(f"first_step_ratio.{name}", of, "x a later step"),
        )
    ]


def shared(settings: Settings, documents: Documents, directory: Path) -> list[Figure]:
    with Document(
        documents[ALL].checkpoint, directory / "shared", settings.tokens, daemon_options=(f"--copy-threads={RINGS}",),
        budget=settings.part_budget, layer0="offloaded", threads=settings.threads,
    ) as document:  # fmt: skip
        decoders = {str(rings): document.decoder("qsac", HITS["miss"], decode_rings=rings) for rings in (1, RINGS)}
        samples = in_turn({rings: each.run for rings, each in decoders.items()}, settings.steps, settings.repeats)
        for decoder in decoders.values():
            decoder.close()
    alone, together = (column(samples[rings], "step") for rings in decoders)
    return [
        Figure.of_runs(f"shared_step_ratio.{RINGS}", _paired(together, alone), "x a step with one ring"),
        Figure.of_runs(f"shared_step_ms.{RINGS}", together, "ms", "one ring", alone),
    ]


def checksum(settings: Settings, documents: Documents, directory: Path) -> list[Figure]:
    document = documents[PART]
    decoder = document.decoder("qsac", HITS["hit75"])
    reader = document.engine("qsac")
    blocks = np.random.default_rng(SEED).integers(256, size=CHECKED_BYTES, dtype=np.uint8)
    rates, decode, cold = [], [], []
    for _ in range(settings.repeats):
        started = time.perf_counter()
        block_crcs(bytes(BUILD_BYTES), 0, blocks)
        rates.append(CHECKED_BYTES / (time.perf_counter() - started))
        sample = decoder.run(settings.steps)
        decode.append(1000 * sample["nvme_read"] / rates[-1] / sample["step"])
        before, started = counters(document.daemon)["nvme_read_bytes"], time.perf_counter()
        read_all(reader, decoder.ids)
        seconds = time.perf_counter() - started
        cold.append((counters(document.daemon)["nvme_read_bytes"] - before) / rates[-1] / seconds)
    document.close(reader)
    decoder.close()
    return [
        Figure.of_runs("checksum_rate", rates, "B/s, a thread"),
        Figure.of_runs(f"checksum_share.decode.{_name(PART)}", decode, "of a step"),
        Figure.of_runs(f"checksum_share.cold.{_name(PART)}", cold, "of a read"),
    ]


PARTS: dict[str, Callable[[Settings, Documents, Path], list[Figure]]] = {
    part.__name__: part for part in (steps, first, checksum, shared)
}


def _fio(packs: Sequence[Path]) -> float:
    """Bytes per second."""
    return FIO_BYTES * random_reads_per_s(packs, FIO_BYTES, FIO_DEPTH, FIO_S)


def _record_bytes(settings: Settings) -> int:
    heads, dim = int(settings.shape["num_key_value_heads"]), int(settings.shape["head_dim"])
    return RecordFormat(heads, dim, "bfloat16").record_bytes


def _paired(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def _name(percent: float) -> str:
    return f"{percent:g}"


if __name__ == "__main__":
    sys.exit(main())
