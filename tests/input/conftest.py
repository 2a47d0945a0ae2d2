"""A place for everything that a command may leave behind, and a small model."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from e2e.conftest import random_checkpoint, random_ids

from .terminal import Terminal

StartTerminal = Callable[..., Terminal]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its texts have no end of their own."""
    return random_checkpoint(tmp_path_factory.mktemp("input"), seed=7, max_position_embeddings=4096, eos_token_id=None)


@pytest.fixture(scope="session")
def prompt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 tokens of the checkpoint."""
    file = tmp_path_factory.mktemp("prompt") / "prompt.txt"
    file.write_text(" ".join(f"w{token}" for token in random_ids(600, 95)))
    return file


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory with a short path (Ray's sockets lie deep in it) on a disk."""
    path = Path(tempfile.mkdtemp(prefix="hg", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def terminal(home: Path) -> Iterator[StartTerminal]:
    """Starts commands in terminals; all are killed at the end."""
    with ExitStack() as stack:
        yield lambda command, **variables: stack.enter_context(closing(Terminal(command, home, **variables)))
