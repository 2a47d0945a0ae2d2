"""A window is tried as steps use it, and what does not work is told from what does."""

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from decode_worker import _native
from decode_worker.device import Device, Host
from decode_worker.window.base import Window, WindowError
from decode_worker.window.bounce import BounceWindow
from decode_worker.window.probes import LINES, ROUNDS, probes, try_window
from decode_worker.window.shm import ShmWindow
from tests.support.pretend_gpu import PretendGpu, RecordedGraph
from tests.support.rig import Rig

SIZE, WAIT_US = 1 << 18, 20_000_000


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with Rig(tmp_path, window_bytes=SIZE) as rig:
        rig.window[:] = 0
        yield rig


def tried(rig: Rig, kind: type[Window], device: Device, wait_us: int = WAIT_US) -> _native.RingProducer:
    """The ring, when the window has been tried."""
    window = kind(rig.window_fd, SIZE, device)
    ring = rig.add_ring(device=not device.wakes)
    try:
        try_window(window, device, ring, wait_us)
    finally:
        window.close()
    return ring


def test_all_of_a_window_is_probed_that_is_small_and_both_ends_of_any() -> None:
    for lines in (1, 2, 63, LINES, LINES * (ROUNDS - 1), 10**6, 2**32 // 64 + 5):
        asked = probes(lines * 64 + 63)
        assert len({probe.seed for probe in asked}) == len(asked) == ROUNDS
        assert asked[0].first == 0
        assert asked[-1].first + asked[-1].count == lines
        if lines <= LINES * (ROUNDS - 1):
            assert all(a.first + a.count >= b.first for a, b in itertools.pairwise(asked))
    assert probes(63) == []


@pytest.mark.parametrize(
    ("kind", "device_kind"),
    [(ShmWindow, Host), (BounceWindow, Host), (ShmWindow, PretendGpu), (BounceWindow, PretendGpu)],
)
def test_a_window_that_works_passes_and_is_left_as_it_was(
    rig: Rig, kind: type[Window], device_kind: type[Device]
) -> None:
    device = device_kind()
    ring = tried(rig, kind, device)
    assert not rig.window.any()
    consumed = ring.completions[ring.layout["consumed"] :][:8].view(np.uint64)
    assert consumed[0] == ROUNDS
    assert rig.plane.stats()["runs_ok"] == ROUNDS
    if isinstance(device, PretendGpu):
        assert [graph.replays for graph in device.made] == [ROUNDS - 2], "one round compiles, and one is the capture's"


class NoCaptures(PretendGpu):
    """Whose graphs cannot be made."""

    def graph(self) -> RecordedGraph:
        graph = super().graph()
        graph.capture = broken  # type: ignore[method-assign]
        return graph


def broken(launch: Callable[[], None]) -> None:
    raise RuntimeError("operation not permitted when stream is capturing")


def test_a_window_that_works_launch_by_launch_needs_no_graph(rig: Rig) -> None:
    tried(rig, BounceWindow, NoCaptures())
    assert rig.plane.stats()["runs_ok"] == ROUNDS


class Deaf(BounceWindow):
    """Whose kernels see another memory than the daemon's."""

    def __init__(self, fd: int, size_bytes: int, device: Device) -> None:
        super().__init__(fd, size_bytes, device)
        self.landing = self.landing.clone()


class DeafEnd(BounceWindow):
    """Whose last line is another memory than the daemon's."""

    def take(self, first: int, size_bytes: int) -> None:
        part = slice(first, min(first + size_bytes, SIZE - 64))
        self.tensor[part] = self.landing[part]


@pytest.mark.parametrize("device_kind", [Host, PretendGpu])
def test_what_kernels_do_not_see_is_found_out(rig: Rig, device_kind: type[Device]) -> None:
    words = LINES * 16
    wrong = rf"kernels see {words} of {words} words at bytes 0 to {LINES * 64 - 1} otherwise"
    with pytest.raises(WindowError, match=wrong):
        tried(rig, Deaf, device_kind())


def test_a_single_line_is_found_out(rig: Rig) -> None:
    with pytest.raises(WindowError, match=rf"kernels see 16 of .* at bytes {SIZE - LINES * 64} to {SIZE - 1}"):
        tried(rig, DeafEnd, Host())


@pytest.mark.parametrize("device_kind", [Host, PretendGpu])
def test_a_daemon_that_does_not_answer_is_not_waited_for_without_end(rig: Rig, device_kind: type[Device]) -> None:
    """A ring that nobody serves."""
    g, device = rig.geometry, device_kind()
    memory = [os.memfd_create(name) for name in ("requests", "completions")]
    for fd, size in zip(memory, (g.requests_bytes, g.completions_bytes), strict=True):
        os.ftruncate(fd, size)
    rig.fds += memory
    rig.plane.add_ring(rig.worker, *memory, g, not device.wakes)
    ring = _native.RingProducer(*memory)
    window = ShmWindow(rig.window_fd, SIZE, device)
    with pytest.raises(WindowError, match="has not answered within 50 ms"):
        try_window(window, device, ring, 50_000)
    assert ring.poisoned
    window.close()
    ring.close()
