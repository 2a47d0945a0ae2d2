import os
import random
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def seed() -> int:
    value = int(os.environ.get("HEADGATE_TEST_SEED", random.randrange(1 << 32)))
    print(f"HEADGATE_TEST_SEED={value}")
    return value


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def has_direct_io(directory: Path) -> bool:
    try:
        os.close(os.open(directory / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        return False
    return True


@pytest.fixture
def directory(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A directory whose file system has O_DIRECT."""
    if has_direct_io(tmp_path):
        return tmp_path
    inside = Path(__file__).parents[2] / "build" / "tests" / request.node.name
    inside.mkdir(parents=True, exist_ok=True)
    return inside
