"""A ring whose daemon is the test: two memories as csrc/core/ring.h lays them out, read and answered by hand."""

import mmap
import os

import numpy as np

from decode_worker import _native
from decode_worker.policy.plan import RUN_DTYPE, Op, Ticket

MAGIC, VERSION = 0x31474E4952474448, 4
HEADER = np.dtype([("magic", "<u8"), ("version", "<u4"), ("geometry", "<u4", 3), ("epoch", "<u8")])
TICKET = np.dtype(
    [("seq", "<u8"), ("step", "<u4"), ("layer", "<u2"), ("micro_batch", "<u2"), ("op", "<u2"), ("runs", "<u2"),
     ("first_run", "<u4"), ("reserved", "V40")]
)  # fmt: skip
CELL = np.dtype([("seq", "<u8"), ("status", "<u4"), ("aux", "<u4")])
REQUESTS_HEADER, COMPLETIONS_HEADER = _native.REQUESTS_HEADER_BYTES, 320
POISON, CONSUMED = 64 // 8, 256 // 8  # words of 8 bytes


class PretendRing:
    def __init__(self, tickets: int = 4, runs_max: int = 8, pairs_max: int = 2000) -> None:
        n, header = tickets, np.array((MAGIC, VERSION, (tickets, runs_max, pairs_max), 7), HEADER)
        runs_at = REQUESTS_HEADER + n * TICKET.itemsize
        pairs_at = runs_at + n * runs_max * RUN_DTYPE.itemsize
        self._fds, memories = [], []
        for size in (pairs_at + n * pairs_max * 8, COMPLETIONS_HEADER + n * runs_max * CELL.itemsize):
            fd = os.memfd_create("ring")
            os.ftruncate(fd, -(-size // 4096) * 4096)
            self._fds.append(fd)
            memories.append(np.frombuffer(mmap.mmap(fd, 0), np.uint8))
            memories[-1][: HEADER.itemsize] = np.frombuffer(header.tobytes(), np.uint8)
        requests, completions = memories
        self.tickets = requests[REQUESTS_HEADER:runs_at].view(TICKET)
        self.runs = requests[runs_at:pairs_at].view(RUN_DTYPE).reshape(n, runs_max)
        self.pairs = requests[pairs_at : pairs_at + n * pairs_max * 8].view(np.uint32).reshape(n, pairs_max, 2)
        cells = completions[COMPLETIONS_HEADER : COMPLETIONS_HEADER + n * runs_max * CELL.itemsize]
        self.cells = cells.view(CELL).reshape(n, runs_max)
        self.words = completions[:COMPLETIONS_HEADER].view(np.uint64)
        self.own_words = requests[:REQUESTS_HEADER].view(np.uint64)
        self.producer = _native.RingProducer(*self._fds)

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)

    def posted(self, seq: int) -> bool:
        return int(self.tickets[seq % len(self.tickets)]["seq"]) == seq

    def take(self, seq: int) -> tuple[Ticket, int]:
        """A posted ticket as its producer meant it, and its step."""
        assert self.posted(seq)
        ticket = self.tickets[seq % len(self.tickets)]
        assert ticket["micro_batch"] == ticket["first_run"] == 0
        runs = self.runs[seq % len(self.tickets), : ticket["runs"]]
        pairs = self.pairs[seq % len(self.tickets), : runs["pair_count"].sum()]
        assert ticket["op"] == Op.GATHER
        return Ticket(Op.GATHER, int(ticket["layer"]), runs.copy(), pairs.copy()), int(ticket["step"])

    def answer(self, seq: int, statuses: np.ndarray, consumed: bool = True) -> None:
        cells = self.cells[seq % len(self.tickets), : len(statuses)]
        cells["status"], cells["aux"] = statuses.T
        cells["seq"] = seq
        if consumed:
            self.words[CONSUMED] = seq

    def poison(self) -> None:
        self.words[POISON] = 2**64 - 1
