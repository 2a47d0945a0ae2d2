"""The records of layer l travel while layer l-1 computes: both processes' clocks say so."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import Tensor

from tests.support.daemon_process import Daemon

from .conftest import DaemonFactory, Expected, greedy, joined, random_checkpoint, random_ids

STEPS = 16
PROMPT_TOKENS, SEED = 700, 81
DELAY_US = 300

Span = tuple[int, int]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of some milliseconds: the FFN reads 50 MB of weights for every token."""
    return random_checkpoint(tmp_path_factory.mktemp("wide"), seed=8, hidden_size=256, intermediate_size=16384)


@pytest.fixture(scope="module")
def expected_wide(wide: Path) -> Expected:
    return Expected(wide)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("delay_us", [0, DELAY_US], ids=["plain", "delayed"])
def test_copies_travel_while_the_layer_before_computes(
    start_daemon: DaemonFactory, wide: Path, expected_wide: Expected, delay_us: int
) -> None:
    print(f"seed {SEED}")
    prompt = random_ids(PROMPT_TOKENS, SEED)
    daemon = start_daemon("64MiB")
    with joined(daemon, wide, policy="infinigen") as worker:
        session, logits = worker.prefill(prompt)
        wanted_at: dict[Span, int] = {}  # (step, layer) -> when the layer begins to wait for its records
        kernels, arrive = worker.loop.kernels, worker.loop.kernels.arrive

        def timed_arrive(layer: int, *token: Tensor) -> None:
            wanted_at[worker.loop.steps, layer] = time.monotonic_ns()
            arrive(layer, *token)

        kernels.arrive = timed_arrive  # type: ignore[method-assign, assignment]
        daemon.set_faults(delay_us=delay_us)
        daemon.drain_trace()
        tokens = greedy(worker, session, logits, STEPS)
        layers = {(step, layer): (start, end) for step, layer, start, end in worker.loop.trace}
        waited_ms = worker.loop.spent_ns["arrive"] / 1e6 / STEPS
    copies = decode_copies(daemon)
    assert tokens == expected_wide.tokens(prompt, STEPS, policy="infinigen", retriever="exact", budget=0.1)
    assert len(copies) == STEPS * 3, "one ticket for each offloaded layer and step"
    spans = [(layers[step, layer - 1], copy) for (step, layer), copy in copies.items()]
    assert all(before[0] <= copy[0] for before, copy in spans), "no ticket is seen before its layer begins"
    share = sum(copy[1] <= wanted_at[at] for at, copy in copies.items()) / len(spans)
    typical_ms = sorted(end - start for start, end in layers.values())[len(layers) // 2] / 1e6
    print(f"a layer takes {typical_ms:.2f} ms; {share:.0%} of copies end in time; waits {waited_ms:.2f} ms a step")
    assert share >= 0.5, f"load {os.getloadavg()}"


def decode_copies(daemon: Daemon) -> dict[tuple[int, int], Span]:
    """(step, layer) -> (seen, done) in ns, of the decode ring's tickets."""
    rows: Sequence[list[int]] = daemon.drain_trace()
    decode = [row for row in rows if row[0] & 0xFFFF == 0]
    assert all(seen <= first <= done for _, _, _, seen, first, done in decode)
    return {(where >> 16, where & 0xFFFF): (seen, done) for _, _, where, seen, _, done in decode}
