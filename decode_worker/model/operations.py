"""What a layer computes between its matrix products: torch has all of it, a device may have it faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from decode_worker.model import rope
from decode_worker.model.attention import causal_attention
from decode_worker.model.config import ModelConfig


@dataclass(frozen=True)
class Operations:
    """Of one model in one dtype, on the device of their arguments, for T rows.

    norm(x, weight)             x [T, hidden], weight [hidden] -> x / rms(x) * weight
    add_norm(x, more, weight)   x += more; then norm(x, weight). `more` [T, hidden] is used up
    norm_heads(heads, weight)   each of heads [T, H, d], H query heads or these and the key heads, by its row of
                                weight [H, d]; rows of one kind are equal
    rotate(heads, positions)    RoPE at positions int64 [T]; `heads` is used up
    silu_mul(gate_up)           [T, 2 ffn] -> silu(its first half) * its second half, [T, ffn]; `gate_up` is used up
    attention(q, k, v, first, scale)   of a prefill chunk, as model/attention.py; never within a graph
    """

    norm: Callable[[Tensor, Tensor], Tensor]
    add_norm: Callable[[Tensor, Tensor, Tensor], Tensor]
    norm_heads: Callable[[Tensor, Tensor], Tensor]
    rotate: Callable[[Tensor, Tensor], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    attention: Callable[[Tensor, Tensor, Tensor, int, float], Tensor]


def torch_operations(config: ModelConfig, declared_max: int, dtype: torch.dtype, device: torch.device) -> Operations:
    """The reference, on any device."""
    eps, table = config.norm_eps, rope.RotaryTable(config.rope, declared_max, dtype, device)
    return Operations(
        norm=partial(_norm, eps=eps),
        add_norm=lambda x, more, weight: _norm(x.add_(more), weight, eps),
        norm_heads=lambda heads, weight: _norm(heads, None, eps) * weight,
        rotate=lambda heads, positions: rope.apply(heads, *table.cos_sin(positions)),
        silu_mul=_silu_mul,
        attention=causal_attention,
    )


def _norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
