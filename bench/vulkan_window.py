"""A window without GDRCopy: device memory that the CPU stores to, made by Vulkan and imported by CUDA. Can it be had?

    python -m bench.vulkan_window [--json]

Steps: the memory types of the GPU; an allocation of one that is the device's and visible to the host; rates at which
the CPU stores to it; its export and import; what CUDA copies back, and what a kernel sees that polls meanwhile. The
first that cannot be had says why, and those behind it are not tried. Without CUDA the first Vulkan device is taken.
Needs no network, and changes nothing."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import Structure, Union, byref, c_int, c_uint8, c_uint32, c_uint64, c_void_p

import numpy as np
import torch

from bench.vulkan import DEVICE_LOCAL, HOST_VISIBLE, LIBRARY, Device, ExportedMemory, MemoryType, Vulkan
from decode_worker.device import Gpu
from decode_worker.figures import Figure, print_table, report

CUDA_LIBRARY = "libcuda.so.1"
WINDOW_BYTES = 64 << 20
SIZES = (64 << 10, 1 << 20, 16 << 20, WINDOW_BYTES)
THREADS = (1, 2, 4)
REPEATS = 7
LEAST_BYTES = 16 << 20  # of one measurement
READ_BYTES = 1 << 20
POLL_S = 5.0
STORE_AFTER_S = 0.05  # by then the kernel polls
QUIET, TOLD = 2, 3  # the flag; the compiler knows nothing special of either
CUDA_OPAQUE_FD = 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args()
    experiment = Experiment(LIBRARY, CUDA_LIBRARY)
    experiment.run()
    if arguments.json:
        print(json.dumps(report(experiment.figures) | {"steps": experiment.steps}, indent=2))
        return 0
    for name, found in experiment.steps.items():
        print(f"{name}: {found}")
    print_table("Stores of the CPU to device memory", experiment.figures)
    return 0


class Experiment:
    """`steps`: what each has found, or why it could not be had. `figures`: rates of stores."""

    def __init__(self, vulkan_library: str, cuda_library: str) -> None:
        self._libraries = vulkan_library, cuda_library
        self.steps: dict[str, object] = {}
        self.figures: list[Figure] = []

    def run(self) -> None:
        vulkan_library, cuda_library = self._libraries
        step = "cuda"
        try:
            with contextlib.ExitStack() as undo:
                cuda = self._cuda(cuda_library)
                step = "memory_types"
                vulkan = undo.enter_context(contextlib.closing(Vulkan(vulkan_library)))
                self.steps[step] = described(vulkan.devices())
                step = "allocated"
                device, memory_type = _fitting(vulkan, cuda)
                memory = undo.enter_context(contextlib.closing(device.exportable(memory_type, WINDOW_BYTES)))
                self.steps[step] = f"{WINDOW_BYTES} bytes of type {memory_type}"
                step = "stored"
                self.figures = list(_rates(memory.address))
                self.steps[step] = f"at up to {max(figure.value or 0 for figure in self.figures):.1f} GB/s"
                step = "imported"
                if cuda is None:
                    raise Missing("there is no CUDA")
                pointer = undo.enter_context(cuda.imported(memory))
                self.steps[step] = f"at {pointer:#x}"
                step = "copied"
                self.steps[step] = _copied(cuda, memory, pointer)
                step = "polled"
                self.steps[step] = _polled(memory, pointer)
                step = "given_back"
        except Exception as error:  # of either driver, of a compiler: what the experiment is to report
            while error.__context__ is not None:  # who gives back after an error may meet another
                error = error.__context__
            self.steps[step] = f"not had: {error}"

    def _cuda(self, library: str) -> Cuda | None:
        try:
            cuda = Cuda(library)
        except (OSError, Missing) as error:
            self.steps["cuda"] = f"not had: {error}"
            return None
        self.steps["cuda"] = f"device {cuda.uuid.hex()}"
        return cuda


class Missing(Exception):
    """What a step needs, and this machine lacks."""


def described(devices: list[Device]) -> dict[str, list[str]]:
    """Name -> memory types, in words."""
    return {device.name: [str(each) for each in device.memory_types] for device in devices}


def _fitting(vulkan: Vulkan, cuda: Cuda | None) -> tuple[Device, MemoryType]:
    """CUDA's device, and the largest memory of it that a window can be made of."""
    devices = [device for device in vulkan.devices() if cuda is None or device.uuid == cuda.uuid]
    if not devices:
        raise Missing("Vulkan has no device" if cuda is None else "Vulkan has no device of CUDA's")
    wanted = DEVICE_LOCAL | HOST_VISIBLE
    types = [each for each in devices[0].memory_types if each.flags & wanted == wanted]
    if not types:
        raise Missing(f"no memory of {devices[0].name} is both the device's and visible to the host")
    return devices[0], max(types, key=lambda each: each.heap_bytes)


# --- stores ---


def _rates(address: int) -> Iterator[Figure]:
    """By volume and threads, each of which stores a part."""
    source = np.random.default_rng(0).integers(0, 256, WINDOW_BYTES, np.uint8)
    for threads in THREADS:
        with ThreadPoolExecutor(threads) as pool:
            for size in SIZES:
                rates = [_rate(address, source, size, threads, pool) for _ in range(REPEATS)]
                yield Figure.of_runs(f"transfer_gbps.vulkan.{size}.{threads}", rates, "GB/s")


