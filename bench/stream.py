"""How fast can threads read this machine's memory? The floor that attention over a KV cache is compared with.

A C loop adds up a buffer much larger than the cache, a part per thread; against torch.sum over the same bytes. GB/s.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch

from bench.compiled import compile_c
from decode_worker.figures import Figure, print_json, print_table

BUFFER_BYTES = 1 << 30
REPEATS = 7
# Independent sums in vectors: the loop waits for memory, not for the adder.
SOURCE = """
typedef unsigned long vector __attribute__((vector_size(64)));
unsigned long add_up(const vector* from, unsigned long count) {
  vector a = {0}, b = {0}, c = {0}, d = {0};
  for (unsigned long i = 0; i + 4 <= count; i += 4) {
    __builtin_prefetch(from + i + 64);
    a += from[i], b += from[i + 1], c += from[i + 2], d += from[i + 3];
  }
  a += b + c + d;
  return a[0] + a[1] + a[2] + a[3] + a[4] + a[5] + a[6] + a[7];
}
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.stream", description=__doc__)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = measure(arguments.threads)
    print_json(figures) if arguments.json else print_table("Stream read", figures)
    return 0


def measure(threads: int, buffer_bytes: int = BUFFER_BYTES, repeats: int = REPEATS) -> list[Figure]:
    torch.set_num_threads(threads)
    ours, rival = [], []
    with StreamRead(threads, buffer_bytes) as stream:
        as_floats = torch.from_numpy(stream.buffer.view(np.float32))
        for _ in range(repeats):
            ours.append(stream.gb_per_s())
            started = time.perf_counter()
            as_floats.sum()
            rival.append(buffer_bytes / (time.perf_counter() - started) / 1e9)
    return [Figure.of_runs(f"stream_read_{threads}_threads", ours, "GB/s", "torch.sum", rival)]


class StreamRead:
    """A buffer and the loop that reads it. Context manager."""

    def __init__(self, threads: int, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._threads = threads
        self.buffer = np.zeros(buffer_bytes // 8, np.uint64)
        self.buffer[:] = 1
        skip = -self.buffer.ctypes.data // 8 % 8  # the loop's vectors are aligned
        self._parts = np.array_split(self.buffer[skip : len(self.buffer) // 8 * 8 - 8 + skip], threads)

    def __enter__(self) -> Self:
        with tempfile.TemporaryDirectory(prefix="headgate-bench-") as directory:
            source = Path(directory) / "add_up.c"
            source.write_text(SOURCE)
            library = ctypes.CDLL(str(compile_c(source, Path(directory) / "add_up.so", "-shared", "-fPIC")))
        self._add_up = library.add_up
        self._add_up.argtypes, self._add_up.restype = (ctypes.c_void_p, ctypes.c_ulong), ctypes.c_ulong
        self._pool = ThreadPoolExecutor(self._threads)
        self.gb_per_s()
        return self

    def gb_per_s(self) -> float:
        """One reading of the whole buffer."""
        started = time.perf_counter()
        list(self._pool.map(self._read, self._parts))
        return self.buffer.nbytes / (time.perf_counter() - started) / 1e9

    def _read(self, part: np.ndarray) -> int:
        first = part.ctypes.data + -part.ctypes.data % 64
        return int(self._add_up(first, (part.ctypes.data + part.nbytes - first) // 64))

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()


if __name__ == "__main__":
    sys.exit(main())
