"""Attention in Triton, interpreted, against the reference set."""

import pytest
import torch

from decode_worker.gpu.kernels.attend import AttendScratch, attend

from .heads import Heads

TOLERANCE = {"float32": 2e-5, "bfloat16": 5e-5, "float16": 2e-5}


def attended(heads: Heads, layer: int, query: torch.Tensor, programs: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    shape, rows = heads.state.shape, heads.rows
    scratch = AttendScratch(rows.count, shape.heads, shape.group, shape.head_dim, torch.device("cpu"))
    scratch.programs = programs
    out, lse = torch.full_like(query, torch.nan), torch.full(query.shape[:2], torch.nan)
    attend(
        heads.state, rows.slot, rows.position, layer, query, out, lse, heads.words, heads.record_bytes,
        heads.context.scale, scratch,
    )  # fmt: skip
    assert not scratch.ended.any(), "the next launch counts parts from 0"
    return out, lse


def expected(heads: Heads, layer: int, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.empty_like(query), torch.empty(query.shape[:2])
    heads.reference().attend(layer, query, out, lse)
    return out, lse


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("group", "d"), [(1, 128), (2, 64), (4, 96), (5, 80), (8, 128), (16, 256)])
def test_equals_the_reference(rng, group, d, dtype):
    heads = Heads(rng, group=group, d=d, dtype=dtype)
    for layer in range(2):
        query = 3 * heads.normal(heads.rows.count, 2 * group, d)
        for got, wanted in zip(attended(heads, layer, query), expected(heads, layer, query), strict=True):
            torch.testing.assert_close(got, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
