"""A real daemon and workers that pull: what they are handed, who gets an arena, and what is left of one."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from decode_worker._native import pull_layout
from decode_worker.transport import Transport
from decode_worker.window.pull import PullWindow
from kvstore_service.client import AdminClient, RingGeometry, StoreClient, StoreError
from tests.support.daemon_process import Daemon
from tests.support.pretend_gpu import PretendGpu

RING = RingGeometry(4, 64, 4096)
WINDOW_BYTES = (1 << 20) + 64
OPTIONS = ("--nvme-bytes=1GiB", "--copy-threads=1")


def connect(daemon: Daemon, name: str) -> StoreClient:
    return StoreClient.connect(daemon.socket, daemon.broker, name)


def transport(client: StoreClient, *kinds: str, device: PretendGpu | None = None) -> Transport:
    return Transport(
        client, device or PretendGpu(), slots=1, window_bytes=WINDOW_BYTES, staging_bytes=4096,
        decode_ring=RingGeometry(4, 64, 4096, device=True), bulk_ring=RING, wait_ms=10_000, windows=kinds,
    )  # fmt: skip


def arenas(daemon: Daemon) -> int:
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        return admin.get_status().counters["arenas"]


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.05)


def test_a_user_has_one_arena_as_long_as_it_has_a_worker_that_pulls(tmp_path: Path) -> None:
    with Daemon(tmp_path, dram_bytes="8MiB", options=OPTIONS) as daemon:
        with connect(daemon, "one") as one, connect(daemon, "two") as two:
            mapped = [transport(client, "pull") for client in (one, two)]
            assert arenas(daemon) == 1
            for each in mapped:
                assert isinstance(each.window, PullWindow)
                frames = each.window.frames
                assert frames is not None
                assert frames.arena.numel() * 4 == 4 << 20  # half of dram_bytes
                assert frames.lines.dtype == torch.int32
                assert len(frames.lines) == WINDOW_BYTES // 64
                assert len(each.window.landing) == len(each.window.tensor) == WINDOW_BYTES
                each.close()
                assert each.window.frames is None
            two.close()
            assert arenas(daemon) == 1
        eventually(lambda: arenas(daemon) == 0)


@pytest.mark.parametrize("arena_bytes", ["0", "8MiB"])
def test_a_worker_gets_the_next_window_of_its_list_where_no_arena_is_to_be_had(
    tmp_path: Path, arena_bytes: str
) -> None:
    refusal = "no arena of 8388608 B fits" if arena_bytes != "0" else "the daemon's windows are shm, the worker can map"
    with Daemon(tmp_path, dram_bytes="8MiB", options=(*OPTIONS, f"--arena-bytes={arena_bytes}")) as daemon:
        with connect(daemon, "either") as client:
            mapped = transport(client, "pull", "bounce")
            assert mapped.window.kind == "shm"
            mapped.close()
        with connect(daemon, "this") as client, pytest.raises(StoreError, match=refusal):
            transport(client, "pull")
        assert arenas(daemon) == 0


def test_a_worker_without_an_arena_keeps_what_it_has_registered(tmp_path: Path) -> None:
    """What was made before the refusal is given back: the memory that it may have is all free for the next window."""
    options = (*OPTIONS, "--arena-bytes=8MiB", "--worker-bytes-max=4MiB")
    with Daemon(tmp_path, dram_bytes="8MiB", options=options) as daemon, connect(daemon, "tight") as client:
        mapped = transport(client, "pull", "bounce")
        assert mapped.window.kind == "shm"
        mapped.close()


class NoArenas(PretendGpu):
    """Takes memory that is mapped for writing alone. `shared`: bytes of what it has now."""

    def __init__(self) -> None:
        super().__init__()
        self.shared: list[int] = []

    def share(self, memory: NDArray[np.uint8], *, read_only: bool = False) -> torch.Tensor:
        if memory.nbytes == 4 << 20:
            raise RuntimeError("cudaHostRegister: error 801")
        self.shared.append(memory.nbytes)
        return super().share(memory, read_only=read_only)

    def close(self) -> None:
        self.shared.clear()


def test_a_window_that_could_not_be_made_leaves_no_memory_with_the_driver(tmp_path: Path) -> None:
    with Daemon(tmp_path, dram_bytes="8MiB", options=OPTIONS) as daemon, connect(daemon, "either") as client:
        device = NoArenas()
        mapped = transport(client, "pull", "bounce", device=device)
        assert mapped.windows_refused == {"pull": "cudaHostRegister: error 801"}
        assert WINDOW_BYTES in device.shared
        assert pull_layout(WINDOW_BYTES)[2] not in device.shared
        mapped.close()
