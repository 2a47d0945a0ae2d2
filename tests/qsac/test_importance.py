"""What the last queries of a prompt attend to, as grades of blocks: against plain NumPy, in every order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decode_worker.importance import GRADES, HOT_FRACTION, IMPORTANCES, SHARES, grades

HEADS = 3


@pytest.fixture(params=range(3))
def generator(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(request.param)


@pytest.mark.parametrize("name", ["head", "position"])
@pytest.mark.parametrize("tokens", [7, 256, 1000])
def test_hot_tokens_are_the_most_attended_ones(generator: np.random.Generator, name: str, tokens: int) -> None:
    mass = generator.random((HEADS, tokens)).astype(np.float32) ** 4
    found = IMPORTANCES[name].hot(torch.from_numpy(mass))
    scores = mass if name == "head" else np.tile(mass.sum(0), (HEADS, 1))
    count = max(1, int(tokens * HOT_FRACTION))
    assert found.sum(1).tolist() == [count] * HEADS
    for head in range(HEADS):
        assert set(np.flatnonzero(found[head])) == set(np.argsort(scores[head])[-count:])


@pytest.mark.parametrize("name", ["hint", "none"])
def test_the_others_grade_nothing(name: str) -> None:
    assert IMPORTANCES[name].hot(torch.rand(HEADS, 256)) is None


@pytest.mark.parametrize("per_block", [1, 8, 10, 64])
@pytest.mark.parametrize("tokens", [256, 768])
def test_a_grade_is_of_the_records_of_its_block(generator: np.random.Generator, per_block: int, tokens: int) -> None:
    hot = generator.random((HEADS, tokens)) < generator.choice([0.05, 0.3, 0.7], (HEADS, 1))
    order = np.stack([generator.permutation(tokens) for _ in range(HEADS)]).astype(np.uint16)
    found = grades(hot, order, per_block)
    assert found.dtype == np.uint8
    assert found.shape == (HEADS, -(-tokens // per_block))
    for head, block in np.ndindex(found.shape):
        inside = order[head, block * per_block : (block + 1) * per_block]
        share = sum(bool(hot[head, token]) for token in inside) / per_block
        assert found[head, block] == GRADES[sum(share > least for least in SHARES)]
