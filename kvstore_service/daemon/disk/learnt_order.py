"""An order of a pack's records, learnt from the runs that wanted them (KVDrive §7.2), and what it saves the disk.

Samples are what the data plane keeps: uint64[layers, lanes, tokens], a bit for each sampled run, by record. Often
wanted records come first, in classes; within a class they stay as the pack's writer has ordered them, by likeness. What
is saved is judged by runs that the order was not learnt from.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore_service import _native
from kvstore_service.daemon.disk.cost import Microseconds, read_us

RUNS_MIN = 8  # of a segment, in the mean
GAIN_MIN = 0.02  # of the disk's time

Samples = NDArray[np.uint64]
Orders = NDArray[np.uint16]


@dataclass(frozen=True)
class LearntOrder:
    """`orders`: uint16[layers, lanes, tokens], which record comes where. `runs`: the mean of a segment.
    `before_us`, `after_us`: of the disk, for a thousand records."""

    orders: Orders
    runs: float
    before_us: float
    after_us: float

    @property
    def gain(self) -> float:
        """Part of the disk's time that is expected to be saved."""
        return 1 - self.after_us / self.before_us if self.before_us else 0.0


def learn(samples: Samples, record_bytes: int, cost: Microseconds) -> LearntOrder:
    """Of each segment the order that all its runs teach, if one half of them has taught something that saves time with
    the other, and the other way round; else the order that it has."""
    shape = samples.shape
    segments = samples.reshape(-1, shape[-1])
    per_block = _native.BLOCK_BYTES // record_bytes
    orders = np.tile(np.arange(shape[-1], dtype=np.uint16), (len(segments), 1))
    before = after = 0.0
    for segment, words in enumerate(segments):
        stays = moves = 0.0
        halves = _halves(words)
        for learns, judges in (halves, halves[::-1]):
            stays += _cost_us(judges, per_block, cost)
            moves += _cost_us(judges[order_of(learns)], per_block, cost)
        if moves < stays:
            orders[segment] = order_of(words)
        before += stays
        after += min(moves, stays)
    wanted = int(np.bitwise_count(segments).sum())
    runs = float(np.bitwise_count(np.bitwise_or.reduce(segments, axis=1)).mean())
    scale = 1000 / wanted if wanted else 0.0
    return LearntOrder(orders.reshape(shape), runs, before * scale, after * scale)


def _halves(words: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Of the runs that were seen the earlier half and the later one: those of one session are much alike, and must not
    judge what they have taught."""
    seen = int(np.bitwise_or.reduce(words))
    runs = [run for run in range(64) if seen >> run & 1]
    earlier = np.uint64(sum(1 << run for run in runs[: len(runs) // 2]))
    return words & earlier, words & ~earlier


def order_of(words: NDArray[np.uint64]) -> NDArray[np.uint16]:
    """uint16[tokens] of one segment, from which runs wanted its records, uint64[tokens]."""
    counts = np.bitwise_count(words).astype(np.float64)
    classes = np.ceil(np.log2(counts + 1))
    return (-classes).argsort(kind="stable").astype(np.uint16)


def _cost_us(words: NDArray[np.uint64], per_block: int, cost: Microseconds) -> float:
    """What the runs of these words would have read, in the order that they stand in."""
    padded = np.zeros(-(-len(words) // per_block) * per_block, np.uint64)
    padded[: len(words)] = words
    blocks = np.bitwise_or.reduce(padded.reshape(-1, per_block), axis=1)
    bits = np.unpackbits(blocks.astype("<u8").view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
    runs, wanted = np.nonzero(bits.T)
    return read_us(cost, runs, wanted)
