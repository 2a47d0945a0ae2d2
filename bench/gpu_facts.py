"""What a machine's GPU, its driver and its bus can do, as far as windows and graphs ask: recorded once per machine.

    python -m bench.gpu_facts [--out FILE]

What cannot be asked stands with the reason. Needs the driver and torch with CUDA; no network; changes no setting."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.vulkan import Vulkan
from bench.vulkan_window import described
from decode_worker.device import Gpu
from decode_worker.figures import commit, machine

# CUdevice_attribute, by number.
ATTRIBUTES = {
    98: "can_flush_remote_writes",
    110: "gpu_direct_rdma_with_cuda_vmm",
    113: "read_only_host_register",
    116: "gpu_direct_rdma",
    117: "gpu_direct_rdma_flush_writes_options",
    118: "gpu_direct_rdma_writes_ordering",
    124: "dma_buf",
}
QUERIED = (
    "driver_version", "name", "pcie.link.gen.current", "pcie.link.width.current", "pcie.link.gen.max", "memory.total"
)  # fmt: skip
SIZES = [1 << exponent for exponent in range(12, 29, 4)]  # bytes of one copy
RECORD_BYTES = 512
RECORDS = 1 << 16
REPEATS = 7
COMMAND_S = 60


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the JSON is written there too")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_facts: torch finds no GPU here; run it on a machine that has one", file=sys.stderr)
        return 1
    text = json.dumps({"machine": machine(), "commit": commit(), **facts()}, indent=2)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    return 0


def facts() -> dict[str, object]:
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "capability": _reported(lambda: list(torch.cuda.get_device_capability(0))),
        "nvidia_smi": _reported(_queried),
        "bar1": _reported(_bar1),
        "attributes": _reported(_attributes),
        "gdrdrv": Path("/dev/gdrdrv").exists(),
        "modules": _reported(_modules),
        "libraries": {name: _loads(name) for name in ("libcuda.so.1", "libgdrapi.so.2", "libvulkan.so.1")},
        "vulkan_memory_types": _reported(_vulkan),
        "copy_gbps": _reported(_copies),
        "gather_512B_gbps": _reported(_gather),
    }


def _reported(ask: Callable[[], object]) -> object:
    try:
        return ask()
    except Exception as error:
        return f"not known: {type(error).__name__}: {error}"


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(f"{command[0]} is not installed")
    return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=True).stdout


def _queried() -> dict[str, str]:
    line = _output("nvidia-smi", f"--query-gpu={','.join(QUERIED)}", "--format=csv,noheader", "--id=0")
    return dict(zip(QUERIED, (word.strip() for word in line.split(",")), strict=True))


def _bar1() -> list[str]:
    lines = [line.strip() for line in _output("nvidia-smi", "-q", "-d", "MEMORY", "-i", "0").splitlines()]
    first = lines.index("BAR1 Memory Usage")
    return lines[first : first + 4]


def _attributes() -> dict[str, int]:
    driver = ctypes.CDLL("libcuda.so.1")
    if (error := driver.cuInit(0)) != 0:
        raise OSError(f"cuInit: error {error}")
    found = {}
    for number, name in ATTRIBUTES.items():
        value = ctypes.c_int()
        error = driver.cuDeviceGetAttribute(ctypes.byref(value), number, 0)
        found[f"{number} {name}"] = -error if error else value.value
    return found


def _modules() -> list[str]:
    names = (line.split()[0] for line in Path("/proc/modules").read_text().splitlines())
    return sorted(name for name in names if name.startswith(("nvidia", "gdrdrv", "nv_peer")))


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _vulkan() -> dict[str, list[str]]:
    with contextlib.closing(Vulkan()) as vulkan:
        return described(vulkan.devices())


def _copies() -> dict[str, dict[str, float]]:
    """GB/s between pinned host memory and the device, medians."""
    rates: dict[str, dict[str, float]] = {"to_device": {}, "to_host": {}, "on_device": {}}
    for size in SIZES:
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        device, other = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
        for name, to, source in (
            ("to_device", device, host), ("to_host", host, device), ("on_device", other, device)
        ):  # fmt: skip
            rates[name][str(size)] = (
                size / _seconds(lambda to=to, source=source: to.copy_(source, non_blocking=True)) / 1e9
            )
    return rates


def _gather() -> dict[str, float]:
    """GB/s of records taken in random order from registered host memory by an index kernel of torch: what a window
    that the device fills itself can be compared with."""
    gpu = Gpu()
    host = torch.zeros(RECORDS * RECORD_BYTES, dtype=torch.uint8).numpy()
    try:
        records = gpu.share(host).view(torch.int32).view(RECORDS, -1)
        order = torch.randperm(RECORDS, device="cuda")
        out = torch.empty_like(records, device="cuda")
        seconds = _seconds(lambda: torch.index_select(records, 0, order, out=out))
        return {f"{RECORDS} records": RECORDS * RECORD_BYTES / seconds / 1e9}
    finally:
        gpu.close()


def _seconds(launch: Callable[[], object]) -> float:
    launch()
    samples = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        launch()
        torch.cuda.synchronize()
        samples.append(time.perf_counter() - started)
    return sorted(samples)[REPEATS // 2]


if __name__ == "__main__":
    sys.exit(main())