def _rate(address: int, source: np.ndarray, size: int, threads: int, pool: ThreadPoolExecutor) -> float:
    times, part = max(1, LEAST_BYTES // size), size // threads

    def store(thread: int) -> None:
        for i in range(times):
            at = (i * size + thread * part) % WINDOW_BYTES
            ctypes.memmove(address + at, source.ctypes.data + at, part)

    started = time.perf_counter()
    list(pool.map(store, range(threads)))
    return times * part * threads / (time.perf_counter() - started) / 1e9


def _stored(memory: ExportedMemory, seed: int, size_bytes: int) -> np.ndarray:
    """Other numbers for each seed, at the window's beginning."""
    pattern = np.random.default_rng(seed).integers(1, 1 << 62, size_bytes // 8, np.int64)
    ctypes.memmove(memory.address, pattern.ctypes.data, size_bytes)
    _drain()
    return pattern


def _drain() -> None:
    """Write-combined stores leave the core before a locked instruction ends: the acquisition of a lock is one."""
    with threading.Lock():
        pass


# --- what the device sees ---


def _copied(cuda: Cuda, memory: ExportedMemory, pointer: int) -> str:
    stored = _stored(memory, 1, READ_BYTES)
    seen = np.empty_like(stored)
    cuda.call("cuMemcpyDtoH_v2", c_void_p(seen.ctypes.data), c_uint64(pointer), c_uint64(READ_BYTES))
    wrong = int((seen != stored).sum())
    return (
        f"{READ_BYTES} bytes, equal to what the CPU stored" if not wrong else f"{wrong} of {len(stored)} words differ"
    )


def _polled(memory: ExportedMemory, pointer: int) -> str:
    """A kernel is launched, then words and, last, their flag are stored."""
    from bench.polling import WORDS, start  # there may be no Triton

    device, stored = Gpu(), []
    window = device.at(pointer, 8 * (WORDS + 1)).view(torch.int64)
    words, flag = window[:WORDS], window[WORDS:]
    tell = ctypes.c_int64.from_address(memory.address + 8 * WORDS)
    tell.value = QUIET
    _drain()
    start(words, flag, QUIET, int(POLL_S * 1e9))  # compiled, and it has seen the words as they were
    device.wait()

    def store() -> None:
        time.sleep(STORE_AFTER_S)
        stored.append(_stored(memory, 2, 8 * WORDS))
        tell.value = TOLD
        _drain()

    storing = threading.Thread(target=store)
    storing.start()
    came, seen = start(words, flag, TOLD, int(POLL_S * 1e9))
    storing.join(POLL_S)
    if not bool(came):
        return f"the flag did not reach a kernel within {POLL_S:.0f} s"
    wrong = int((seen.cpu().numpy() != stored[0]).sum())
    return f"the flag came, and {WORDS - wrong} of {WORDS} words stored before it"


class Cuda:
    """The driver's calls, in torch's context. OSError without the library, Missing for a call that fails."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)
        context, uuid = c_void_p(), (c_uint8 * 16)()
        self.call("cuInit", c_uint32(0))
        self.call("cuDeviceGetUuid_v2", byref(uuid), c_int(0))
        self.call("cuDevicePrimaryCtxRetain", byref(context), c_int(0))
        self.call("cuCtxSetCurrent", context)
        self.uuid = bytes(uuid)

    def call(self, name: str, *arguments: object) -> None:
        if not hasattr(self._library, name):
            raise Missing(f"{name}: the driver has none")
        if error := getattr(self._library, name)(*arguments):
            raise Missing(f"{name}: error {error}")

    @contextlib.contextmanager
    def imported(self, memory: ExportedMemory) -> Iterator[int]:
        """Its address on the device."""
        descriptor = memory.export()
        taken, pointer = c_void_p(), c_uint64()
        wanted = _HandleDescription(type=CUDA_OPAQUE_FD, size=memory.size_bytes)
        wanted.handle.fd = descriptor
        whole = _BufferDescription(offset=0, size=memory.size_bytes)
        with contextlib.ExitStack() as undo:
            try:
                self.call("cuImportExternalMemory", byref(taken), byref(wanted))
            except Missing:
                os.close(descriptor)  # the driver's from here on, but only if it takes it
                raise
            undo.callback(self.call, "cuDestroyExternalMemory", taken)
            self.call("cuExternalMemoryGetMappedBuffer", byref(pointer), taken, byref(whole))
            undo.callback(self.call, "cuMemFree_v2", pointer)
            yield pointer.value


class _Handle(Union):
    _fields_ = (("fd", c_int), ("win32", c_void_p * 2))


class _HandleDescription(Structure):
    _fields_ = (
        ("type", c_int), ("handle", _Handle), ("size", c_uint64), ("flags", c_uint32), ("reserved", c_uint32 * 16)
    )  # fmt: skip


class _BufferDescription(Structure):
    _fields_ = (("offset", c_uint64), ("size", c_uint64), ("flags", c_uint32), ("reserved", c_uint32 * 16))


if __name__ == "__main__":
    sys.exit(main())
