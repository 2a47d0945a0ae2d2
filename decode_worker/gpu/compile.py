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
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from decode_worker import _native
from decode_worker.device import Host
from decode_worker.kernels.base import Rows, StepContext
from decode_worker.kernels.products.base import Products
from decode_worker.kernels.state import HeadState
from decode_worker.policy.plan import QueryKind
from decode_worker.policy.settings import PolicySettings
from decode_worker.retrieval.hash import HashRetriever
from decode_worker.window.base import Frames, Window
from decode_worker.window.probes import probes

TARGETS = ("sm_80", "sm_90")
WARP = 32
CUOBJDUMP_S = 60
STORAGE = {
    torch.float32: _native.DTYPE_FLOAT32, torch.bfloat16: _native.DTYPE_BFLOAT16, torch.float16: _native.DTYPE_FLOAT16
}  # fmt: skip

# A storage dtype, query heads per KV head and head dimension: Llama-3-8B's, the largest, a masked one, the CPU's.
SHAPES = (
    (torch.bfloat16, 4, 128),
    (torch.bfloat16, 16, 256),
    (torch.float16, 5, 96),
    (torch.float32, 1, 64),
)


@dataclass(frozen=True)
class Compiled:
    """One kernel for one target. `shape`: dtype, group and d; `variant` counts those of one name and shape. Registers
    and stack, where what they do not hold spills to, are of one thread."""

    kernel: str
    shape: str
    variant: int
    target: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    ptx: str

    @property
    def file(self) -> str:
        return f"{self.kernel}.{self.shape}.{self.variant}.{self.target}.ptx"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=TARGETS, metavar="sm_NN")
    parser.add_argument("--ptx", type=Path, help="a folder that gets the PTX of each in a `file`")
    arguments = parser.parse_args()
    for target in arguments.targets:
        for done in every_kernel(target):
            if arguments.ptx:
                (arguments.ptx / done.file).write_text(done.ptx)
            print(json.dumps({**asdict(done), "ptx": done.file}), flush=True)


def every_kernel(target: str) -> Iterator[Compiled]:
    """Those whose arguments do not depend on the shape once, the others once for each."""
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        raise RuntimeError("TRITON_INTERPRET is set: a process that interprets kernels cannot compile them; unset it")
    seen = set()
    for dtype, group, d in SHAPES:
        shape = f"{str(dtype).removeprefix('torch.')}-{group}-{d}"
        variants: Counter[str] = Counter()
        with compiling_for(target) as kernels:
            launch_all(dtype, group, d)
        for name, kernel in kernels:
            if kernel.hash in seen:
                continue
            seen.add(kernel.hash)
            registers, stack = resources(kernel.asm["cubin"])
            yield Compiled(
                name, shape, variants[name], target, registers, stack, kernel.metadata.shared, kernel.asm["ptx"]
            )
            variants[name] += 1


def launch_all(dtype: torch.dtype, group: int, d: int, rows: int = 4, heads: int = 8) -> None:
    """Every launch of a step of one layer, with a ring, and those of the halves that tests call."""
    from decode_worker.gpu.kernels import arrive, gather
    from decode_worker.gpu.kernels.probe import Rounds
    from decode_worker.gpu.set import TritonKernels

    settings = made_settings(2 * d * dtype.itemsize, group, d, rows, heads)
    state = HeadState(settings)
    retriever = HashRetriever(np.zeros((2, heads, d, 256), np.float32), np.zeros((2, heads, d), np.float32))
    window = torch.zeros(64 * settings.record_bytes, dtype=torch.uint8)
    ring = cast(_native.RingProducer, NobodysRing(tickets=8, runs_max=rows * heads, pairs_max=4096))
    context = StepContext(
        settings,
        state,
        retriever,
        Host(),
        window,
        window,
        ring,
        STORAGE[dtype],
        settings.record_bytes,
        d**-0.5,
        1,
        False,
        10**6,
    )
    kernels = TritonKernels(context)
    ends = kernels.ends(cast(Products, NobodysProducts(rows)))
    for end in (*ends.first, *ends.last):
        end(rows)
    row = Rows(rows)
    row.set(range(rows), range(rows))
    query, key = torch.zeros(rows, heads * group, d), torch.zeros(rows, heads, d)
    kernels.begin(row, 1)
    kernels.look_up(1, query, QueryKind.SPECULATIVE)
    kernels.arrive(1, key, key)
    kernels.await_ticket(1)
    kernels.append(1, key, key)
    kernels.attend(1, query, query, torch.zeros(rows, heads * group))
    kernels.plan(1, query, QueryKind.SPECULATIVE)
    kernels.commit(1, None)
    pairs, words = torch.zeros((8, 4096, 2), dtype=torch.int32), window.view(torch.int32)
    wishes = arrive.Wishes(2, rows * heads, state.parity.device)
    Rounds(cast(Window, SimpleNamespace(tensor=window, landing=window)), Host(), ring, probes(len(window)), 1).launch()
    words64 = torch.zeros(2, 1, dtype=torch.int64)
    counts = torch.zeros(2, 1, dtype=torch.int32)
    for pull in (None, gather.Pull(Frames(counts[0], words), *words64, *counts)):
        gather.gather(state, 1, wishes, pairs, pull, words, words, settings.record_bytes, 8)


class NobodysProducts:
    """Tensors at both ends of a step, of Llama-3's vocabulary."""

    def __init__(self, rows: int) -> None:
        self.tokens, self.positions = torch.zeros(2, rows, dtype=torch.int64).unbind()
        self.logits = torch.zeros(rows, 128_256)


class NobodysRing:
    """Memory of a ring's size, as far as kernels map it (gpu/kernels/post.py)."""

    def __init__(self, tickets: int, runs_max: int, pairs_max: int) -> None:
        self.tickets, self.runs_max, self.pairs_max = tickets, runs_max, pairs_max
        self.layout = dict.fromkeys(
            ("poison", "released", "daemon_poison", "consumed", "tickets", "runs", "pairs", "cells"), 64
        )
        self.requests = np.zeros(64 + tickets * max(64, 32 * runs_max, 8 * pairs_max), np.uint8)
        self.completions = np.zeros(64 + tickets * 16 * runs_max, np.uint8)


def made_settings(record_bytes: int, group: int, d: int, slots: int, heads: int) -> PolicySettings:
    """Two layers, no head resident."""
    grid = (2, heads)
    return PolicySettings(
        slots=slots, layers=2, kv_heads=heads, group=group, head_dim=d, record_bytes=record_bytes, context=8192,
        tau=np.zeros(grid, np.float32), weights=np.ones((*grid, group), np.float32), resident=np.zeros(grid, np.bool_),
    )  # fmt: skip


@contextmanager
def compiling_for(target: str) -> Iterator[list[tuple[str, Any]]]:
    """Within, a launch only compiles. Gives (name, compiled kernel) of each, in order."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    absent = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", int(target.removeprefix("sm_")), WARP),
    )
    kernels: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, **options: Any) -> None:
        kernel.device_caches.clear()  # of another target
        kernels.append((kernel.fn.__name__.lstrip("_"), run(kernel, *arguments, **{**options, "warmup": True})))

    driver.set_active(absent)
    JITFunction.run = compile_only
    try:
        yield kernels
    finally:
        JITFunction.run = run


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread, as they stand in the binary."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=CUOBJDUMP_S)
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    if found is None:
        raise RuntimeError(f"cuobjdump tells nothing of a kernel's registers: {done.stderr or done.stdout}")
    return int(found[1]), int(found[2])


if __name__ == "__main__":
    main()
