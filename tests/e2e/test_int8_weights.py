"""Steps that multiply with int8 weights: both kernel sets agree, near what float weights make and not equal to it."""

import pytest
import torch

from .conftest import EngineFactory, random_ids

STEPS = 5


def logits(engine: EngineFactory, ids: list[int], **settings: str) -> torch.Tensor:
    worker = engine(policy="full", **settings)
    session, first = worker.prefill(ids)
    rows = [first, *(worker.step([session], [token])[0] for token in ids[:STEPS])]
    worker.close_session(session)
    return torch.stack(rows)


@pytest.mark.timeout(90)
def test_sets_agree_on_int8_weights(engine: EngineFactory) -> None:
    ids = random_ids(300, 91)
    plain, cpu, reference = (
        logits(engine, ids, **settings)
        for settings in ({}, {"weights": "int8"}, {"weights": "int8", "kernels": "reference"})
    )
    torch.testing.assert_close(cpu, reference, atol=1e-3, rtol=1e-3)
    assert torch.equal(plain[0], cpu[0]), "prefill computes with the float weights"
    assert 1e-3 < (plain - cpu)[1:].abs().max() < 0.2 * plain.std()
