"""How many blocks per second does a cold GATHER bring from NVMe? Against plain readers of the same files.

The DRAM tier is tiny and nothing is read through, so each run of wanted blocks costs one O_DIRECT read: `scattered`
wants one record (a read of 4 KiB), `clustered` 32 neighbours (16 KiB), `long` 128 (64 KiB). The rivals read blocks of
the same size from the same packs, O_DIRECT at the same queue depth: fio, a liburing loop in Python, and a pread per
thread with as many threads; and numpy.memmap, cold, as it reads at random places (MADV_RANDOM). Reads per second and
GB/s; reads and bytes are the daemon's own counts, and it checks every block's checksum.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import liburing
import numpy as np

from bench.document import StoredDocument, counters, scratch
from bench.fio import random_reads_per_s
from bench.parts import count, directory
from bench.rivals import NotRun
from decode_worker.figures import Figure, print_json, print_table
from kvstore_service.client.private import PrivateDaemon

LAYERS, LANES = 8, 2
TOKENS = 65536  # 512 MiB in all
RECORDS_MAX = 8192  # of 512 B, of one ticket
DEPTH = 64
READS = 256  # of one ticket, at most
TICKETS = 64
REPEATS = 5
DRAM_BYTES = 16 << 20
FIO_S = 1.0
MEMMAP_BYTES = 16 << 20  # it takes long

Reads = list[tuple[int, int]]  # fd, offset
Reader = Callable[[Reads, int, int], None]


@dataclass(frozen=True)
class Case:
    name: str
    records: int  # neighbours
    read_bytes: int

    @property
    def span(self) -> int:
        """Records, whole reads of them, in which one read lies."""
        return self.read_bytes // RECORD_BYTES


RECORD_BYTES = 512
CASES = (Case("scattered", 1, 4096), Case("clustered", 32, 16384), Case("long", 128, 65536))
FIO, MEMMAP = "fio", "numpy.memmap"
Rates = dict[str, list[float]]  # reader ("" is the daemon) -> reads per second of each run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.nvme", description=__doc__)
    parser.add_argument(
        "--directory", type=directory, default="/var/tmp", help="where the packs lie: the disk that is measured"
    )
    parser.add_argument("--depth", type=count, default=DEPTH, help="reads in flight")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = measure(Path(arguments.directory), depth=arguments.depth)
    print_json(figures) if arguments.json else print_table(f"Cold GATHER, {arguments.depth} reads in flight", figures)
    return 0


def measure(directory: Path, **settings: Any) -> list[Figure]:
    """`settings`: of `rates`."""
    return [figure for case, measured in rates(directory, **settings).items() for figure in _figures(case, measured)]


def rates(
    directory: Path,
    *,
    tokens: int = TOKENS,
    reads: int = READS,
    tickets: int = TICKETS,
    repeats: int = REPEATS,
    depth: int = DEPTH,
    cases: Sequence[Case] = CASES,
    readers: Sequence[str] = (FIO, "liburing in Python", "pread threads", MEMMAP),
) -> dict[Case, Rates]:
    """Of the daemon and all readers in turn. One that cannot be had is left out."""
    rng = np.random.default_rng(1)
    options = ("--copy-threads=1", f"--io-depth={depth}", "--disk-cost=off")
    with (
        scratch(directory) as data_dir,
        PrivateDaemon(data_dir, DRAM_BYTES, options=options) as daemon,
        StoredDocument(daemon, tokens, layers=LAYERS, lanes=LANES, places=RECORDS_MAX) as stored,
        contextlib.ExitStack() as stack,
    ):
        paths = sorted(Path(data_dir).rglob("*.pack"))
        files = [_open(path, stack) for path in paths]

        def rate(reader: str, case: Case) -> float:
            if reader == FIO:
                return random_reads_per_s(paths, case.read_bytes, depth, FIO_S)
            some = MEMMAP_BYTES // case.read_bytes if reader == MEMMAP else reads * tickets
            wanted = _random_reads(rng, files, some, case.read_bytes)
            return _reads_per_s(READERS[reader], wanted, depth, case.read_bytes)

        measured: dict[Case, Rates] = {}
        for case in cases:
            of_case: Rates = measured.setdefault(case, {})
            per_ticket = min(reads, RECORDS_MAX // case.records, tokens // (2 * case.span))
            for _ in range(repeats):
                of_case.setdefault("", []).append(_cold_gather(daemon, stored, rng, case, per_ticket, tickets))
                for reader in readers:
                    with contextlib.suppress(NotRun):
                        of_case.setdefault(reader, []).append(rate(reader, case))
        return measured


def _figures(case: Case, measured: Rates) -> list[Figure]:
    def gb_per_s(rates: list[float]) -> list[float]:
        return [rate * case.read_bytes / 1e9 for rate in rates]

    name = f"cold_{case.name}_{case.read_bytes // 1024}k"
    ours = measured[""]
    return [
        figure
        for rival, rates in measured.items()
        if rival and rates
        for figure in (
            Figure.of_runs(name, ours, "reads/s", rival, rates),
            Figure.of_runs(name, gb_per_s(ours), "GB/s", rival, gb_per_s(rates)),
        )
    ]


def _cold_gather(
    daemon: PrivateDaemon, stored: StoredDocument, rng: np.random.Generator, case: Case, reads: int, tickets: int
) -> float:
    """Blocks of the case's size per second, from the daemon's counters: what is still in DRAM makes a read shorter."""
    batches = []
    for _ in range(tickets):
        # Every other one: two neighbours would be one read.
        spans = 2 * np.sort(rng.choice(stored.tokens // (2 * case.span), reads, replace=False))
        first = spans * case.span + rng.integers(case.span - case.records + 1, size=reads)
        records = (first[:, None] + np.arange(case.records)).ravel().astype(np.uint32)
        batches.append((int(rng.integers(LAYERS)), int(rng.integers(LANES)), records))
    before, started = counters(daemon), time.perf_counter()
    stored.gather(batches)
    seconds = time.perf_counter() - started
    after = counters(daemon)
    done = after["nvme_read_ops"] - before["nvme_read_ops"]
    read_bytes = after["nvme_read_bytes"] - before["nvme_read_bytes"]
    mean_bytes = read_bytes / max(1, done)
    if mean_bytes > 1.1 * case.read_bytes:
        raise RuntimeError(f"{case.name}: reads of {mean_bytes:.0f} bytes, the rival's are of {case.read_bytes}")
    return read_bytes / case.read_bytes / seconds


def _random_reads(rng: np.random.Generator, files: Sequence[tuple[int, int]], count: int, size: int) -> Reads:
    chosen = rng.integers(len(files), size=count)
    return [(files[i][0], int(rng.integers(files[i][1] // size)) * size) for i in chosen]


def _open(path: Path, stack: contextlib.ExitStack) -> tuple[int, int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    stack.callback(os.close, fd)
    return fd, os.fstat(fd).st_size


def _reads_per_s(reader: Reader, wanted: Reads, depth: int, size: int) -> float:
    started = time.perf_counter()
    reader(wanted, depth, size)
    return len(wanted) / (time.perf_counter() - started)


def _uring(wanted: Reads, depth: int, size: int) -> None:
    """Keeps `depth` reads in flight."""
    ring, cqe = liburing.Ring(), liburing.Cqe()
    liburing.io_uring_queue_init(depth, ring)
    buffers = [_aligned_bytearray(size) for _ in range(depth)]
    free, todo, in_flight = list(range(depth)), iter(wanted), 0
    try:
        while True:
            while free and (item := next(todo, None)) is not None:
                buffer = free.pop()
                sqe = liburing.io_uring_get_sqe(ring)
                liburing.io_uring_prep_read(sqe, item[0], buffers[buffer], item[1])
                sqe.user_data = buffer
                in_flight += 1
            if not in_flight:
                return
            liburing.io_uring_submit_and_wait(ring, 1)
            for _ in range(liburing.io_uring_cq_ready(ring)):
                liburing.io_uring_wait_cqe(ring, cqe)
                if cqe[0].res != size:
                    raise OSError(f"a read of {size} bytes returned {cqe[0].res}")
                free.append(cqe[0].user_data)
                liburing.io_uring_cq_advance(ring, 1)
                in_flight -= 1
    finally:
        liburing.io_uring_queue_exit(ring)


def _aligned_bytearray(size: int) -> bytearray:
    """`size` bytes at a page boundary, as O_DIRECT wants; the binding takes nothing but bytearrays.

    Deleting less than half of a bytearray from its front or its end does not move the rest.
    """
    buffer = bytearray(size + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    del buffer[: -address % mmap.PAGESIZE]
    del buffer[size:]
    return buffer


def _memmap(wanted: Reads, depth: int, size: int) -> None:
    """Copies of slices, whose pages come in as they are touched: one read in flight, of a page."""
    maps = {}
    for fd in {fd for fd, _ in wanted}:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        pages = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        pages.madvise(mmap.MADV_RANDOM)
        maps[fd] = np.frombuffer(pages, np.uint8)
    for fd, offset in wanted:
        maps[fd][offset : offset + size].copy()


def _threads(wanted: Reads, depth: int, size: int) -> None:
    """A part of the reads per thread, `depth` threads."""

    def read(part: Reads) -> None:
        with mmap.mmap(-1, size) as buffer:
            for fd, offset in part:
                if os.preadv(fd, [buffer], offset) != size:
                    raise OSError(f"short read at {offset}")

    with ThreadPoolExecutor(depth) as pool:
        list(pool.map(read, [wanted[first::depth] for first in range(depth)]))


READERS: dict[str, Reader] = {"liburing in Python": _uring, "pread threads": _threads, MEMMAP: _memmap}


if __name__ == "__main__":
    sys.exit(main())
