"""Lines of launches as graphs: when they are captured, and what is left where they cannot be."""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decode_worker.device import CudaGraph
from decode_worker.engine.graphs import Graphs
from decode_worker.engine.step import DecodeLoop, Launch
from tests.support.pretend_gpu import PretendGpu


class BrokenGraph:
    """Its end fails, too, as that of a real one does."""

    def capture(self, launch: Callable[[], None]) -> None:
        try:
            raise ValueError("no products in this thread yet")
        finally:
            raise RuntimeError("the capture has been invalidated")

    def replay(self) -> None:
        raise AssertionError("a graph that was never captured")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> PretendGpu:
    return PretendGpu()


def test_a_line_is_compiled_once_its_first_run_has_ended(device: PretendGpu) -> None:
    graphs, calls = Graphs(device), []

    def launch() -> None:
        calls.append(len(device.made))
        if len(calls) == 1:
            raise RuntimeError("a kernel does not compile")

    with pytest.raises(RuntimeError, match="does not compile"):
        graphs.run("line", launch)
    for _ in range(3):
        graphs.run("line", launch)
    assert calls == [0, 0, 1], "failed, launch by launch, captured; then replayed"
    assert device.made[0].replays == 1


def test_a_line_that_cannot_be_captured_stays_launch_by_launch(
    device: PretendGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graphs, calls, made = Graphs(device), [], []
    monkeypatch.setattr(device, "graph", lambda: made.append(BrokenGraph()) or made[-1])
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            try:
                raise KeyError("a row's fault, which is being told while others go on")
            except KeyError:
                graphs.run("line", lambda: calls.append("run"))
    assert (len(calls), len(made)) == (4, 1)
    assert [record.message for record in caplog.records] == [
        "the launches 'line' cannot be captured, and stay slower: no products in this thread yet"
    ]
    assert not graphs.capturing


def test_a_capture_that_is_interrupted_is_tried_again(device: PretendGpu) -> None:
    graphs, seen = Graphs(device), []

    def launch() -> None:
        seen.append(graphs.capturing)
        if len(seen) == 2:
            raise KeyboardInterrupt

    graphs.run("line", launch)
    with pytest.raises(KeyboardInterrupt):
        graphs.run("line", launch)
    assert not graphs.capturing
    graphs.run("line", launch)
    assert seen == [False, True, True]


@pytest.mark.parametrize("captured", [True, False])
def test_nothing_is_settled_within_a_capture(captured: bool, device: PretendGpu) -> None:
    """A wait for tickets would be recorded, or break the capture; and nothing was posted."""
    settled: list[int] = []

    def fails() -> None:
        raise ValueError("this launch")

    loop: Any = SimpleNamespace(
        spent_ns=Counter(), steps=0, kernels=SimpleNamespace(settle=settled.append), _graphs=Graphs(device),
        _transport=SimpleNamespace(wait_us=7),
    )  # fmt: skip
    loop._graphs.capturing = captured
    with pytest.raises(ValueError, match="this launch"):
        DecodeLoop._run(loop, [Launch("products", 0, fails, ())])
    assert settled == ([] if captured else [7])


def test_a_capture_is_ready_for_any_thread_and_leaves_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch does: products are made ready thread by thread, and a capture that fails leaves its stream current."""
    current, ready = ["usual"], []

    @contextlib.contextmanager
    def stream(name: str) -> Iterator[None]:
        before, current[0] = current[0], name
        try:
            yield
        finally:
            current[0] = before

    @contextlib.contextmanager
    def graph(made: object, capture_error_mode: str = "global") -> Iterator[None]:
        assert capture_error_mode == "thread_local", "other threads of this process may do as they like"
        assert ready == ["usual"], "the products of this thread"
        current[0] = "capture's"
        yield
        current[0] = "usual"

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: ready.append(current[0]))
    ran: list[str] = []
    CudaGraph().capture(lambda: ran.append(current[0]))
    assert (ran, current) == (["capture's"], ["usual"])

    def fails() -> None:
        raise ValueError("not while capturing")

    ready.clear()
    with pytest.raises(ValueError, match="not while capturing"):
        CudaGraph().capture(fails)
    assert current == ["usual"]
