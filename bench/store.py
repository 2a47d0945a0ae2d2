"""How near does the store come to what disk and memory give? Each figure is ours / the rival's rate, of the same run.

nvme      cold GATHERs in reads of 4 and 64 KiB, checksums and all, against fio and a cold numpy.memmap
ingest    packs from the first STORE until they are durable, against fio writing as much in order
gather    warm GATHERs of random records on one and two copy threads, against threads that copy and do nothing else
ticket    the round trip of a hot ticket of one record / that of a bare word between two processes (times, not rates)
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import gather, nvme, ring
from bench.compiled import compiled
from bench.document import StoredDocument, scratch
from bench.fio import write_bytes_per_s
from bench.parts import count, directory, some_of
from bench.rivals import NotRun
from decode_worker.figures import Figure, print_json, print_table
from kvstore_service.client.private import PrivateDaemon

LAYERS, LANES, RECORD_BYTES = 8, 2, 512
WRITE_BYTES, WRITE_DEPTH = 128 << 10, 8  # as the store writes
TIMEOUT_S = 120


@dataclass(frozen=True)
class Settings:
    directory: Path = Path("/var/tmp")  # the disk that is measured
    repeats: int = 5
    nvme_tokens: int = nvme.TOKENS
    nvme_tickets: int = 32
    depth: int = nvme.DEPTH
    ingest_tokens: int = 32768  # 256 MiB
    gather_tokens: int = gather.TOKENS
    gather_records: int = gather.RECORDS
    gather_tickets: int = gather.TICKETS
    threads: tuple[int, ...] = (1, 2)
    rounds: int = ring.ROUNDS


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.store", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=some_of(PARTS), default=tuple(PARTS), help="parts, such as nvme,ingest")
    parser.add_argument("--directory", type=directory, default=Settings.directory, help="the disk that is measured")
    parser.add_argument("--repeats", type=count, default=Settings.repeats)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    figures = measure(Settings(directory=a.directory, repeats=a.repeats), a.only)
    print_json(figures) if a.json else print_table("The store against disk and memory", figures)
    return 0


def measure(settings: Settings, parts: Iterable[str]) -> list[Figure]:
    return [figure for part in parts for figure in PARTS[part](settings)]


def _nvme(settings: Settings) -> list[Figure]:
    cases = [case for case in nvme.CASES if case.read_bytes in (4 << 10, 64 << 10)]
    measured = nvme.rates(
        settings.directory, tokens=settings.nvme_tokens, tickets=settings.nvme_tickets, repeats=settings.repeats,
        depth=settings.depth, cases=cases, readers=(nvme.FIO, nvme.MEMMAP),
    )  # fmt: skip
    figures = []
    for case, rates in measured.items():
        size = f"{case.read_bytes // 1024}k"
        for name, rival in ((f"nvme_{size}_vs_fio", nvme.FIO), (f"nvme_vs_memmap_{size}", nvme.MEMMAP)):
            if rates.get(rival):
                figures += _compared(name, f"nvme_{size}", "reads/s", rates[""], rival, rates[rival])
            else:
                figures.append(Figure.not_run(name, f"{rival} is missing; apt-get install fio"))
    return figures


def _ingest(settings: Settings) -> list[Figure]:
    size = settings.ingest_tokens * LAYERS * LANES * RECORD_BYTES
    ours, theirs = [], []
    try:
        for _ in range(settings.repeats):
            with scratch(settings.directory) as directory:
                ours.append(size / _stored_s(Path(directory), settings.ingest_tokens))
                theirs.append(write_bytes_per_s(Path(directory) / "rival", WRITE_BYTES, size, WRITE_DEPTH))
    except NotRun as error:
        return [Figure.not_run("ingest_vs_disk", str(error))]
    return _compared("ingest_vs_disk", "ingest", "B/s", ours, "fio, in order", theirs)


def _stored_s(directory: Path, tokens: int) -> float:
    with (
        PrivateDaemon(directory / "store", nvme.DRAM_BYTES) as daemon,
        StoredDocument(daemon, tokens, layers=LAYERS, lanes=LANES) as stored,
    ):
        return stored.stored_s


def _gather(settings: Settings) -> list[Figure]:
    figures = []
    with scratch() as directory:
        bare = compiled("bare_gather", Path(directory))
        for threads in settings.threads:
            ours, theirs = [], []
            with gather.warm_documents(threads, settings.gather_tokens, settings.gather_records) as documents:
                for seed in range(settings.repeats):
                    ours.append(
                        gather.random_gb_per_s(documents, settings.gather_records, settings.gather_tickets, seed)
                    )
                    theirs.append(_bare_gb_per_s(bare, threads, settings))
            figures += _compared(f"gather_vs_bare.{threads}", f"gather.{threads}", "GB/s", ours, "bare loop", theirs)
    return figures


def _bare_gb_per_s(program: Path, threads: int, settings: Settings) -> float:
    lanes = gather.LAYERS * gather.LANES
    numbers = (threads, lanes, settings.gather_tokens, RECORD_BYTES, settings.gather_records, settings.gather_tickets)
    done = subprocess.run([program, *map(str, numbers)], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return float(done.stdout)


def _ticket(settings: Settings) -> list[Figure]:
    hot = [case for case in ring.CASES if case.idle_s == 0]
    bare, lines = ring.measure(settings.rounds, settings.repeats, hot)
    return [
        Figure("ticket_hot_vs_pingpong", bare.ratio, "x", runs=bare.runs), bare,
        Figure("ticket_hot_vs_lines", lines.ratio, "x", runs=lines.runs), lines,
    ]  # fmt: skip


def _compared(
    name: str, what: str, unit: str, ours: Sequence[float], rival: str, theirs: Sequence[float]
) -> list[Figure]:
    """The ratio under its own name, and what it is of."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return [Figure.of_runs(name, ratios, "x"), Figure.of_runs(what, ours, unit, rival, theirs)]


PARTS: dict[str, Callable[[Settings], list[Figure]]] = {
    "nvme": _nvme, "ingest": _ingest, "gather": _gather, "ticket": _ticket,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
