"""Causal attention of a prefill chunk over all keys so far."""

import torch
from torch import Tensor


def causal_attention(q: Tensor, k: Tensor, v: Tensor, first: int, scale: float) -> Tensor:
    """Attention of q[T, Hq, d] at positions first .. first+T-1 over the keys 0 .. first+T-1.

    k and v are [first + T, Hkv, d] with Hq a multiple of Hkv; the result is [T, Hq, d] in q's
    dtype. Keys and values are neither repeated per query head nor copied, and scores exist only
    in blocks that fit the cache, so extra memory is a few times the size of q.
    """
    if len(k) != first + len(q) or len(v) != len(k):
        raise ValueError(
            f"{len(k)} keys and {len(v)} values for {len(q)} queries after {first} tokens; "
            f"both must be {first + len(q)}"
        )
    grouped = q.unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3)
    own, own_sums = _diagonal(grouped, k[first:], v[first:], scale)
    if first > 0:
        past, past_sums = _past(grouped, k[:first], v[:first], scale)
        # Both parts are normalised by their own sum of exponentials; sums are logarithms.
        share = torch.sigmoid(past_sums - own_sums).unsqueeze(-1)
        own = torch.lerp(own.float(), past.float(), share).to(q.dtype)
    return own.permute(2, 0, 1, 3).flatten(1, 2)


def _diagonal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q[Hkv, group, T, d] over the chunk's own k, v [T, Hkv, d] -> output, log-sum-exp."""
    group = q.shape[1]
    k, v = (t.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1) for t in (k, v))
    return _flash(q, k, v, True, scale)


def _past(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q[Hkv, group, T, d] over keys before the chunk, k, v [S, Hkv, d] -> output, log-sum-exp.

    Without a mask the queries of a group are just more rows: larger blocks, each key read once.
    """
    rows = q.flatten(1, 2).unsqueeze(0)
    k, v = (t.transpose(0, 1).unsqueeze(0) for t in (k, v))
    output, sums = _flash(rows, k, v, False, scale)
    return output.view(q.shape), sums.view(q.shape[:-1])


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The kernel below scaled_dot_product_attention, which also returns the log-sum-exp."""
    if q.is_cuda:  # for any dtype; it pads the sums
        output, sums, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, causal, scale=scale
        )
        return output, sums[..., : q.shape[-2]]
    output, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return output, sums
