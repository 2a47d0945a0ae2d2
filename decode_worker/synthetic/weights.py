"""Random weights that are drawn where they are used: those of a large model would be a large file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from decode_worker.model.checkpoint import Checkpoint, LayerWeights, Weights
from decode_worker.model.config import ModelConfig
from decode_worker.model.json_object import JsonObject, canonical_json
from decode_worker.synthetic.checkpoint import BIAS_SCALE, WEIGHT_SCALE, Shape, describe


@dataclass(frozen=True)
class DrawnCheckpoint(Checkpoint):
    """A checkpoint without tensors in files. Equal seeds give equal weights on devices of one kind."""

    directory: Path  # of config.json and tokenizer.json
    seed: int

    @classmethod
    def of(cls, directory: Path, shape: Shape, seed: int) -> DrawnCheckpoint:
        """Writes config.json and tokenizer.json."""
        describe(directory, shape)
        raw = JsonObject.read(directory / "config.json")
        digest = hashlib.sha256(canonical_json(raw.values)).hexdigest()
        return cls(ModelConfig.parse(raw), digest, {}, directory, seed)

    @cached_property
    def weights_digest(self) -> str:
        return hashlib.sha256(f"drawn {self.seed}".encode()).hexdigest()

    def weights(self, dtype: torch.dtype, device: torch.device) -> Weights:
        """Layer by layer, in `dtype` from the start."""
        config, draw = self.config, _Draw(self.seed, dtype, device)
        embedding = draw.matrix(config.vocab, config.hidden)
        return Weights(
            embedding=embedding,
            layers=tuple(_layers(config, draw)),
            final_norm=draw.ones(config.hidden),
            head=draw.matrix(config.vocab, config.hidden),
        )


class _Draw:
    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._place = {"dtype": dtype, "device": device}
        self._generator = torch.Generator(device).manual_seed(seed)

    def ones(self, size: int) -> Tensor:
        return torch.ones(size, **self._place)  # type: ignore[call-overload]

    def matrix(self, rows: int, columns: int) -> Tensor:
        return self._normal((rows, columns), WEIGHT_SCALE * columns**-0.5)

    def bias(self, size: int) -> Tensor:
        return self._normal((size,), BIAS_SCALE)

    def _normal(self, size: tuple[int, ...], scale: float) -> Tensor:
        return torch.empty(size, **self._place).normal_(0, scale, generator=self._generator)  # type: ignore[call-overload]


def _layers(config: ModelConfig, draw: _Draw) -> Iterator[LayerWeights]:
    q, kv = config.q_heads * config.head_dim, config.kv_heads * config.head_dim
    for _ in range(config.layers):
        yield LayerWeights(
            attention_norm=draw.ones(config.hidden),
            qkv=draw.matrix(q + 2 * kv, config.hidden),
            qkv_bias=draw.bias(q + 2 * kv) if config.qkv_bias else None,
            q_norm=None,
            k_norm=None,
            output=draw.matrix(config.hidden, q),
            output_bias=None,
            mlp_norm=draw.ones(config.hidden),
            gate_up=draw.matrix(2 * config.ffn, config.hidden),
            gate_up_bias=None,
            down=draw.matrix(config.hidden, config.ffn),
            down_bias=None,
        )
