"""Kernels run once per instruction set that this machine has, on numbers drawn from a printed seed."""

import os
import time
from collections.abc import Iterator

import numpy as np
import pytest

from decode_worker import _native


@pytest.fixture(params=_native._levels(), ids=lambda level: ("baseline", "avx2", "avx512")[level])
def level(request: pytest.FixtureRequest) -> Iterator[int]:
    _native._set_level(request.param)
    yield request.param
    _native._set_level(_native._levels()[-1])


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(os.environ.get("HEADGATE_TEST_SEED", time.time_ns() % 1_000_000))
    print(f"HEADGATE_TEST_SEED={seed}")
    return np.random.default_rng(seed)
