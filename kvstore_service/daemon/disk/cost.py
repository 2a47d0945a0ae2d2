"""What a read costs the disk under the data directory, as it is measured at the start or written by hand."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvstore_service.daemon import logs, native
from kvstore_service.shared.types import StoreError

log = logging.getLogger(__name__)

OFF = (0.0, 0.0, 0.0)  # a request costs nothing: none is saved by reading through what nobody wants

Microseconds = tuple[float, float, float]


def read_us(cost: Microseconds, runs: NDArray[np.integer[Any]], blocks: NDArray[np.integer[Any]]) -> float:
    """What it costs to read these blocks, each of its run: int[n] in the order of (run, block), no pair twice. Gaps
    within a run are read through where that is cheaper; pieces of memory are not counted."""
    gaps = np.diff(blocks) - 1
    joined = (np.diff(runs) == 0) & (gaps <= native.through_blocks(cost))
    request_us, kib_us, _ = cost
    requests, read = len(blocks) - joined.sum(), len(blocks) + gaps[joined].sum()
    return float(request_us * requests + kib_us * native.BLOCK_BYTES / 1024 * read)


@dataclass(frozen=True)
class DiskCost:
    """`us`: of a request, a KiB, and each piece of memory beyond the request's first."""

    us: Microseconds
    origin: str

    @classmethod
    def of(cls, configured: Microseconds | None, directory: Path) -> Self:
        """Measures where nothing is configured. A disk that is full or fails is taken for an ordinary one."""
        if configured is not None:
            return cls(configured, "off" if configured == OFF else "configured")
        try:
            with native.errors():
                return cls(native.measure_disk(str(directory)), "measured")
        except StoreError as error:
            logs.event(log, logging.WARNING, "the disk was not measured", reason=str(error))
            return cls(native.DISK_COST, f"default: {error}")

    def __str__(self) -> str:
        request, kib, piece = self.us
        blocks = native.through_blocks(self.us)
        return (
            f"{request:.1f} us + {kib:.2f} a KiB + {piece:.1f} a piece: reads through {blocks} blocks ({self.origin})"
        )
