"""The contract of the products: all of a decode step but attention and the choice of what it attends to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from decode_worker.kernels.registry import Registry
from decode_worker.model.transformer import Transformer

WEIGHTS = ("compute", "int8")  # what the layers' matrices are multiplied as


class Products(ABC):
    """Fixed tensors for `batch` rows, on the model's device, and calls that work on the first `rows` of them. Not
    thread-safe.

    A step says whose turn it is by `place`, or writes `tokens` and `positions` itself, then calls embed; for each layer
    in order `layer`, and, before the next call, writes `attention`; then finish. Only these calls change `query`,
    `key`, `value`, `next_query` and `logits`, which stay valid until the next one.

        tokens, positions        int64 [batch]
        query, next_query        float32 [batch, q_heads, d]
        key, value               float32 [batch, kv_heads, d]
        attention                float32 [batch, q_heads, d]
        logits                   float32 [batch, vocab]
    """

    def __init__(self, model: Transformer, batch: int) -> None:
        config, device = model.config, model.device
        self._vocab, self._declared_max = config.vocab, model.declared_max
        query, key = (batch, config.q_heads, config.head_dim), (batch, config.kv_heads, config.head_dim)
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        self.positions = torch.zeros(batch, dtype=torch.int64, device=device)
        self.query, self.next_query, self.attention = torch.zeros(3, *query, device=device).unbind()
        self.key, self.value = torch.zeros(2, *key, device=device).unbind()
        self.logits = torch.zeros(batch, config.vocab, device=device)

    def check(self, tokens: Sequence[int], positions: Sequence[int]) -> None:
        """IndexError for a token that the model lacks or a position that is not below its declared maximum: a device
        could not say so."""
        for what, values, end in (("token", tokens, self._vocab), ("position", positions, self._declared_max)):
            if not 0 <= min(values) <= max(values) < end:
                raise IndexError(f"{what} {min(values) if min(values) < 0 else max(values)} is not in [0, {end})")

    def place(self, tokens: Sequence[int], positions: Sequence[int]) -> None:
        """The first rows' tokens and their positions, as `check` wants them."""
        self.check(tokens, positions)
        self.tokens[: len(tokens)] = torch.tensor(tokens)
        self.positions[: len(positions)] = torch.tensor(positions)

    @abstractmethod
    def embed(self, rows: int) -> None:
        """Takes `tokens` and `positions`."""

    @abstractmethod
    def layer(self, layer: int, rows: int, speculate: bool) -> None:
        """Ends `layer` - 1, if there is one, from `attention`; then `query`, `key` and `value` of this layer.

        `speculate`: also `next_query`, the next layer's query from this layer's input (nothing at the last layer)."""

    @abstractmethod
    def peek(self, layer: int, rows: int) -> None:
        """`next_query`: the query of a layer further on, from the input of the one whose products were made last."""

    @abstractmethod
    def finish(self, rows: int) -> None:
        """Ends the last layer from `attention`; then `logits`."""


# model, batch, threads, weights
PRODUCTS: Registry[Callable[[Transformer, int, int, str], Products]] = Registry("kernels")
