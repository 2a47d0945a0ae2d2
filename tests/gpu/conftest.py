"""Kernels run in Triton's interpreter, on numbers drawn from a printed seed."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import time

import numpy as np
import pytest


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(os.environ.get("HEADGATE_TEST_SEED", time.time_ns() % 1_000_000))
    print(f"HEADGATE_TEST_SEED={seed}")
    return np.random.default_rng(seed)
