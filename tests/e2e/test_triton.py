"""The kernels for a GPU, interpreted, in an engine on a real daemon: the same tokens as the CPU's."""

import pytest
import torch

from tests.support.interpreter import bounded, patched_once

from .conftest import EngineFactory, random_ids

__all__ = ["bounded", "patched_once"]
STEPS = 4


@pytest.mark.timeout(200)
def test_an_engine_on_triton_kernels_says_what_one_on_the_cpus_says(
    engine: EngineFactory, bounded: None, patched_once: None
) -> None:
    prompt = random_ids(760, 95)
    results = []
    for kernels in ("cpu", "triton"):
        worker = engine(retriever="hash", kernels=kernels, recent=16, tail=400, slots=2, wait_ms=30_000, eta=0.1)
        session, logits = worker.prefill(prompt, growth=STEPS)
        seen = [logits]
        for _ in range(STEPS):
            seen.append(worker.step([session], [int(seen[-1].argmax())])[0])
        results.append((torch.stack(seen), worker.policy.counters))
        worker.close_session(session)
    (right, counted), (mine, counted_too) = results
    torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-3)
    assert mine.argmax(-1).tolist() == right.argmax(-1).tolist()
    assert counted_too == counted
    assert counted.records_moved > 0
    assert counted.hits > 0
