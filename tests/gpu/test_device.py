"""The device of a worker: which one, and what is registered with the driver and given back."""

import ctypes
import mmap
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from decode_worker import device as device_module
from decode_worker.device import Gpu, Host, device_of
from decode_worker.gpu.launch import Launch
from tests.support.device_tensor import DEVICE
from tests.support.pretend_gpu import RecordedGraph, launched


class Runtime:
    """The runtime's two calls. Registered memory must be whole pages, once, and still mapped when it is given back."""

    def __init__(self) -> None:
        self.registered: dict[int, tuple[int, int]] = {}
        self.log: list[str] = []
        self.refuses = 0
        self.failed = False

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if self.refuses:
            return self.refuses
        assert address % mmap.PAGESIZE == 0
        assert address not in self.registered
        self.registered[address] = size, flags
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        if self.failed:
            self.log.append("refused")
            return 700
        np.frombuffer((ctypes.c_uint8 * self.registered.pop(address)[0]).from_address(address)).sum()
        self.log.append("unregister")
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: runtime.log.append("wait"))
    monkeypatch.setattr(Gpu, "at", lambda self, address, size: torch.zeros(size, dtype=torch.uint8))
    return runtime


def mapped(pages: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, pages * mmap.PAGESIZE), np.uint8)


def test_shared_memory_is_registered_and_given_back_once_the_device_is_idle(runtime: Runtime) -> None:
    device = Gpu()
    requests, completions = mapped(2), mapped(1)
    assert len(device.share(requests)) == requests.nbytes
    device.share(completions, read_only=True)
    assert runtime.registered == {
        requests.ctypes.data: (requests.nbytes, 1 | 2),
        completions.ctypes.data: (completions.nbytes, 1 | 2 | 8),
    }
    device.close()
    device.close()
    assert runtime.registered == {}
    assert runtime.log == ["wait", "unregister", "unregister"]


def test_what_a_failed_device_does_not_give_back_is_asked_for_once(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Gpu()
    for _ in range(2):
        device.share(mapped(1))

    def failed(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", failed)
    runtime.failed = True
    with pytest.raises(RuntimeError, match="illegal memory access"):
        device.close()
    assert runtime.log == ["refused", "refused"]
    device.close()
    assert runtime.log == ["refused", "refused"]


def test_a_device_is_idle_when_its_stream_is_and_says_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[bool | Exception] = [False, True, RuntimeError("CUDA error: unspecified launch failure")]

    class Stream:
        def query(self) -> bool:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    device = Gpu()
    assert [device.idle(), device.idle()] == [False, True]
    with pytest.raises(RuntimeError, match="launch failure"):
        device.idle()


def test_memory_that_the_driver_does_not_take_is_an_error(runtime: Runtime) -> None:
    device = Gpu()
    runtime.refuses = 2
    with pytest.raises(RuntimeError, match="cudaHostRegister failed: 2"):
        device.share(mapped(1))
    with pytest.raises(RuntimeError, match="cudaHostRegister failed: 2"):
        device.share(mapped(1), read_only=True)
    device.close()
    assert runtime.log == []


@pytest.mark.parametrize("code", [1, 801])
def test_a_driver_that_takes_no_read_only_memory_is_said_in_words(runtime: Runtime, code: int) -> None:
    runtime.refuses = code
    with pytest.raises(RuntimeError, match=rf"reading only.*attribute 113.*: {code}\): give --kernels cpu"):
        Gpu().share(mapped(1), read_only=True)


def test_kernels_name_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [type(device_of(kernels)) for kernels in ("cpu", "reference", "triton")] == [Host] * 3, "interpreted"
    monkeypatch.setattr(device_module, "_interpreted", lambda: False)
    with pytest.raises(ValueError, match="needs a GPU that torch can use; set TRITON_INTERPRET=1"):
        device_of("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert isinstance(device_of("triton"), Gpu)


def test_the_pretended_device_forgives_no_more_than_a_real_one() -> None:
    mine, cpus = torch.zeros(4, device=DEVICE), torch.ones(4)
    with pytest.raises(RuntimeError, match="expected all tensors on one device"):
        mine + cpus
    with pytest.raises(RuntimeError, match="expected all tensors on one device"):
        torch.add(cpus, cpus, out=mine)
    with pytest.raises(TypeError, match="to numpy"):
        mine.numpy()
    mine.copy_(cpus)
    mine[1:3].mul_(2)
    assert mine.cpu().numpy().tolist() == [1, 2, 2, 1]
    with pytest.raises(AssertionError, match="fill is given tensors of the device and of the CPU"):
        launched(Launch(SimpleNamespace(fn=SimpleNamespace(__name__="fill")), (1,), (mine, cpus), {}))


@pytest.mark.parametrize(
    "looks", [lambda mine: mine.cpu(), lambda mine: mine.copy_(torch.ones(4)), lambda mine: int(mine[0])]
)
def test_a_pretended_graph_refuses_what_waits_for_the_host(looks: Callable[[torch.Tensor], object]) -> None:
    mine = torch.zeros(4, device=DEVICE)
    with pytest.raises(AssertionError, match=r"waits for the host|looks at data"):
        RecordedGraph().capture(lambda: (mine.add_(1), looks(mine)))
    graph = RecordedGraph()
    graph.capture(lambda: mine.add_(1))
    graph.replay()
    graph.replay()
    assert mine.tolist() == [3] * 4
