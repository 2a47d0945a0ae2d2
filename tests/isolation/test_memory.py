"""What a worker only declares, or asks for at once, costs the daemon no memory of its own."""

import hashlib
import mmap
import resource
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from bench.isolation import private_mib
from bench.neighbour import ATTACKS, NO_PAIRS, SMALL, SPARSE, Document, Neighbour, require_ok
from decode_worker import _native
from kvstore_service.client import NO_PARENT, KindSpec, Layout, PackRef, PackReservation, RingGeometry, StoreClient
from tests.isolation.conftest import HOT
from tests.support.daemon_process import Daemon

EXCESS_MIB_MAX = 64
MAPS_MIB_MAX = 32
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


def test_reading_maps_takes_no_memory_that_grows_with_them(daemon: Daemon) -> None:
    """Records of 64 B: no pack has a larger map for its size. 4 MiB, by 8 readers at a time."""
    layers, lanes, tokens, record_bytes = 8, 16, 16384, 64
    layout = Layout(hashlib.sha256(b"maps").digest(), layers, (KindSpec(lanes, 32, 1, record_bytes),))
    segment = tokens * (record_bytes + 2)
    with StoreClient.connect(daemon.socket, daemon.broker) as client:
        memory = client.register_worker(1, 4096, segment, [RingGeometry(2, lanes, 1)])
        staging = np.frombuffer(mmap.mmap(memory.staging_fd, segment), np.uint8)
        staging[: tokens * record_bytes] = 1
        staging[tokens * record_bytes :] = np.arange(tokens, dtype=np.uint16).view(np.uint8)
        ring = _native.RingProducer(*memory.rings[0])
        session = client.open_session(layout, tokens)
        (reserved,) = client.reserve_pack(session, [PackReservation(0, tokens, hashlib.sha256().digest(), NO_PARENT)])
        assert reserved.upload_id is not None
        runs = np.zeros(lanes, _native.RUN_DTYPE)
        runs["slot"], runs["lane"] = reserved.upload_id, np.arange(lanes)
        for layer in range(layers):
            require_ok(ring.wait(ring.post(_native.OP_STORE, 0, layer, runs, NO_PAIRS), 20_000_000))
        (committed,) = client.commit_pack(session, [reserved.upload_id])
        pack = committed.pack
        assert pack is not None
        before_mib, end_s = private_mib(daemon.pid), time.monotonic() + WATCHED_S

        def read(pack: PackRef) -> None:
            while time.monotonic() < end_s:
                assert client.get_map(pack).shape == (layers, lanes, tokens)

        with ThreadPoolExecutor(8) as readers:
            pending = [readers.submit(read, pack) for _ in range(8)]
            assert peak_mib(daemon) - before_mib <= MAPS_MIB_MAX
            for reader in pending:
                reader.result()
        ring.close()
        memory.close()
