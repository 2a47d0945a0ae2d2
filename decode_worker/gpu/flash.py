"""FlashInfer's part of a layer on a GPU: norms, rotation, SiLU, and attention of a prefill.

Which of them a worker takes: flash_choice.py.

None of the calls that a step makes allocates or waits: results go to tensors that torch has made, which within a
capture belong to the graph. Programmatic dependent launch stays off: nothing of a step may begin before what it stands
behind has ended.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from decode_worker.model.config import ModelConfig
from decode_worker.model.operations import Operations
from decode_worker.model.rope import RopeConfig

DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)  # that rotation and attention are written for
VECTOR_BYTES = 16  # that a thread takes at a time
NAMES = tuple(field.name for field in fields(Operations))


def flash_operations(library: Any, config: ModelConfig, declared_max: int, device: torch.device) -> Operations:
    """library: the module. All of them, also those that are `unsupported`."""
    flash = _Flash(library, config, declared_max, device)
    return Operations(**{name: getattr(flash, name) for name in NAMES})


def unsupported(config: ModelConfig, dtype: torch.dtype) -> dict[str, str]:
    """Operations that FlashInfer does not have for such a model -> why."""
    if dtype not in DTYPES:
        return dict.fromkeys(NAMES, f"it has no {dtype}; give --compute bfloat16")
    lacking: dict[str, str] = {}
    if config.head_dim not in HEAD_DIMS:
        why = f"heads of {config.head_dim} are not of {', '.join(map(str, HEAD_DIMS))}"
        lacking |= dict.fromkeys(("rotate", "attention"), why)
    elif config.q_heads < 2:
        lacking["rotate"] = "one query head"
    elif config.rope.rotary_dim % (2 * _rotated_at_a_time(config.head_dim, dtype)):
        lacking["rotate"] = f"{config.rope.rotary_dim} rotated elements are not whole vectors"
    if config.ffn * dtype.itemsize % VECTOR_BYTES:
        lacking["silu_mul"] = f"{config.ffn} columns are not whole vectors"
    return lacking


def _rotated_at_a_time(head_dim: int, dtype: torch.dtype) -> int:
    return max(VECTOR_BYTES // dtype.itemsize, head_dim // 32)


class _Flash:
    """Only calls and arguments that 0.6.7 and 0.7.2 both know."""

    def __init__(self, library: Any, config: ModelConfig, declared_max: int, device: torch.device) -> None:
        self._library = library
        self._eps = config.norm_eps
        self._q_heads, self._head_dim = config.q_heads, config.head_dim
        self._table = _table(config.rope, declared_max, device)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self._library.rmsnorm(x, weight, self._eps, out=out, enable_pdl=False)
        return out

    def add_norm(self, x: Tensor, more: Tensor, weight: Tensor) -> Tensor:
        self._library.fused_add_rmsnorm(more, x, weight, self._eps, enable_pdl=False)
        return more

    def norm_heads(self, heads: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
        for part in (slice(0, self._q_heads), slice(self._q_heads, heads.shape[1])):
            if part.start < part.stop:
                self._library.rmsnorm(heads[:, part], weight[part.start], self._eps, out=out[:, part], enable_pdl=False)
        return out

    def rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        """The library wants queries and keys, and turns both alike: the last head is the keys here."""
        first, last = heads[:, :-1].view(len(heads), -1), heads[:, -1]
        self._library.apply_rope_with_cos_sin_cache_inplace(
            positions, first, last, self._head_dim, self._table, is_neox=True
        )
        return heads

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        self._library.silu_and_mul(gate_up, out=out, enable_pdl=False)
        return out

    def attention(self, q: Tensor, k: Tensor, v: Tensor, first: int, scale: float) -> Tensor:
        """`first` follows from the lengths: the last query sees all keys, the one before it all but the last."""
        attended: Tensor = self._library.single_prefill_with_kv_cache(q, k, v, causal=True, sm_scale=scale)
        return attended


def _table(rope: RopeConfig, declared_max: int, device: torch.device) -> Tensor:
    """cos of every pair, then sin, float32 [declared_max, rotary_dim], as rope.RotaryTable has them."""
    angles = torch.arange(declared_max, dtype=torch.float32)[:, None] * rope.inverse_frequencies(declared_max)
    return (torch.cat((angles.cos(), angles.sin()), -1) * rope.attention_factor).to(device)
