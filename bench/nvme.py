"""How many blocks per second does a cold GATHER bring from NVMe? Against plain readers of the same files.

The DRAM tier is tiny, so each run of wanted blocks costs one O_DIRECT read: `scattered` wants one record of an extent
(a read of 4 KiB), `clustered` all 32 (16 KiB). The rivals read as many blocks of the same size from the same packs,
O_DIRECT: a liburing loop of the same queue depth in Python, and a pread per thread with as many threads. Reads per
second and GB/s; reads and bytes are the daemon's own counts, and it checks every block's checksum.
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

import liburing
import numpy as np

from bench.store import StoredDocument, counters, scratch
from decode_worker.figures import Figure, print_json, print_table
from kvstore_service.client.private import PrivateDaemon

LAYERS, LANES = 8, 2
TOKENS = 65536  # 512 MiB in all
EXTENT_RECORDS = 32  # of 512 B, in 4 blocks of 4 KiB
DEPTH = 64
READS = 256  # of one ticket
TICKETS = 64
REPEATS = 5
DRAM_BYTES = 16 << 20

Reads = list[tuple[int, int]]  # fd, offset
Reader = Callable[[Reads, int, int], None]


@dataclass(frozen=True)
class Case:
    name: str
    records: int  # that are wanted of an extent
    read_bytes: int


CASES = (Case("scattered", 1, 4096), Case("clustered", EXTENT_RECORDS, 16384))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.nvme", description=__doc__)
    parser.add_argument("--directory", default="/var/tmp", help="where the packs lie: the disk that is measured")
    parser.add_argument("--depth", type=int, default=DEPTH, help="reads in flight")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = measure(Path(arguments.directory), depth=arguments.depth)
    print_json(figures) if arguments.json else print_table(f"Cold GATHER, {arguments.depth} reads in flight", figures)
    return 0


def measure(
    directory: Path,
    *,
    tokens: int = TOKENS,
    reads: int = READS,
    tickets: int = TICKETS,
    repeats: int = REPEATS,
    depth: int = DEPTH,
) -> list[Figure]:
    rng = np.random.default_rng(1)
    options = ("--copy-threads=1", f"--io-depth={depth}")
    readers: dict[str, Reader] = {"liburing in Python": _uring, "pread threads": _threads}
    figures = []
    with (
        scratch(directory) as data_dir,
        PrivateDaemon(data_dir, DRAM_BYTES, options=options) as daemon,
        StoredDocument(daemon, tokens, layers=LAYERS, lanes=LANES, places=reads * EXTENT_RECORDS) as stored,
        contextlib.ExitStack() as stack,
    ):
        files = [_open(path, stack) for path in sorted(Path(data_dir).rglob("*.pack"))]
        for case in CASES:
            ours: list[float] = []
            rivals: dict[str, list[float]] = {name: [] for name in readers}
            for _ in range(repeats):
                ours.append(_cold_gather(daemon, stored, rng, case, reads, tickets))
                for name, reader in readers.items():
                    wanted = _random_reads(rng, files, reads * tickets, case.read_bytes)
                    rivals[name].append(_reads_per_s(reader, wanted, depth, case.read_bytes))
            figures += _figures(case, ours, rivals)
    return figures


def _figures(case: Case, ours: list[float], rivals: dict[str, list[float]]) -> list[Figure]:
    def gb_per_s(rates: list[float]) -> list[float]:
        return [rate * case.read_bytes / 1e9 for rate in rates]

    name = f"cold_{case.name}_{case.read_bytes // 1024}k"
    return [
        figure
        for rival, rates in rivals.items()
        for figure in (
            Figure.of_runs(name, ours, "reads/s", rival, rates),
            Figure.of_runs(name, gb_per_s(ours), "GB/s", rival, gb_per_s(rates)),
        )
    ]


def _cold_gather(
    daemon: PrivateDaemon, stored: StoredDocument, rng: np.random.Generator, case: Case, reads: int, tickets: int
) -> float:
    """Reads per second, from the daemon's counters."""
    batches = []
    for _ in range(tickets):
        extents = np.sort(rng.choice(stored.tokens // EXTENT_RECORDS, reads, replace=False))
        first = extents * EXTENT_RECORDS + rng.integers(EXTENT_RECORDS - case.records + 1, size=reads)
        records = (first[:, None] + np.arange(case.records)).ravel().astype(np.uint32)
        batches.append((int(rng.integers(LAYERS)), int(rng.integers(LANES)), records))
    before, started = counters(daemon), time.perf_counter()
    stored.gather(batches)
    seconds = time.perf_counter() - started
    after = counters(daemon)
    done = after["nvme_read_ops"] - before["nvme_read_ops"]
    mean_bytes = (after["nvme_read_bytes"] - before["nvme_read_bytes"]) / max(1, done)
    if not 0.9 * case.read_bytes < mean_bytes < 1.1 * case.read_bytes:
        raise RuntimeError(f"{case.name}: reads of {mean_bytes:.0f} bytes, the rival's are of {case.read_bytes}")
    return done / seconds


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


def _threads(wanted: Reads, depth: int, size: int) -> None:
    """A part of the reads per thread, `depth` threads."""

    def read(part: Reads) -> None:
        with mmap.mmap(-1, size) as buffer:
            for fd, offset in part:
                if os.preadv(fd, [buffer], offset) != size:
                    raise OSError(f"short read at {offset}")

    with ThreadPoolExecutor(depth) as pool:
        list(pool.map(read, [wanted[first::depth] for first in range(depth)]))


if __name__ == "__main__":
    sys.exit(main())
