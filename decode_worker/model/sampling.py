"""Choice of the next token from logits: greedy or sampled, reproducible by seed.

Probabilities are whole numbers, parts of the likeliest token's: sums of them are exact, whatever the order in which a
device adds. And a draw depends on the seed and the token's position alone, so that no stream has to be kept in step
with a device. What differs between devices is the last bit of exp: a draw within 2**-44 of the bound of two tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ONE = 1 << 44  # the likeliest token's weight: those of 2**18 tokens fit 63 bits
GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64 (Steele, Lea, Flood 2014)
FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Sampling:
    """How one sequence chooses tokens; temperature 0 is greedy and ignores the other fields.

    ``top_k`` keeps the k likeliest tokens (0: all), then ``top_p`` the fewest of these whose
    probabilities reach p (1: all); of equally likely ones the lower ids. Raises ValueError for values out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or a finite number above")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be in (0, 1], 1 keeps all tokens")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 0, 0 keeps all tokens")

    @property
    def stream(self) -> int:
        """Where the seed's numbers begin, 64 bits."""
        return _mixed(self.seed + GOLDEN & _WORD)

    def uniform(self, position: int) -> float:
        """In [0, 1): what draws the token at this position of its sequence."""
        return (_mixed(self.stream + (position + 1) * GOLDEN & _WORD) >> 11) * 2.0**-53


GREEDY = Sampling()


def next_tokens(samplings: Sequence[Sampling], positions: Sequence[int], logits: Tensor) -> list[int | None]:
    """The token of each sequence at its position, from logits float32 [B, vocab]; None where they are not numbers."""
    highest, likeliest = logits.max(-1)
    rows = zip(samplings, positions, logits, highest.tolist(), likeliest.tolist(), strict=True)
    return [_choose(*row) if math.isfinite(row[3]) else None for row in rows]


def _choose(sampling: Sampling, position: int, logits: Tensor, highest: float, likeliest: int) -> int:
    """logits [vocab], of which token `likeliest` has the `highest`."""
    if sampling.temperature == 0:
        return likeliest
    weights = (((logits.double() - highest) / sampling.temperature).exp() * ONE).long()
    if 0 < sampling.top_k < len(logits):
        weights[~_likeliest(logits, sampling.top_k)] = 0
    if sampling.top_p < 1:
        weights[_beyond(logits, weights, sampling.top_p)] = 0
    cumulative = weights.cumsum(0)
    total = int(cumulative[-1])
    drawn = min(int(sampling.uniform(position) * float(total)), total - 1)
    return int(torch.searchsorted(cumulative, drawn, right=True))


def _likeliest(logits: Tensor, k: int) -> Tensor:
    """bool [vocab]: the k highest."""
    least = logits.topk(k).values[-1]
    kept = logits > least
    ties = (logits == least).nonzero().flatten()
    kept[ties[: k - int(kept.sum())]] = True
    return kept


def _beyond(logits: Tensor, weights: Tensor, top_p: float) -> Tensor:
    """Ids of weight that the likeliest ones which reach top_p do without."""
    ids = weights.nonzero().flatten()
    ids = ids[logits[ids].argsort(descending=True, stable=True)]
    cumulative = weights[ids].cumsum(0)
    total = int(cumulative[-1])
    reached = min(math.ceil(top_p * float(total)), total)
    return ids[int(torch.searchsorted(cumulative, reached)) + 1 :]


def _mixed(word: int) -> int:
    word = (word ^ word >> 30) * FACTORS[0] & _WORD
    word = (word ^ word >> 27) * FACTORS[1] & _WORD
    return word ^ word >> 31
