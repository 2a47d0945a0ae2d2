"""How fast does a copy thread bring records from DRAM frames to their places? GB/s of 512 B records.

Warm GATHER tickets through the ring, one copy thread, against index_select, fancy indexing and memcpy with one thread
over the same amount of memory: random records, and clustered ones (runs of 32 neighbours at random offsets).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from bench.document import StoredDocument, counters, scratch
from decode_worker.figures import Figure, print_json, print_table
from kvstore_service._native import TIER_POLICIES
from kvstore_service.client.private import PrivateDaemon

LAYERS, LANES = 4, 2
RECORD_BYTES = 512
TOKENS = 65536  # 256 MiB in all: much more than a cache
RECORDS = 8192  # of one ticket: 4 MiB
TICKETS = 64
REPEATS = 7
CLUSTER = 32

Batch = tuple[int, int, NDArray[np.uint32]]  # layer, lane, sorted records
Mover = Callable[[NDArray[np.uint8], NDArray[np.intp]], None]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gather", description=__doc__)
    parser.add_argument("--tier-policy", choices=TIER_POLICIES, default=TIER_POLICIES[0], help="of the DRAM tier")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = measure(tier_policy=arguments.tier_policy)
    print_json(figures) if arguments.json else print_table("Warm GATHER, one copy thread", figures)
    return 0


def measure(
    tokens: int = TOKENS,
    records: int = RECORDS,
    tickets: int = TICKETS,
    repeats: int = REPEATS,
    tier_policy: str = TIER_POLICIES[0],
) -> list[Figure]:
    torch.set_num_threads(1)
    rng = np.random.default_rng(1)
    source = np.ones((LAYERS, LANES, tokens, RECORD_BYTES), np.uint8)
    movers = _movers(records)
    figures = []
    options = ("--copy-threads=1", f"--tier-policy={tier_policy}")
    with (
        scratch() as directory,
        PrivateDaemon(directory, 2 * source.nbytes + (64 << 20), options=options) as daemon,
        StoredDocument(daemon, tokens, layers=LAYERS, lanes=LANES, places=records) as stored,
    ):
        _warm(stored, records)
        read_before = counters(daemon)["nvme_read_bytes"]
        for kind, draw in (("random", _random), ("clustered", _clustered)):
            ours: list[float] = []
            rivals: dict[str, list[float]] = {name: [] for name in movers}
            for _ in range(repeats):
                batches = [
                    (int(rng.integers(LAYERS)), int(rng.integers(LANES)), draw(rng, tokens, records))
                    for _ in range(tickets)
                ]
                ours.append(_gb_per_s(batches, stored.gather))
                for name, mover in movers.items():
                    rivals[name].append(_gb_per_s(batches, partial(_move, source, mover)))
            figures += [Figure.of_runs(f"gather_{kind}", ours, "GB/s", name, rivals[name]) for name in movers]
        if counters(daemon)["nvme_read_bytes"] != read_before:
            raise RuntimeError("the gathers were not warm: the DRAM tier is too small")
    return figures


@contextlib.contextmanager
def warm_documents(threads: int, tokens: int, records: int) -> Iterator[list[StoredDocument]]:
    """As many workers as the daemon has copy threads, over one document that lies in DRAM."""
    dram_bytes = 2 * LAYERS * LANES * tokens * RECORD_BYTES + (64 << 20)
    options = (f"--copy-threads={threads}",)
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(scratch())
        daemon = stack.enter_context(PrivateDaemon(directory, dram_bytes, options=options))
        documents = [
            stack.enter_context(StoredDocument(daemon, tokens, layers=LAYERS, lanes=LANES, places=records))
            for _ in range(threads)
        ]
        for stored in documents:
            _warm(stored, records)
        yield documents


def random_gb_per_s(documents: Sequence[StoredDocument], records: int, tickets: int, seed: int) -> float:
    """Of all of them together, each in a thread of its own; what to post is made beforehand, as the bare loop's is."""
    rng = np.random.default_rng(seed)
    batches = [
        [
            (
                int(rng.integers(LAYERS)),
                *stored.gather_run(int(rng.integers(LANES)), _random(rng, stored.tokens, records)),
            )
            for _ in range(tickets)
        ]
        for stored in documents
    ]
    with ThreadPoolExecutor(len(documents)) as pool:
        started = time.perf_counter()
        list(pool.map(lambda stored, batch: stored.post(batch), documents, batches))
        seconds = time.perf_counter() - started
    return len(documents) * tickets * records * RECORD_BYTES / seconds / 1e9


def _warm(stored: StoredDocument, records: int) -> None:
    lanes = [(layer, lane) for layer in range(stored.layers) for lane in range(stored.lanes)]
    spans = [np.arange(first, min(first + records, stored.tokens)) for first in range(0, stored.tokens, records)]
    stored.gather([(layer, lane, span.astype(np.uint32)) for layer, lane in lanes for span in spans])


def _random(rng: np.random.Generator, tokens: int, records: int) -> NDArray[np.uint32]:
    return np.sort(rng.choice(tokens, records, replace=False)).astype(np.uint32)


def _clustered(rng: np.random.Generator, tokens: int, records: int) -> NDArray[np.uint32]:
    first = np.sort(rng.choice(tokens // CLUSTER, records // CLUSTER, replace=False)) * CLUSTER
    return (first[:, None] + np.arange(CLUSTER)).ravel().astype(np.uint32)


def _movers(records: int) -> dict[str, Mover]:
    """Rivals: each copies records of a lane [tokens, 512], where it can into memory that is there already."""
    target = np.zeros((records, RECORD_BYTES), np.uint8)
    wide = torch.from_numpy(target.view(np.int64))

    def index_select(lane: NDArray[np.uint8], index: NDArray[np.intp]) -> None:
        torch.index_select(torch.from_numpy(lane.view(np.int64)), 0, torch.from_numpy(index), out=wide)

    def fancy(lane: NDArray[np.uint8], index: NDArray[np.intp]) -> None:
        lane.view(np.int64)[index]

    def memcpy(lane: NDArray[np.uint8], index: NDArray[np.intp]) -> None:
        first = int(index[0]) % max(1, len(lane) - len(index))
        np.copyto(target, lane[first : first + len(index)])

    return {"torch.index_select": index_select, "numpy fancy indexing": fancy, "memcpy": memcpy}


def _move(source: NDArray[np.uint8], mover: Mover, batches: Sequence[Batch]) -> None:
    for layer, lane, records in batches:
        mover(source[layer, lane], records.astype(np.intp))


def _gb_per_s(batches: Sequence[Batch], run: Callable[[Sequence[Batch]], None]) -> float:
    started = time.perf_counter()
    run(batches)
    moved_bytes = sum(len(records) for _, _, records in batches) * RECORD_BYTES
    return moved_bytes / (time.perf_counter() - started) / 1e9


if __name__ == "__main__":
    sys.exit(main())
