"""The experiment of a window that Vulkan makes, with doubles of both drivers: what it finds, and what it says of the
rest."""

from __future__ import annotations

import contextlib
import gc
import json
import os

import pytest

from bench import gpu_facts, vulkan_window
from bench.vulkan import Vulkan
from bench.vulkan_window import Experiment
from tests.support import vulkan_double
from tests.support.pretend_gpu import PretendGpu

STEPS = ["cuda", "memory_types", "allocated", "stored", "imported", "copied", "polled"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WINDOW_BYTES": 1 << 20, "SIZES": (1 << 16,), "REPEATS": 2, "LEAST_BYTES": 1 << 16}.items():
        monkeypatch.setattr(vulkan_window, name, value)
    monkeypatch.setattr(vulkan_window, "Gpu", PretendGpu)


def run(words: str, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    """An experiment on drivers of which `words` are true."""
    monkeypatch.setenv("VULKAN_DOUBLE", words)
    gc.collect()  # what other tests have left closes its descriptors now
    before, descriptors = vulkan_double.live(), len(os.listdir("/proc/self/fd"))
    experiment = Experiment(vulkan_double.path(), vulkan_double.path())
    experiment.run()
    assert vulkan_double.live() == before, "everything is given back"
    assert len(os.listdir("/proc/self/fd")) == descriptors
    return experiment


def test_memory_that_all_can_reach_is_found_measured_and_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = run("", monkeypatch)
    assert list(experiment.steps) == STEPS
    types = {"Double": [
        "0: device_local; heap of 16384 MiB", "1: device_local host_visible host_coherent; heap of 256 MiB"
    ]}  # fmt: skip
    assert experiment.steps["memory_types"] == types
    assert experiment.steps["allocated"] == f"{1 << 20} bytes of type {types['Double'][1]}"
    assert experiment.steps["copied"] == f"{vulkan_window.READ_BYTES} bytes, equal to what the CPU stored"
    assert experiment.steps["polled"] == "the flag came, and 1024 of 1024 words stored before it"
    names = [f"transfer_gbps.vulkan.{1 << 16}.{threads}" for threads in vulkan_window.THREADS]
    assert [figure.name for figure in experiment.figures] == names
    assert all(figure.value for figure in experiment.figures)


def test_what_cuda_sees_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vulkan_window, "POLL_S", 0.2)
    steps = run("elsewhere", monkeypatch).steps
    assert steps["copied"] == f"{vulkan_window.READ_BYTES // 8} of {vulkan_window.READ_BYTES // 8} words differ"
    assert steps["polled"] == "the flag did not reach a kernel within 0 s"


@pytest.mark.parametrize(
    ("words", "step", "reason"),
    [
        ("fails=vkCreateInstance", "memory_types", "vkCreateInstance: initialisation failed"),
        ("no_device", "allocated", "Vulkan has no device of CUDA's"),
        ("other", "allocated", "Vulkan has no device of CUDA's"),
        ("hidden", "allocated", "no memory of Double is both the device's and visible to the host"),
        ("no_extension", "allocated", "vkCreateDevice: extension not present"),
        ("full", "allocated", "vkAllocateMemory: out of device memory"),
        ("fails=vkMapMemory", "allocated", "vkMapMemory: memory map failed"),
        ("fails=vkGetMemoryFdKHR", "imported", "vkGetMemoryFdKHR: initialisation failed"),
        ("fails=cuImportExternalMemory", "imported", "cuImportExternalMemory: error 1"),
        ("fails=cuInit", "imported", "there is no CUDA"),
        ("fails=cuMemcpyDtoH_v2", "copied", "cuMemcpyDtoH_v2: error 1"),
        ("fails=cuMemcpyDtoH_v2 fails=cuMemFree_v2", "copied", "cuMemcpyDtoH_v2: error 1"),
        ("fails=cuMemFree_v2", "given_back", "cuMemFree_v2: error 1"),
    ],
)
def test_what_cannot_be_had_says_why(words: str, step: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = run(words, monkeypatch).steps
    assert list(steps)[-1] == step, "nothing behind it is tried"
    assert steps[step] == f"not had: {reason}"
    assert str(steps["cuda"]).startswith("not had: " if "cuInit" in words else "device 070707")


def test_a_machine_with_neither_driver_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["vulkan_window", "--json"])
    monkeypatch.setattr(vulkan_window, "LIBRARY", "/no/libvulkan.so.1")
    monkeypatch.setattr(vulkan_window, "CUDA_LIBRARY", "/no/libcuda.so.1")
    assert vulkan_window.main() == 0
    told = json.loads(capsys.readouterr().out)
    assert told["figures"] == []
    assert [name for name, found in told["steps"].items() if "not had: /no/lib" in found] == ["cuda", "memory_types"]


def test_facts_of_a_gpu_name_its_memory_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VULKAN_DOUBLE", "")
    monkeypatch.setattr(gpu_facts, "Vulkan", lambda: Vulkan(vulkan_double.path()))
    found = gpu_facts.facts()["vulkan_memory_types"]
    with contextlib.closing(Vulkan(vulkan_double.path())) as vulkan:
        assert found == vulkan_window.described(vulkan.devices())
    assert "Double" in found
