"""Rounds are fair by bytes between workers, however many rings one of them keeps busy."""

import numpy as np

from bench.document import counters
from bench.neighbour import ATTACKS, BUSY_PAIRS, RECORD_BYTES, Document, Neighbour
from tests.support.daemon_process import Daemon

SHARE_MIN = 0.2
TICKETS, RUNS = 200, 4
TICKET_BYTES = RUNS * BUSY_PAIRS * RECORD_BYTES
IN_FLIGHT = 8


def test_a_neighbours_many_rings_leave_a_worker_its_share(daemon: Daemon, victim: Neighbour) -> None:
    """The neighbour has posted more than anything could serve meanwhile."""
    busy = ATTACKS["busy_64"]
    with Neighbour(daemon, Document("hot", 4096), busy.geometry, busy.rings) as neighbour:
        backlog = next(busy.tickets(neighbour))
        mine = victim.gather(np.arange(BUSY_PAIRS), RUNS)
        for _ in range(busy.geometry.tickets):
            for ring in range(busy.rings):
                neighbour.post(backlog, ring)
        pending = [victim.post(mine) for _ in range(IN_FLIGHT)]
        before = counters(daemon)["bytes_copied"]
        for _ in range(TICKETS):
            victim.ring.wait(pending.pop(0), 20_000_000)
            pending.append(victim.post(mine))
        copied = counters(daemon)["bytes_copied"] - before
        assert TICKETS * TICKET_BYTES / copied >= SHARE_MIN
