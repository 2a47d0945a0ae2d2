"""The worker's window: chosen by the daemon's word for it, and mapped."""

import os

import pytest

from decode_worker.device import Host
from decode_worker.window.kinds import WINDOWS
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
    window = WINDOWS["shm"]()(fd, SIZE, Host())
    os.pwrite(fd, b"record", 4096)
    assert bytes(window.tensor[4096:4102].tolist()) == b"record"
    window.close()
    window.close()
    assert len(window.tensor) == len(window.landing) == 0


def test_a_bounced_window_is_filled_from_where_the_daemon_delivers(fd):
    window = WINDOWS["bounce"]()(fd, SIZE, Host())
    os.pwrite(fd, b"record", 4096)
    assert not window.tensor.any()
    window.take(4096, 64)
    assert bytes(window.tensor[4090:4112].tolist()) == bytes(6) + b"record" + bytes(10)
    window.close()
    window.close()
    assert len(window.tensor) == len(window.landing) == 0


def test_kernels_on_a_cpu_are_not_given_a_gpus_memory():
    with pytest.raises(ValueError, match="--window shm or --kernels triton"):
        Host().at(0, SIZE)
