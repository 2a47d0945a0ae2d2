"""What our decode step is compared with, one rival per file: programs of others on the same weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bench.rivals import llama_cpp, matmul, static_cache
from bench.rivals.problem import NotRun, Problem, Step

RIVALS: Mapping[str, Callable[[Problem], Step]] = {
    "static_cache": static_cache.prepare,
    "matmul": matmul.prepare,
    "llama_cpp": llama_cpp.prepare,
}

__all__ = ["RIVALS", "NotRun", "Problem", "Step"]
