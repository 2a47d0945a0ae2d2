"""What does the order of records cost a disk? Bytes and requests of what decoding wants of a pack, by order and size.

The shipped model answers questions on its own documentation out of a daemon that has everything in DRAM; a trace says
which blocks each ticket wanted of which segment, for every second question. From these is counted, as if nothing were
held: `blocks_read.ORDER.TOKENS`, bytes of wanted blocks per byte of wanted records, and `disk_us.ORDER.TOKENS`,
microseconds of an ordinary disk per thousand records, its gaps read through where that is cheaper. `learnt` is `pack`,
rewritten by the daemon after the other half of the questions. Counts, not times: any machine makes them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.document import scratch
from bench.parts import count
from bench.traces import Trace, demo
from decode_worker.config import WorkerConfig
from decode_worker.demo.run import DEFAULT_MODEL
from decode_worker.figures import Figure, print_json, print_table
from decode_worker.model.checkpoint import Checkpoint
from decode_worker.packing import ORDERS
from decode_worker.records import RecordFormat
from kvstore_service._native import BLOCK_BYTES, DISK_COST
from kvstore_service.daemon.disk.cost import read_us
from kvstore_service.shared.accesses import RUN

PACK_TOKENS, EXTENT_BLOCKS = 1024, 4
LARGER = (2048, 4096)  # packs, in the first order
LEARNT, LEARN_BYTES = "learnt", 256 << 20


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.orders", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=count, default=8 << 10)
    parser.add_argument("--questions", type=count, default=10)
    parser.add_argument("--budget", type=float, default=0.1, help="selected part of the stored tokens")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    figures = measure(a.tokens, a.questions, a.budget)
    print_json(figures) if a.json else print_table("Orders of records", figures)
    return 0


def measure(tokens: int, questions: int, budget: float, larger: Sequence[int] = LARGER) -> list[Figure]:
    cases = [*((order, PACK_TOKENS) for order in (*ORDERS.names, LEARNT)), *(("pack", size) for size in larger)]
    found = {}
    for order, size in cases:
        learn = order == LEARNT
        options = (f"--pack-tokens={size}", f"--extent-blocks={EXTENT_BLOCKS}", f"--learn-bytes={learn * LEARN_BYTES}")
        with scratch() as directory:
            written = "pack" if learn else order
            trace = demo(Path(directory), tokens, questions, budget, written, options, every=2, learn=learn)
        found[f"{order}.{size}"] = cost(trace)
    (_, today), rival = found[f"pack.{PACK_TOKENS}"], f"pack.{PACK_TOKENS}"
    return [
        *(Figure(f"blocks_read.{case}", blocks, "B/B") for case, (blocks, _) in found.items()),
        *(Figure(f"disk_us.{case}", us, "us", rival, today, us / today) for case, (_, us) in found.items()),
    ]


def cost(trace: Trace) -> tuple[float, float]:
    """(bytes of wanted blocks per byte of wanted records, microseconds of a disk per thousand records)."""
    wanted = trace.accesses[trace.accesses["bulk"] == 0]
    bits = np.unpackbits(wanted["wanted"].astype("<u2").view(np.uint8).reshape(-1, 2), axis=1, bitorder="little")
    access, bit = np.nonzero(bits)
    runs = np.unique(wanted[["pack", *RUN]], return_inverse=True)[1].ravel()[access]
    blocks = wanted["extent"][access].astype(np.int64) * EXTENT_BLOCKS + bit
    order = np.lexsort((blocks, runs))
    records = int(wanted["records"].sum())
    us = read_us(DISK_COST, runs[order], blocks[order])
    return len(blocks) * BLOCK_BYTES / (records * _record_bytes()), 1000 * us / records


def _record_bytes() -> int:
    shape = Checkpoint.open(DEFAULT_MODEL).config
    return RecordFormat(shape.kv_heads, shape.head_dim, WorkerConfig(DEFAULT_MODEL).storage).record_bytes


if __name__ == "__main__":
    sys.exit(main())
