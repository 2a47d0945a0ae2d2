import os
import time

import numpy as np
import pytest


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(os.environ.get("HEADGATE_TEST_SEED", time.time_ns() % 1_000_000))
    print(f"HEADGATE_TEST_SEED={seed}")
    return np.random.default_rng(seed)
