"""FlashInfer for machines without a GPU: its functions by their signatures of 0.6.7, computed by torch's own operations
rounded like them, which assert what the library demands of its arguments. Every call is counted.

`DTYPES` are the library's; a test may have it compute others."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu
from torch.utils._python_dispatch import _get_current_dispatch_mode

from decode_worker.model.attention import causal_attention
from decode_worker.model.rope import apply

__version__ = "0.6.7"
DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
calls: Counter[str] = Counter()


def rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    calls["rmsnorm"] += 1
    assert out is not None, "it would allocate"
    assert input.dim() in (2, 3)
    assert weight.shape == input.shape[-1:]
    assert out.shape == input.shape
    _check(input, weight, out)
    out.copy_(rms_norm(input, weight.shape, None, eps) * weight if input.dim() == 3 else _norm(input, weight, eps))
    return out


def fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    calls["fused_add_rmsnorm"] += 1
    assert input.dim() == 2
    assert input.shape == residual.shape
    assert weight.shape == input.shape[-1:]
    _check(input, residual, weight)
    residual.add_(input)
    input.copy_(_norm(residual, weight, eps))


def silu_and_mul(input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    calls["silu_and_mul"] += 1
    assert out is not None, "it would allocate"
    assert out.shape == (*input.shape[:-1], input.shape[-1] // 2)
    assert input.is_contiguous()
    assert out.is_contiguous()
    assert out.shape[-1] * out.element_size() % 16 == 0
    _check(input, out)
    gate, up = input.chunk(2, -1)
    out.copy_(silu(gate) * up)
    return out


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True
) -> None:
    calls["apply_rope_with_cos_sin_cache_inplace"] += 1
    assert positions.dtype in (torch.int32, torch.int64)
    assert positions.is_contiguous()
    assert cos_sin_cache.dtype == torch.float32
    assert cos_sin_cache.is_contiguous()
    rotary, vector = cos_sin_cache.shape[1], max(16 // query.element_size(), head_size // 32)
    assert head_size in (64, 128, 256, 512)
    assert rotary <= head_size
    assert rotary // 2 % vector == 0
    assert is_neox, "the other kind is none of ours"
    _check(query, key)
    cos, sin = cos_sin_cache.index_select(0, positions).to(query.dtype)[:, None].chunk(2, -1)
    cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    for heads in (query.view(len(query), -1, head_size), key.view(len(key), -1, head_size)):
        assert heads.shape[1] > 0
        heads.copy_(apply(heads, cos, sin))


def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale_q: Tensor | None = None,
    scale_k: Tensor | None = None,
    scale_v: Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor:
    calls["single_prefill_with_kv_cache"] += 1
    assert _get_current_dispatch_mode() is None, "within a graph"
    assert q.shape[-1] in (64, 128, 256)
    assert k.shape == v.shape
    assert q.shape[1] % k.shape[1] == 0
    assert causal, "the other kind is none of ours"
    assert sm_scale is not None
    _check(q, k, v)
    return causal_attention(q, k, v, len(k) - len(q), sm_scale)


FUNCTIONS = (
    rmsnorm, fused_add_rmsnorm, silu_and_mul, apply_rope_with_cos_sin_cache_inplace, single_prefill_with_kv_cache
)  # fmt: skip


def _check(*tensors: Tensor) -> None:
    """One type that it has, one device, and whole vectors in memory."""
    first = tensors[0]
    assert first.dtype in DTYPES
    for each in tensors:
        assert (each.dtype, each.device) == (first.dtype, first.device)
        assert each.stride(-1) == 1
        assert each.data_ptr() % 16 == 0
        assert all(stride * each.element_size() % 16 == 0 for stride in each.stride()[:-1])


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x, weight.shape, weight, eps)
