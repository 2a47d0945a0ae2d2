"""Nobody makes the store wait in the kernel by giving back pages of the memory that they share."""

import ctypes
import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from decode_worker import _native
from kvstore_service.client import AdminClient, StoreClient, StoreError
from kvstore_service.shared import memory
from tests.support.daemon_process import Daemon
from tests.support.world import (
    GEOMETRY,
    LANES,
    LAYERS,
    LAYOUT,
    NO_PAIRS,
    STAGING_BYTES,
    TOKENS,
    WAIT_US,
    WINDOW_BYTES,
    TestWorker,
    expected,
    reservation,
)

PUNCH_HOLE = 0x2 | 0x1  # and keep the size
_libc = ctypes.CDLL(None, use_errno=True)


def punch(fd: int, size_bytes: int) -> None:
    if _libc.fallocate(fd, PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(size_bytes)) != 0:
        raise OSError(ctypes.get_errno(), "fallocate")


@pytest.fixture
def client(daemon: Daemon) -> Iterator[StoreClient]:
    with StoreClient.connect(daemon.socket, daemon.broker, "test") as connected:
        yield connected


@pytest.fixture
def admin(daemon: Daemon) -> Iterator[AdminClient]:
    with AdminClient.connect(daemon.socket, daemon.broker) as connected:
        yield connected


def counter(admin: AdminClient, name: str) -> int:
    return admin.get_status().counters[name]


def test_pages_of_served_memory_cannot_be_given_back(client: StoreClient) -> None:
    """Nor can it be mapped for writing again; what is mapped stays writable, and the store serves it."""
    worker = TestWorker(client)
    session = client.open_session(LAYOUT, TOKENS)
    pack = worker.commit(session, 1)
    client.attach_packs(session, [pack])
    epoch = client.bind_slot(session, 0, [pack], worker.windows(0))
    requests, completions = worker.memory.rings[0]
    written = {worker.memory.window_fd: worker._maps[0], worker.memory.staging_fd: worker._maps[1], requests: None}
    for fd, mapping in written.items():
        size_bytes = os.fstat(fd).st_size
        with pytest.raises(PermissionError):
            punch(fd, size_bytes)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(PermissionError):
            mmap.mmap(fd, size_bytes)
        if mapping is not None:
            with pytest.raises(PermissionError):
                mapping.madvise(mmap.MADV_REMOVE)
    with pytest.raises(PermissionError):
        punch(completions, os.fstat(completions).st_size)
    worker.window[:] = 0
    records = np.arange(TOKENS, dtype=np.uint32)
    assert (worker.gather(0, epoch, records) == expected([1], records)).all()
    worker.close()


def test_nothing_of_a_worker_is_touched_before_it_says_so(client: StoreClient, admin: AdminClient) -> None:
    """It may do with its memory what it likes until then, and holds nothing but that."""
    shared = client.register_worker(1, WINDOW_BYTES, STAGING_BYTES, [GEOMETRY])
    ring = _native.RingProducer(*shared.rings[0])
    session = client.open_session(LAYOUT, TOKENS)
    runs = np.zeros(1, _native.RUN_DTYPE)
    early = ring.post(_native.OP_STORE, 0, 0, runs, NO_PAIRS)
    for call in (
        lambda: client.reserve_pack(session, [reservation(1)]),
        lambda: client.bind_slot(session, 0, [], np.zeros((LAYERS, LANES, 2), np.uint64)),
    ):
        with pytest.raises(StoreError, match=r"FAILED_PRECONDITION.*map window, staging and requests") as refused:
            call()
        assert refused.value.reason == "RINGS_NOT_SERVED"
        assert "\n" not in refused.value.message
    assert (counter(admin, "workers"), counter(admin, "rings"), counter(admin, "tickets")) == (1, 0, 0)
    assert all(check.ok for check in admin.audit())
    punch(shared.window_fd, WINDOW_BYTES)
    client.serve_rings()
    assert ring.wait(early, WAIT_US)[0][0] == _native.STATUS_ERROR  # there is no such upload
    assert counter(admin, "rings") == 1
    assert all(check.ok for check in admin.audit())
    ring.close()
    shared.close()


def test_the_store_keeps_no_descriptor_of_served_memory(daemon: Daemon, client: StoreClient) -> None:
    client.lookup_prefix(LAYOUT.fingerprint, [])
    before = daemon.open_descriptors()
    client.register_worker(1, WINDOW_BYTES, STAGING_BYTES, [GEOMETRY] * 3).close()
    assert daemon.open_descriptors() >= before + 2 + 3
    client.serve_rings()
    assert daemon.open_descriptors() <= before
    client.serve_rings()


def test_memory_that_cannot_be_sealed_is_not_served(daemon: Daemon, client: StoreClient, admin: AdminClient) -> None:
    """Its worker has sealed it, or there is none. What was granted is free again."""
    with pytest.raises(StoreError, match=r"FAILED_PRECONDITION.*register"):
        client.serve_rings()
    assert counter(admin, "workers") == 0
    before = daemon.open_descriptors()
    for which in range(3):
        shared = client.register_worker(1, WINDOW_BYTES, STAGING_BYTES, [GEOMETRY])
        memory.add_seals((shared.window_fd, shared.staging_fd, shared.rings[0][0])[which], memory.F_SEAL_SEAL)
        shared.close()
        with pytest.raises(StoreError, match=r"FAILED_PRECONDITION.*has sealed its memory"):
            client.serve_rings()
        assert (counter(admin, "workers"), counter(admin, "rings")) == (0, 0)
        assert daemon.open_descriptors() <= before
    TestWorker(client).close()
