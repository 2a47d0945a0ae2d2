"""The worker's window: chosen by the daemon's word for it, and looked at before anything is delivered."""

import os
from types import SimpleNamespace

import numpy as np
import pytest

from decode_worker.transport import Transport
from decode_worker.window.base import WINDOWS
from kvstore_service._native import WINDOW_KINDS
from kvstore_service.client import RingGeometry, StoreError, WorkerMemory

SIZE = 1 << 16


@pytest.fixture
def fd():
    memory = os.memfd_create("window")
    os.ftruncate(memory, SIZE)
    yield memory
    os.close(memory)


def test_the_worker_knows_every_kind_of_the_daemon():
    assert set(WINDOW_KINDS) <= set(WINDOWS.names)


def test_a_window_shows_what_is_delivered(fd):
    window = WINDOWS["shm"](fd, SIZE)
    window.self_test()
    assert not window.bytes.any(), "the test leaves nothing behind"
    os.pwrite(fd, b"record", 4096)
    assert window.bytes[4096:4102].tobytes() == b"record"
    window.close()
    window.close()
    assert window.bytes.size == 0


def test_a_window_that_is_not_shared_is_found_out(fd):
    window = WINDOWS["shm"](fd, SIZE)
    window.bytes = np.array(window.bytes)
    with pytest.raises(RuntimeError, match="byte 0"):
        window.self_test()
    window.close()


def test_a_kind_that_only_the_daemon_knows_is_refused(fd):
    memory = WorkerMemory(1, fd, SIZE, os.dup(fd), SIZE, [], 1024, 4, "gdr")
    client = SimpleNamespace(register_worker=lambda **_: memory)
    ring = RingGeometry(2, 1, 1)
    memory.window_fd = os.dup(fd)
    with pytest.raises(StoreError, match=r"'gdr'.*shm") as refused:
        Transport(
            client, slots=1, window_bytes=SIZE, staging_bytes=SIZE, decode_ring=ring, bulk_ring=ring, wait_ms=1000
        )
    assert refused.value.code == "FAILED_PRECONDITION"
    assert memory.window_fd == -1, "its descriptors are closed"
