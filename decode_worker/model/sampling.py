"""Choice of the next token from logits: greedy or sampled, reproducible by seed."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How one sequence chooses tokens; temperature 0 is greedy and ignores the other fields.

    ``top_k`` keeps the k likeliest tokens (0: all), then ``top_p`` the fewest of these whose
    probabilities reach p (1: all). Raises ValueError for values out of range.
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


class Sampler:
    """Chooses the tokens of one sequence, with a random stream of its own: they depend on its logits and its seed, not
    on its neighbours or the device."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._stream = random.Random(sampling.seed)

    def choose(self, logits: Tensor, highest: float, likeliest: int) -> int:
        """logits [vocab], of which token `likeliest` has the `highest`."""
        if self._sampling.temperature == 0:
            return likeliest
        return int(_draw(logits - highest, self._sampling, self._stream.random()))


def next_tokens(samplers: Sequence[Sampler], logits: Tensor) -> list[int | None]:
    """The token that each sequence goes on with, from logits [B, vocab]; None where they are not numbers."""
    highest, likeliest = logits.max(-1)
    rows = zip(samplers, logits, highest.tolist(), likeliest.tolist(), strict=True)
    return [sampler.choose(*row) if math.isfinite(row[1]) else None for sampler, *row in rows]


def _draw(logits: Tensor, sampling: Sampling, uniform: float) -> Tensor:
    """The token id [] whose part of the cumulative distribution holds ``uniform`` in [0, 1)."""
    scaled, ids = logits.double() / sampling.temperature, None
    if 0 < sampling.top_k < len(logits):
        scaled, ids = scaled.topk(sampling.top_k)
    elif sampling.top_p < 1:
        scaled, ids = scaled.sort(descending=True)
    cumulative = scaled.softmax(-1).cumsum(-1)
    if sampling.top_p < 1:
        kept = int(torch.searchsorted(cumulative, sampling.top_p)) + 1
        cumulative = cumulative[:kept]
    drawn = torch.searchsorted(cumulative, uniform * cumulative[-1], right=True)
    drawn = drawn.clamp(max=len(cumulative) - 1)
    return drawn if ids is None else ids[drawn]
