"""Fixtures of the model tests."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread_without_gradients() -> Iterator[None]:
    """As a worker calls the model; one thread, because threads only slow tiny matrices down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)
