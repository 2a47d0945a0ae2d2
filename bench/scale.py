"""What does a store of a million packs cost? Starts, lookups, commits and memory at growing numbers of packs.

Packs are rows and sparse files: no byte of KV is read here. Rows go through the catalogue's own commit; a real daemon
then starts over them. `lookup`: one stored pack, `chain128`: a prompt of 128 packs, each over gRPC by random chains;
`commit`: one row in a transaction of its own, durable. Sizes take turns, call by call. A growth is the median at the
largest size / at the smallest. `refusals`: 64 connected workers with 1000 sessions in all, calling at once; calls that
are refused for overload.

On ext4 without a journal leave five minutes between two runs at a million packs: so long it passes over every inode
that was freed, one by one, for each file that is made.
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from bench.document import scratch
from bench.parts import directory
from decode_worker.figures import Figure, print_json, print_table
from kvstore_service.client import KindSpec, Layout, PrefixCandidate, StoreClient, StoreError
from kvstore_service.client.private import PrivateDaemon
from kvstore_service.daemon.disk.builds import new_build
from kvstore_service.daemon.disk.catalog import Catalog
from kvstore_service.daemon.store.uploads import pack_id
from kvstore_service.shared.types import NO_PARENT, PackRef, PackRow

SIZES = (1_000, 10_000, 100_000, 1_000_000)
CHAIN = 128
TOKENS = 256
FILE_BYTES = 1 << 16
BATCH = 20_000
LOOKUPS, CHAINS, COMMITS = 300, 60, 100
WORKERS, SESSIONS = 64, 1000
START_S = 300.0
LAYOUT = Layout(b"scale".ljust(32, b"."), 2, (KindSpec(2, 64, 2, 256),))
TENANT = f"uid-{os.getuid()}"


@dataclass(frozen=True)
class Measured:
    """Of one size: seconds, and bytes at their peak."""

    packs: int
    start_s: float
    rss_bytes: int
    lookups: list[float]
    chains: list[float]
    commits: list[float]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__)
    parser.add_argument(
        "--directory", type=directory, default="/var/tmp", help="where the packs' files are made: a disk"
    )
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="numbers of packs, rising")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = measure(Path(arguments.directory), [int(size) for size in arguments.sizes.split(",")])
    print_json(figures) if arguments.json else print_table("The store at size", figures)
    return 0


def measure(directory: Path, sizes: Sequence[int], workers: int = WORKERS, sessions: int = SESSIONS) -> list[Figure]:
    with ExitStack() as stores:  # removed at the end: ext4 takes long to make files where others were just removed
        data_dirs = {size: Path(stores.enter_context(scratch(directory))) for size in sizes}
        for size, data_dir in data_dirs.items():
            with closing(Catalog(data_dir)) as catalog:
                _fill(catalog, size)
        os.sync()  # else what was just made is written while starts and commits are timed
        measured = _over(data_dirs, _commits(data_dirs))
    small, large = measured[0], measured[-1]
    figures = [Figure(f"start_s.{item.packs}", item.start_s, "s") for item in measured]
    for name in ("lookups", "chains", "commits"):
        runs = {item.packs: getattr(item, name) for item in measured}
        label = {"lookups": "lookup", "chains": "chain128", "commits": "commit"}[name]
        figures += [Figure.of_runs(f"{label}_ms.{packs}", [1e3 * s for s in run], "ms") for packs, run in runs.items()]
        growth = statistics.median(runs[large.packs]) / statistics.median(runs[small.packs])
        figures.append(Figure(f"{label}_growth", growth, f"{large.packs} / {small.packs} packs"))
    per_pack = (large.rss_bytes - small.rss_bytes) / max(1, large.packs - small.packs)
    figures.append(Figure("rss_bytes_per_pack", per_pack, "B at the peak"))
    refused = _refusals(directory, workers, sessions)
    figures.append(Figure(f"refusals.{workers}_workers_{sessions}_sessions", refused, "calls"))
    return figures


def _commits(data_dirs: Mapping[int, Path]) -> dict[int, list[float]]:
    def commit(data_dir: Path, size: int) -> Callable[[], object]:
        catalog = stack.enter_context(closing(Catalog(data_dir)))
        rows = iter(list(_rows(catalog, range(size, size + COMMITS))))
        return lambda: catalog.commit_packs([next(rows)])

    with ExitStack() as stack:
        return _in_turns(COMMITS, {size: commit(data_dir, size) for size, data_dir in data_dirs.items()})


def _over(data_dirs: Mapping[int, Path], commits: Mapping[int, list[float]]) -> list[Measured]:
    """Starts one after the other, calls in turns."""
    options = ("--nvme-bytes=1TiB", "--copy-threads=1")
    starts: dict[int, float] = {}
    daemons: dict[int, PrivateDaemon] = {}
    clients: dict[int, StoreClient] = {}
    with ExitStack() as stack:
        for size, data_dir in data_dirs.items():
            started = time.perf_counter()
            daemon = stack.enter_context(PrivateDaemon(data_dir, "64MiB", options=options, start_s=START_S))
            starts[size], daemons[size] = time.perf_counter() - started, daemon
            clients[size] = stack.enter_context(StoreClient.connect(daemon.socket, daemon.broker, timeout_s=30.0))

        def look_up(size: int, packs: int) -> Callable[[], object]:
            return lambda: _look_up(clients[size], _chain(size), packs)

        lookups = _in_turns(LOOKUPS, {size: look_up(size, 1) for size in data_dirs})
        chains = _in_turns(CHAINS, {size: look_up(size, CHAIN) for size in data_dirs})
        peaks = {size: _peak_bytes(daemon.pid) for size, daemon in daemons.items()}
    return [Measured(size, starts[size], peaks[size], lookups[size], chains[size], commits[size]) for size in data_dirs]


def _in_turns(count: int, calls: Mapping[int, Callable[[], object]]) -> dict[int, list[float]]:
    """Seconds of each call, by size: a slow moment of the machine counts for all sizes."""
    seconds: dict[int, list[float]] = {size: [] for size in calls}
    for _ in range(count):
        for size, call in calls.items():
            started = time.perf_counter()
            call()
            seconds[size].append(time.perf_counter() - started)
    return seconds


def _digest(number: int) -> bytes:
    return number.to_bytes(32)


def _rows(catalog: Catalog, numbers: range) -> Iterator[PackRow]:
    """Packs by number; every CHAIN of them are one prompt. Each has its file."""
    tenant_key = catalog.tenant_key(TENANT)
    parent = NO_PARENT
    for number in numbers:
        place = number % CHAIN
        parent = parent if place and number != numbers[0] else NO_PARENT
        name = pack_id(tenant_key, parent, LAYOUT.fingerprint, _digest(number))
        ref = PackRef(name, new_build(tenant_key, name), place * TOKENS, TOKENS)
        row = PackRow(ref, parent, LAYOUT, TENANT, FILE_BYTES)
        fd = os.open(catalog.packs_dir / row.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.ftruncate(fd, FILE_BYTES)
        os.close(fd)
        parent = name
        yield row


def _fill(catalog: Catalog, size: int) -> None:
    rows = _rows(catalog, range(size))
    while batch := list(islice(rows, BATCH)):
        catalog.commit_packs(batch)


def _chain(size: int) -> int:
    """The first number of a random whole chain."""
    return secrets.randbelow(size // CHAIN) * CHAIN


def _look_up(client: StoreClient, first: int, packs: int) -> None:
    candidates = [PrefixCandidate(place * TOKENS, TOKENS, _digest(first + place)) for place in range(packs)]
    found = client.lookup_prefix(LAYOUT.fingerprint, candidates)
    if len(found) != packs:
        raise RuntimeError(f"{len(found)} of {packs} packs found; this benchmark's rows are wrong")


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def _refusals(directory: Path, workers: int, sessions: int) -> int:
    """Every worker opens its share of the sessions, looks up beside each, and closes them, all at once."""
    shares = [sessions // workers + (number < sessions % workers) for number in range(workers)]
    with scratch(directory) as name, PrivateDaemon(name, "64MiB", options=("--nvme-bytes=1GiB",)) as daemon:

        def work(share: int) -> int:
            refused, opened = 0, list[str]()
            with StoreClient.connect(daemon.socket, daemon.broker, secrets.token_hex(4), timeout_s=60.0) as client:
                wanted = [PrefixCandidate(0, TOKENS, _digest(1))]
                for _ in range(share):
                    refused += _refused(lambda: opened.append(client.open_session(LAYOUT, 1 << 16)))
                    refused += _refused(lambda: client.lookup_prefix(LAYOUT.fingerprint, wanted))
                for session in opened:
                    refused += _refused(lambda session=session: client.close_session(session))
            return refused

        with ThreadPoolExecutor(workers) as pool:
            return sum(pool.map(work, shares))


def _refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except StoreError as error:
        if error.code != "RESOURCE_EXHAUSTED":
            raise
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
