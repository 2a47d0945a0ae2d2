"""The worker's window: chosen by the daemon's word for it, and looked at before anything is delivered."""

import os

import numpy as np
import pytest

from decode_worker.window.base import WINDOWS
from kvstore_service._native import WINDOW_KINDS

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
