"""What a worker's rings and bindings cost a daemon, in time and in memory of its own, is counted and bounded."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.neighbour import DAEMON_OPTIONS
from kvstore_service.client import KindSpec, Layout, RingGeometry, StoreClient, StoreError
from kvstore_service.daemon.store.registry import RINGS_MAX
from tests.support.daemon_process import Daemon

SLOTS, RINGS = 16, 64
MANY_TICKETS, SMALLEST = RingGeometry(4096, 1, 1), RingGeometry(2, 1, 1)
LAYERS, LANES = 64, 256  # as many windows as a request may have: 512 KiB with what is counted of each
LAYOUT = Layout(hashlib.sha256(b"wide").digest(), LAYERS, (KindSpec(LANES, 32, 1, 64),))


@pytest.fixture
def sparing_daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path, options=(*DAEMON_OPTIONS, "--worker-bytes-max=2MiB")) as running:
        yield running


def test_idle_rings_are_bounded(daemon: Daemon) -> None:
    """A copy thread looks at all of them in turn: 3,840 of them took a neighbour's hot ticket from 0.1 to 4.5 ms."""
    clients = [StoreClient.connect(daemon.socket, daemon.broker) for _ in range(RINGS_MAX // RINGS + 1)]
    for client in clients[:-1]:
        client.register_worker(1, 4096, 4096, [SMALLEST] * RINGS).close()
    with pytest.raises(StoreError) as raised:
        clients[-1].register_worker(1, 4096, 4096, [SMALLEST])
    assert (raised.value.code, raised.value.violations[0].subject) == ("RESOURCE_EXHAUSTED", "rings")
    for client in clients:
        client.close()


def test_what_tickets_and_windows_take_of_the_daemon_is_counted(sparing_daemon: Daemon) -> None:
    """With 4,096 tickets a ring takes 1/4 MiB, which was 16 MiB for each worker; so did 64 of its slots."""
    with StoreClient.connect(sparing_daemon.socket, sparing_daemon.broker) as client:
        shared_bytes = sum((MANY_TICKETS.tickets * size for size in (64 + 32 + 8, 16)), 2 * 4096)
        rings = (2 << 20) // shared_bytes
        with pytest.raises(StoreError, match="worker_bytes_max"):
            client.register_worker(SLOTS, 4096, 4096, [MANY_TICKETS] * rings)
        client.register_worker(SLOTS, 4096, 4096, [SMALLEST])
        client.serve_rings()
        session = client.open_session(LAYOUT, 256)
        windows = np.tile(np.array([64, 1], np.uint64), (LAYERS, LANES, 1))
        for slot in range(3):
            client.bind_slot(session, slot, [], windows)
        with pytest.raises(StoreError, match="worker_bytes_max"):
            client.bind_slot(session, 3, [], windows)
        client.unbind_slot(0)
        client.bind_slot(session, 3, [], windows)
