"""Sampling: greedy, the kept sets, the distribution, and reproducibility by seed."""

import pytest
import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from decode_worker.model.sampling import GREEDY, Sampling, next_tokens


def random_logits(rows: int, vocab: int = 50, seed: int = 0) -> Tensor:
    return 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def draw(logits: Tensor, sampling: Sampling, count: int) -> list[int]:
    """At so many positions of one sequence."""
    return [token for position in range(count) for token in next_tokens([sampling], [position], logits)]


def test_temperature_zero_is_greedy() -> None:
    logits = random_logits(5)
    assert next_tokens([GREEDY] * 5, range(5), logits) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("sampling", [Sampling(1e-6), Sampling(1.0, top_k=1), Sampling(1.0, 1e-9)])
def test_limits_are_greedy(sampling: Sampling) -> None:
    logits = random_logits(1)
    assert set(draw(logits, sampling, 20)) == {int(logits.argmax())}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.7, top_k=7),
        Sampling(1.3, top_p=0.8),
        Sampling(1.5, top_p=0.9, top_k=12),
        Sampling(1.0, top_k=1000),
    ],
)
def test_frequencies_follow_the_warped_distribution_of_transformers(sampling: Sampling) -> None:
    logits = random_logits(1)
    warped = TemperatureLogitsWarper(sampling.temperature)(None, logits.clone())
    if sampling.top_k:
        warped = TopKLogitsWarper(sampling.top_k)(None, warped)
    if sampling.top_p < 1:
        warped = TopPLogitsWarper(sampling.top_p)(None, warped)
    expected = warped.softmax(-1)[0]

    count = 8000
    found = torch.bincount(torch.tensor(draw(logits, sampling, count)), minlength=50) / count
    assert (found[expected == 0] == 0).all()
    assert (found - expected).abs().max() < 5 * (0.25 / count) ** 0.5


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (1 - 2**-53, 3)])
@pytest.mark.parametrize("top_p", [1.0, 0.999])
def test_a_token_of_no_probability_is_never_drawn(
    top_p: float, uniform: float, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sampling, "uniform", lambda self, position: uniform)
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, 0.0, -torch.inf]])
    assert draw(logits, Sampling(1.0, top_p=top_p), 1) == [token]


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(1.0, top_k=1), {1}),
        (Sampling(1.0, top_k=2), {1, 3}),
        (Sampling(1.0, top_k=3), {0, 1, 3}),
        (Sampling(1.0, top_k=4), {0, 1, 2, 3}),
        (Sampling(1.0, top_p=0.249), {1}),
        (Sampling(1.0, top_p=0.499), {1, 3}),
        (Sampling(1.0, top_p=0.501), {0, 1, 3}),
        (Sampling(1.0, top_p=0.499, top_k=2), {1}),
        (Sampling(1e30, top_k=2), {1, 3}),
    ],
)
def test_of_equally_likely_tokens_the_lower_ids_are_kept(sampling: Sampling, kept: set[int]) -> None:
    """Probabilities 1/8, 1/4, 1/8, 1/4, 1/8, 1/8."""
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 1.0]]).log()
    assert set(draw(logits, sampling, 100)) == kept


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 1), (0.25 + 2**-40, 2), (0.5, 2), (0.75, 3), (1 - 2**-40, 4)])
def test_the_fewest_that_reach_top_p_exactly(top_p: float, kept: int) -> None:
    assert set(draw(torch.full((1, 4), 3.5), Sampling(1.0, top_p=top_p), 100)) == set(range(kept))


def test_numbers_are_uniform_and_streams_are_not_alike() -> None:
    drawn = torch.tensor(
        [[Sampling(1.0, seed=seed).uniform(position) for position in range(500)] for seed in range(20)]
    )
    assert ((drawn >= 0) & (drawn < 1)).all()
    counts = torch.histc(drawn, 20, 0, 1)
    assert (counts - 500).abs().max() < 5 * 500**0.5
    correlations = torch.corrcoef(drawn)
    assert (correlations - torch.eye(20)).abs().max() < 5 / 500**0.5
    assert torch.corrcoef(torch.stack([drawn[:, 1:].flatten(), drawn[:, :-1].flatten()]))[0, 1].abs() < 5 / 10000**0.5


def test_a_sequence_depends_on_its_seed_and_not_on_its_neighbours() -> None:
    steps = [random_logits(3, seed=step) for step in range(12)]
    sampling = Sampling(1.0, top_p=0.95, seed=5)

    def second_row(neighbours: list[Sampling], own: Sampling = sampling) -> list[int | None]:
        samplings = [neighbours[0], own, neighbours[1]]
        return [next_tokens(samplings, [7, at, 2 * at], logits)[1] for at, logits in enumerate(steps)]

    first = second_row([Sampling(), Sampling(1.0, seed=1)])
    assert second_row([Sampling(2.0, seed=9), Sampling(1.0, top_k=3)]) == first
    assert second_row([Sampling(), Sampling()], Sampling(1.0, top_p=0.95, seed=6)) != first
    assert [token for at, logits in enumerate(steps) for token in next_tokens([sampling], [at], logits[1:2])] == first


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_k": -1}, "top_k is -1"),
    ],
)
def test_values_out_of_range(values: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Sampling(**values)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_logits_are_one_rows_matter(bad: float) -> None:
    logits = random_logits(3)
    logits[1, 3] = bad
    best = logits.argmax(-1).tolist()
    assert next_tokens([GREEDY, Sampling(1.0), GREEDY], [0, 0, 0], logits) == [best[0], None, best[2]]
