"""The fast causal attention equals the plain one on random shapes; what is told of it is causal too."""

import random
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from decode_worker.engine.prefill import Prefill
from decode_worker.model.attention import causal_attention


def plain_attention(q: Tensor, k: Tensor, v: Tensor, first: int, scale: float) -> Tensor:
    """Softmax over a masked score matrix in float64."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), *(t.double().repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    visible = torch.ones(len(q), len(k), dtype=torch.bool).tril(first)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v)


@pytest.mark.parametrize("seed", range(24))
def test_equals_plain_attention(seed: int) -> None:
    choose = random.Random(seed)
    count, first = choose.choice([1, 2, 17, 64, 200]), choose.choice([0, 1, 63, 500, 1300])
    kv_heads, group = choose.choice([1, 2, 3]), choose.choice([1, 2, 4])
    d, dtype = choose.choice([64, 96, 128]), choose.choice([torch.float32, torch.bfloat16])
    generator = torch.Generator().manual_seed(seed)

    def rows(length: int, heads: int) -> Tensor:
        # Rows further apart than their width, as the slices of a fused projection are.
        return torch.randn(length, heads + 1, d, generator=generator).to(dtype)[:, :heads]

    q, k, v = rows(count, kv_heads * group), rows(first + count, kv_heads), None
    v = rows(first + count, kv_heads)
    scale = 2.0 * d**-0.5
    found = causal_attention(q, k, v, first, scale)
    assert found.shape == q.shape
    assert found.dtype == dtype
    error = (found - plain_attention(q, k, v, first, scale)).abs().max()
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    assert error <= limit, f"seed {seed}: {count=} {first=} {kv_heads=} {group=} {d=} {dtype=}"


def test_large_scores_do_not_overflow() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (40 * torch.randn(n, 2, 64, generator=generator) for n in (8, 40, 40))
    error = causal_attention(q, k, v, 32, 1.0) - plain_attention(q, k, v, 32, 1.0)
    assert error.abs().max() < 1e-2


def test_key_count_must_match_the_position() -> None:
    q, k = torch.zeros(2, 2, 64), torch.zeros(5, 1, 64)
    with pytest.raises(ValueError, match="both must be 6"):
        causal_attention(q, k, k, 4, 1.0)


def test_importance_is_what_the_last_queries_give_to_tokens_before_them() -> None:
    count, tokens, kv_heads, group, d, scale = 5, 40, 2, 3, 8, 0.3
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(count, kv_heads * group, d, generator=generator)
    k = torch.randn(tokens, kv_heads, d, generator=generator)
    expected = torch.zeros(kv_heads, tokens, dtype=torch.float64)
    for i in range(count):
        seen = tokens - count + i + 1
        for j in range(kv_heads * group):
            scores = scale * k[:seen, j // group].double() @ q[i, j].double()
            expected[j // group, :seen] += scores.softmax(0)
    found = Prefill._importance(SimpleNamespace(_model=SimpleNamespace(scale=scale)), q, k)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)
