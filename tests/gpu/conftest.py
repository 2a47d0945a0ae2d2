"""Kernels run in Triton's interpreter, on numbers drawn from a printed seed."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from triton.runtime import interpreter


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(os.environ.get("HEADGATE_TEST_SEED", time.time_ns() % 1_000_000))
    print(f"HEADGATE_TEST_SEED={seed}")
    return np.random.default_rng(seed)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are small: threads would only wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def patched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter looks through all of Triton's language at every call of a device function, tl.sum included. The
    first call of each function has done what there is to do; the others would take half of a test's time."""
    prepared: set[interpreter.InterpretedFunction] = set()
    call = interpreter.InterpretedFunction.__call__

    def called(self: interpreter.InterpretedFunction, *arguments: object, **options: object) -> object:
        if self in prepared:
            return self.rewrite()(*arguments, **options)
        prepared.add(self)
        return call(self, *arguments, **options)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", called)
