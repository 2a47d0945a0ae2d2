"""Compiles the kernels of a step for devices that this machine need not have, and says what each costs there.

    python -m decode_worker.gpu.compile [--ptx DIR] [sm_80 sm_90 ...]     one JSON object per line

The launchers themselves are called, on tensors of a real model's shapes and types; in the place of a launch Triton
compiles for the target with the very arguments, constants and options, and nothing runs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decode_worker.kernels.state import HeadState
from decode_worker.policy.settings import SEAL_TOKENS, PolicySettings

TARGETS = ("sm_80", "sm_90")
WARP = 32
PTXAS_S = 300

# A storage dtype, query heads per KV head and head dimension: Llama-3-8B, Qwen2.5-14B, the extremes, and a masked one.
SHAPES = (
    (torch.bfloat16, 4, 128),
    (torch.bfloat16, 5, 128),
    (torch.bfloat16, 16, 128),
    (torch.bfloat16, 4, 64),
    (torch.bfloat16, 1, 96),
    (torch.bfloat16, 8, 256),
    (torch.float16, 4, 128),
    (torch.float32, 4, 128),
)


@dataclass(frozen=True)
class Compiled:
    """One kernel for one target. `shape`: dtype, group and d; costs are of one thread, but for shared memory."""

    kernel: str
    shape: str
    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    ptx: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=TARGETS, metavar="sm_NN")
    parser.add_argument("--ptx", type=Path, help="a folder that gets KERNEL.SHAPE.TARGET.ptx of each")
    arguments = parser.parse_args()
    for target in arguments.targets:
        for done in every_kernel(target):
            if arguments.ptx:
                (arguments.ptx / f"{done.kernel}.{done.shape}.{target}.ptx").write_text(done.ptx)
            print(json.dumps({name: value for name, value in asdict(done).items() if name != "ptx"}), flush=True)


def every_kernel(target: str) -> Iterator[Compiled]:
    """Those whose arguments do not depend on the shape once, the others once for each."""
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        raise RuntimeError("TRITON_INTERPRET is set: a process that interprets kernels cannot compile them; unset it")
    seen = set()
    for dtype, group, d in SHAPES:
        with compiling_for(target) as kernels:
            launch_all(dtype, group, d)
        for name, kernel in kernels:
            if kernel.hash in seen:
                continue
            seen.add(kernel.hash)
            shape = f"{str(dtype).removeprefix('torch.')}-{group}-{d}"
            ptx = kernel.asm["ptx"]
            registers, spilled = assembled(target, ptx)
            yield Compiled(name, shape, target, registers, spilled, kernel.metadata.shared, ptx)


def launch_all(dtype: torch.dtype, group: int, d: int, rows: int = 4, heads: int = 8) -> None:
    """Every launch of a layer."""
    from decode_worker.gpu.kernels import append, arrive, attend, gather

    device = torch.device("cpu")
    record_bytes = 2 * d * dtype.itemsize
    grid = (2, heads)
    settings = PolicySettings(
        slots=rows, layers=2, kv_heads=heads, group=group, head_dim=d, record_bytes=record_bytes, context=8192,
        tau=np.zeros(grid, np.float32), weights=np.ones((*grid, group), np.float32), resident=np.zeros(grid, np.bool_),
        tail=64 + 2 * SEAL_TOKENS,
    )  # fmt: skip
    state = HeadState(settings)
    words = torch.int32
    window, source = torch.zeros(1024, dtype=dtype), torch.zeros(1024, dtype=words)
    slots, positions = torch.zeros(rows, dtype=words), torch.zeros(rows, dtype=words)
    query, lse = torch.zeros(rows, heads * group, d), torch.zeros(rows, heads * group)
    key = torch.zeros(rows, heads, d)
    wishes = arrive.Wishes(2, rows * heads, device)
    word = torch.zeros(1, dtype=torch.int64)
    ring = arrive.Completions(torch.zeros((8, rows * heads, 2), dtype=torch.int64), word, word, word.view(words)[:1])
    pairs, offsets = torch.zeros((64, 2), dtype=words), torch.zeros(64, dtype=torch.int64)
    scratch = attend.AttendScratch(rows, heads, group, d, device)

    arrive.await_ticket(state, 1, wishes, ring, 10**9, False)
    arrive.commit(state, 1, wishes, True, False)
    gather.gather(state, 1, wishes, pairs, None, source, source, record_bytes, 8)
    gather.gather(state, 1, wishes, pairs, offsets, source, source, record_bytes, 8)
    append.append(state, slots, positions, 1, key, key, window, record_bytes)
    attend.attend(state, slots, positions, 1, query, query, lse, window, record_bytes, d**-0.5, scratch)


@contextmanager
def compiling_for(target: str) -> Iterator[list[tuple[str, Any]]]:
    """Within, a launch only compiles. Gives (name, compiled kernel) of each, in order."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    class Absent:
        """A device that is only a name."""

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", int(target.removeprefix("sm_")), WARP)

    kernels: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, **options: Any) -> None:
        kernel.device_caches.clear()  # of another target
        kernels.append((kernel.fn.__name__.lstrip("_"), run(kernel, *arguments, **{**options, "warmup": True})))

    driver.set_active(Absent())
    JITFunction.run = compile_only
    try:
        yield kernels
    finally:
        JITFunction.run = run


def assembled(target: str, ptx: str) -> tuple[int, int]:
    """Registers of a thread and bytes that it spills, as the assembler that comes with Triton reports them."""
    from triton.backends.nvidia.compiler import get_ptxas

    architecture = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert architecture is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(ptx)
        source.flush()
        ptxas = get_ptxas(int(target.removeprefix("sm_"))).path
        command = [ptxas, "-v", f"--gpu-name={architecture[1]}", source.name, "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PTXAS_S)
    if done.returncode:
        raise RuntimeError(f"ptxas refuses a kernel for {target}: {done.stderr or done.stdout}")
    report = done.stderr + done.stdout
    registers = re.search(r"Used (\d+) registers", report)
    spilled = re.findall(r"(\d+) bytes spill", report)
    if registers is None or not spilled:
        raise RuntimeError(f"ptxas reports neither registers nor spills: {report}")
    return int(registers[1]), sum(map(int, spilled))


if __name__ == "__main__":
    main()
