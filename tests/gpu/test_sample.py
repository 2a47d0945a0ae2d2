"""Tokens that kernels choose: those of decode_worker/model/sampling.py, for the same logits."""

import numpy as np
import pytest
import torch

from decode_worker.gpu.ends import NOBODY, words_of
from decode_worker.gpu.kernels import sample as sample_module
from decode_worker.gpu.kernels.begin import ROW_FIELDS
from decode_worker.gpu.kernels.sample import Sampled, sample
from decode_worker.kernels.ends import Row
from decode_worker.model.sampling import GREEDY, Sampling, next_tokens

from .interleave import interleaved


def chosen(logits: torch.Tensor, samplings: list[Sampling], positions: list[int], padding: int = 1) -> list[int | None]:
    """Rows behind those of `samplings` are nobody's."""
    rows = [Row(i, 0, at, sampling) for i, (sampling, at) in enumerate(zip(samplings, positions, strict=True))]
    rows += [NOBODY] * padding
    held = torch.tensor([words_of(row) for row in rows]).T.contiguous()
    assert held.shape == (len(ROW_FIELDS), len(rows))
    everything = torch.full((len(rows), logits.shape[1]), torch.nan)
    everything[: len(samplings)] = logits
    sampled = Sampled(len(rows), logits.shape[1], torch.device("cpu"))
    sampled.token[-padding:] = -7
    sample(held, everything, len(rows), sampled)
    assert sampled.token[-padding:].tolist() == [-7] * padding
    assert not sampled.ended.any()
    fine, tokens = sampled.finite.tolist(), sampled.token.tolist()
    return [token if finite else None for token, finite, _ in zip(tokens, fine, samplings, strict=False)]


def right(logits: torch.Tensor, samplings: list[Sampling], positions: list[int]) -> list[int | None]:
    """Positions are those of the tokens that a step has processed."""
    return next_tokens(samplings, [at + 1 for at in positions], logits)


def random_sampling(rng: np.random.Generator, vocab: int) -> Sampling:
    return Sampling(
        float(rng.choice([0, 1e-6, 0.3, 1, 2, 1e9])),
        float(rng.choice([1, 0.999, 0.9, 0.5, 1e-9])),
        int(rng.choice([0, 1, 2, 40, vocab - 1, vocab, 1 << 80])),
        int(rng.integers(-(1 << 63), 1 << 63)),
    )


@pytest.mark.parametrize("grain", [0.0, 0.5, 4.0], ids=["any", "ties", "many-ties"])
@pytest.mark.parametrize("vocab", [2, 97, 2051])
def test_tokens_are_the_reference_s(rng, monkeypatch, vocab, grain):
    monkeypatch.setattr(sample_module, "PART", 256)
    monkeypatch.setattr(sample_module, "BLOCK", 1024)
    logits = torch.from_numpy(rng.normal(-2, 5, (4, vocab)).astype(np.float32))
    if grain:
        logits = (logits / grain).round() * grain  # -0.0 among them
    logits[0, rng.random(vocab) < 0.3] = -torch.inf
    logits[0, -1] = 1.0
    samplings, positions = [random_sampling(rng, vocab) for _ in range(4)], rng.integers(0, 1 << 31, 4).tolist()
    assert chosen(logits, samplings, positions) == right(logits, samplings, positions)


def test_a_vocabulary_of_a_real_size(rng):
    vocab = 100_003
    logits = torch.from_numpy(rng.normal(0, 3, (2, vocab)).astype(np.float32))
    samplings = [GREEDY, Sampling(0.8, 0.95, 50, 1)]
    assert chosen(logits, samplings, [5, 6]) == right(logits, samplings, [5, 6])


def test_settings_that_are_whole_numbers_count_as_they_are(rng):
    logits = torch.from_numpy(rng.normal(0, 3, (20, 50)).astype(np.float32))
    samplings, positions = [Sampling(1, 1, seed=seed) for seed in range(20)], list(range(20))
    assert chosen(logits, samplings, positions) == right(logits, samplings, positions)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(1.0, top_k=3), {0, 1, 3}),
        (Sampling(1.0, top_p=0.501), {0, 1, 3}),
        (Sampling(1.0, top_p=0.499, top_k=2), {1}),
        (Sampling(1e30, top_k=2), {1, 3}),
    ],
)
def test_of_equally_likely_tokens_the_lower_ids_are_kept(sampling, kept):
    """Probabilities 1/8, 1/4, 1/8, 1/4, 1/8, 1/8."""
    rows = list(range(12))
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 1.0]]).log().expand(len(rows), -1)
    found = chosen(logits, [sampling] * len(rows), rows)
    assert found == right(logits, [sampling] * len(rows), rows)
    assert set(found) == kept


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 2), (0.5 + 2**-40, 3)])
def test_the_fewest_that_reach_top_p_exactly(top_p, kept):
    rows = list(range(12))
    found = chosen(torch.full((len(rows), 4), 3.5), [Sampling(1.0, top_p=top_p)] * len(rows), rows)
    assert set(found) == set(range(kept))


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.5, 2), (0.5 - 2**-53, 1), (1 - 2**-53, 2)])
def test_a_draw_falls_on_the_token_whose_part_holds_it(monkeypatch, uniform, token):
    """Two equal halves, between tokens that have no part."""
    monkeypatch.setattr(sample_module, "uniform", lambda stream, position: uniform)
    monkeypatch.setattr(Sampling, "uniform", lambda self, position: uniform)
    logits = torch.tensor([[-torch.inf, 1.5, 1.5, -100.0]])
    assert right(logits, [Sampling(1.0)], [0]) == [token]
    assert chosen(logits, [Sampling(1.0)], [0]) == [token]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, 0.9, 3)], ids=["greedy", "drawn"])
def test_logits_that_are_no_numbers_are_one_row_s_matter(rng, monkeypatch, bad, sampling):
    monkeypatch.setattr(sample_module, "PART", 16)
    logits = torch.from_numpy(rng.normal(0, 3, (3, 50)).astype(np.float32))
    if bad == -torch.inf:
        logits[1] = bad
    else:
        logits[1, int(rng.integers(50))] = bad
    found = chosen(logits, [sampling] * 3, [0, 1, 2])
    assert found[1] is None
    assert found == right(logits, [sampling] * 3, [0, 1, 2])


def test_the_order_of_programs_changes_nothing(rng, monkeypatch):
    monkeypatch.setattr(sample_module, "PART", 16)
    logits = torch.from_numpy(rng.normal(0, 3, (2, 60)).astype(np.float32).round())
    samplings = [GREEDY, Sampling(1.0, 0.8, 9, 3)]
    with interleaved(int(rng.integers(2**31))) as ran:
        assert chosen(logits, samplings, [3, 4]) == right(logits, samplings, [3, 4])
    assert ran == ["look", "weigh", "draw"]
