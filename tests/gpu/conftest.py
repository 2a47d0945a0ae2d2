"""Kernels run in Triton's interpreter, on numbers drawn from a printed seed."""

import os
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.support.interpreter import bounded, patched_once

__all__ = ["bounded", "patched_once"]


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
def interpreted(patched_once: None, bounded: None) -> None:
    pass
