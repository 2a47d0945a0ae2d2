"""Matrices as int8 with one scale per output: a quarter or half of the bytes that a step reads."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from decode_worker.model.checkpoint import LayerWeights, Weights

LARGEST = 127
MATRICES = ("qkv", "output", "gate_up", "down")


def quantised(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix [out, in] as int8 [out, in] and float32 scales [out]: matrix ~ int8 * scale, symmetric about zero."""
    rows = matrix.float()
    scales = rows.abs().amax(1) / LARGEST
    whole = (rows / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round_()
    return whole.to(torch.int8), scales


def rounded(weights: Weights) -> Weights:
    """The same weights with the layers' matrices as int8 represents them; embedding and head stay."""

    def round_layer(layer: LayerWeights) -> LayerWeights:
        def round_matrix(matrix: Tensor) -> Tensor:
            whole, scales = quantised(matrix)
            return (whole * scales[:, None]).to(matrix.dtype)

        return replace(layer, **{name: round_matrix(getattr(layer, name)) for name in MATRICES})

    return replace(weights, layers=tuple(map(round_layer, weights.layers)))
