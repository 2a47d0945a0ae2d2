"""What a worker only declares, or asks for at once, costs the daemon no memory of its own."""

import resource
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from bench.isolation import private_mib
from bench.neighbour import ATTACKS, SMALL, SPARSE, Document, Neighbour
from tests.isolation.conftest import HOT
from tests.support.daemon_process import Daemon

EXCESS_MIB_MAX = 64
WATCHED_S = 2.0
SPARE_BYTES = 256 << 20
COLD = Document("cold", 65536)
COLD_TICKET = ATTACKS["cold_ticket"]


def warm(daemon: Daemon) -> None:
    """Every frame of the DRAM tier has its memory."""
    with Neighbour(daemon, COLD, SMALL) as neighbour:
        for first in range(0, COLD.tokens, 16384):
            neighbour.fetch(neighbour.range(first, 16384, 32))


def peak_mib(daemon: Daemon) -> float:
    peak, end_s = 0.0, time.monotonic() + WATCHED_S
    while time.monotonic() < end_s:
        peak = max(peak, private_mib(daemon.pid))
        time.sleep(0.02)
    return peak


@pytest.fixture
def before_mib(daemon: Daemon, victim: Neighbour) -> float:
    warm(daemon)
    return private_mib(daemon.pid)


def test_pairs_at_the_end_of_a_sparse_ring_cost_nothing(daemon: Daemon, before_mib: float) -> None:
    with Neighbour(daemon, HOT, SPARSE) as neighbour:
        for seq in range(1, SPARSE.tickets + 1):
            neighbour.write_ticket(seq, SPARSE.pairs_max - 1, (0, 0))
        assert peak_mib(daemon) - before_mib <= EXCESS_MIB_MAX


def test_the_runs_of_a_cold_ticket_hold_no_memory_while_they_wait(daemon: Daemon, before_mib: float) -> None:
    with Neighbour(daemon, COLD, COLD_TICKET.geometry) as neighbour:
        neighbour.post(next(COLD_TICKET.tickets(neighbour)))
        assert peak_mib(daemon) - before_mib <= EXCESS_MIB_MAX
    assert peak_mib(daemon) - before_mib <= EXCESS_MIB_MAX


def test_a_daemon_without_memory_serves_on(daemon: Daemon, victim: Neighbour) -> None:
    warm(daemon)
    (held,) = (line for line in Path(f"/proc/{daemon.pid}/status").read_text().splitlines() if "VmData" in line)
    limit = int(held.split()[1]) * 1024 + SPARE_BYTES
    with Neighbour(daemon, COLD, COLD_TICKET.geometry) as neighbour:
        resource.prlimit(daemon.pid, resource.RLIMIT_DATA, (limit, limit))
        neighbour.post(next(COLD_TICKET.tickets(neighbour)))
        assert daemon.process is not None
        with pytest.raises(subprocess.TimeoutExpired):
            daemon.process.wait(WATCHED_S)
        victim.fetch(victim.gather(np.arange(8)))
