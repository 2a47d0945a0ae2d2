"""Sampling: greedy, the kept sets, the distribution, and reproducibility by seed."""

import pytest
import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from decode_worker.model import sampling as sampling_module
from decode_worker.model.sampling import Sampler, Sampling, next_tokens


def random_logits(rows: int, vocab: int = 50, seed: int = 0) -> Tensor:
    return 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def draw(logits: Tensor, sampling: Sampling, count: int) -> list[int]:
    sampler = Sampler(sampling)
    return [token for _ in range(count) for token in next_tokens([sampler], logits)]


def test_temperature_zero_is_greedy() -> None:
    logits = random_logits(5)
    assert next_tokens([Sampler(Sampling()) for _ in range(5)], logits) == logits.argmax(-1).tolist()


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


class Endpoints:
    """A random stream at the ends of [0, 1)."""

    def __init__(self, seed: int) -> None:
        self.values = [0.0, 1 - 2**-53]

    def random(self) -> float:
        return self.values.pop(0)


@pytest.mark.parametrize("top_p", [1.0, 0.999])
def test_a_token_of_no_probability_is_never_drawn(top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_module.random, "Random", Endpoints)
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, 0.0, -torch.inf]])
    assert draw(logits, Sampling(1.0, top_p=top_p), 2) == [1, 3]


def test_a_sequence_depends_on_its_seed_and_not_on_its_neighbours() -> None:
    steps = [random_logits(3, seed=step) for step in range(12)]
    sampling = Sampling(1.0, top_p=0.95, seed=5)

    def second_row(neighbours: list[Sampling], own: Sampling = sampling) -> list[int | None]:
        samplers = [Sampler(neighbours[0]), Sampler(own), Sampler(neighbours[1])]
        return [next_tokens(samplers, logits)[1] for logits in steps]

    first = second_row([Sampling(), Sampling(1.0, seed=1)])
    assert second_row([Sampling(2.0, seed=9), Sampling(1.0, top_k=3)]) == first
    assert second_row([Sampling(), Sampling()], Sampling(1.0, top_p=0.95, seed=6)) != first

    alone = Sampler(sampling)
    assert [token for logits in steps for token in next_tokens([alone], logits[1:2])] == first


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
    samplers = [Sampler(Sampling()), Sampler(Sampling(1.0)), Sampler(Sampling())]
    best = logits.argmax(-1).tolist()
    assert next_tokens(samplers, logits) == [best[0], None, best[2]]
