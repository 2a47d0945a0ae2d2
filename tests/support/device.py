"""What a device does with its ring: plain stores and loads of mapped memory, no system call, nobody woken."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from decode_worker._native import RUN_DTYPE, RingProducer

TICKET = np.dtype(
    {
        "names": ["seq", "step", "layer", "op", "run_count", "first_run"],
        "formats": ["<u8", "<u4", "<u2", "<u2", "<u2", "<u4"],
        "offsets": [0, 8, 12, 16, 18, 20],
        "itemsize": 64,
    }
)
CELL = np.dtype([("seq", "<u8"), ("status", "<u4"), ("aux", "<u4")])


class OutOfCredit(Exception):
    """The error word that a kernel leaves."""


class Device:
    """Posts and polls; ticket t - tickets must have been collected before t is posted."""

    def __init__(self, ring: RingProducer) -> None:
        self._ring = ring
        requests, completions, at = ring.requests, ring.completions, ring.layout
        self._tickets = requests[at["tickets"] :][: ring.tickets * TICKET.itemsize].view(TICKET)
        self._consumed = completions[at["consumed"] :][:8].view(np.uint64)
        self._requests, self._completions, self._at = requests, completions, at
        self._runs: dict[int, int] = {}  # of tickets that are not collected
        self._next = 1

    def post(self, op: int, layer: int, runs: NDArray[np.void], pairs: NDArray[np.uint32]) -> int:
        seq, place = self._next, self._next % self._ring.tickets
        if seq - self._ring.tickets in self._runs:
            raise OutOfCredit(seq)
        self._area("pairs", place, pairs.nbytes)[:] = pairs.reshape(-1).view(np.uint8)
        self._area("runs", place, runs.nbytes)[:] = runs.view(np.uint8).reshape(-1)
        ticket = self._tickets[place : place + 1]
        ticket["layer"], ticket["op"], ticket["run_count"], ticket["first_run"] = layer, op, len(runs), 0
        ticket["seq"] = seq  # last: the CPU that this runs on keeps the order of stores, a device needs its fence
        self._runs[seq] = len(runs)
        self._next += 1
        return seq

    def collect(self, seq: int, seconds: float = 20.0) -> list[tuple[int, int]]:
        """Polls until each run is terminal: (status, aux)."""
        deadline = time.monotonic() + seconds
        at = self._at["cells"] + seq % self._ring.tickets * self._at["cells_stride"]
        cells = self._completions[at:][: self._runs[seq] * CELL.itemsize].view(CELL)
        while not (cells["seq"] == seq).all():
            assert time.monotonic() < deadline, f"ticket {seq} is not answered"
            time.sleep(0.0001)  # leaves the core to the daemon, which a device does not take from it
        del self._runs[seq]
        return [(int(status), int(aux)) for status, aux in zip(cells["status"], cells["aux"], strict=True)]

    def _area(self, name: str, place: int, size_bytes: int) -> NDArray[np.uint8]:
        at = self._at[name] + place * self._at[name + "_stride"]
        return self._requests[at : at + size_bytes]


assert RUN_DTYPE.itemsize == 32
