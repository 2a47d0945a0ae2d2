"""Attention in Triton, interpreted, against the reference set in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from decode_worker.gpu.kernels.attend import PART, PARTS, AttendScratch, attend

from .heads import CONTEXT, Heads

# Bfloat16 queries and weights are sums of two numbers: 16 bits, where float32 has 24.
TOLERANCE = {"float32": 2e-5, "bfloat16": 5e-5, "float16": 2e-5}

Result = tuple[torch.Tensor, torch.Tensor]


def attended(heads: Heads, layer: int, query: torch.Tensor, programs: int = 2) -> Result:
    shape, rows = heads.state.shape, heads.rows
    scratch = AttendScratch(shape.slots, shape.heads, shape.group, shape.head_dim, torch.device("cpu"))
    scratch.programs = programs
    out, lse = torch.full_like(query, torch.nan), torch.full(query.shape[:2], torch.nan)
    attend(
        heads.state, rows.slot, rows.position, layer, query, out, lse, heads.words, heads.record_bytes,
        heads.context.scale, scratch,
    )  # fmt: skip
    assert not scratch.ended.any(), "the next launch counts parts from 0"
    return out, lse


def expected(heads: Heads, layer: int, query: torch.Tensor) -> Result:
    out, lse = torch.empty_like(query), torch.empty(query.shape[:2])
    heads.reference().attend(layer, query, out, lse)
    return out, lse


def compare(got: Result, wanted: Result, tolerance: float) -> None:
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("group", "d"), [(1, 128), (2, 64), (4, 96), (5, 80), (8, 128), (16, 256)])
def test_equals_the_reference(rng: np.random.Generator, group: int, d: int, dtype: str) -> None:
    heads = Heads(rng, group=group, d=d, dtype=dtype)
    layer = int(rng.integers(2))
    query = 3 * heads.normal(heads.rows.count, 2 * group, d)
    compare(attended(heads, layer, query), expected(heads, layer, query), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_result_depends_neither_on_the_programs_nor_on_the_batch(rng: np.random.Generator, dtype: str) -> None:
    heads = Heads(rng, slots=4, heads=3, d=32, dtype=dtype)
    query = heads.normal(4, 6, 32)
    out, lse = attended(heads, 0, query, programs=1)
    for programs in (2, 5, 40):
        again = attended(heads, 0, query, programs)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)
    slots, positions = heads.rows.slot.tolist(), heads.rows.position.tolist()
    for row in range(4):
        heads.rows.set(slots[row : row + 1], positions[row : row + 1])
        alone = attended(heads, 0, query[row : row + 1], programs=3)
        assert torch.equal(alone[0][0], out[row])
        assert torch.equal(alone[1][0], lse[row])


def test_a_lane_has_any_number_of_records_and_no_more_than_64_parts(rng: np.random.Generator) -> None:
    lengths = [1, PART - 1, PART, PART + 1, 3 * PART, PARTS * PART, PARTS * PART + 1]
    heads = Heads(rng, slots=1, heads=1, group=1, d=16, context=lengths[-1], resident_share=1)
    query = heads.normal(1, 1, 16)
    for length in lengths:
        heads.rows.set([0], [length - 1])
        compare(attended(heads, 0, query, programs=3), expected(heads, 0, query), TOLERANCE["float32"])


def test_the_tail_wraps_where_it_ends(rng: np.random.Generator) -> None:
    heads = Heads(rng, slots=1, heads=2, d=16, resident_share=0)
    state, query = heads.state, heads.normal(1, 4, 16)
    tail = state.shape.tail
    for cover, position in (
        (0, 0),
        (0, tail - 1),
        (tail - 1, tail),
        (tail, 2 * tail - 1),
        (5, tail + 4),
        (tail + 7, tail + 6),
    ):
        state.cover[:] = cover
        heads.rows.set([0], [position])
        compare(attended(heads, 1, query), expected(heads, 1, query), TOLERANCE["float32"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads_that_hold_nothing_give_zeros(rng: np.random.Generator, dtype: str) -> None:
    heads = Heads(rng, slots=3, dtype=dtype, resident_share=0)
    state, query = heads.state, heads.normal(3, 4, 64)
    heads.rows.set([0, -1, 2], [10, 10, 9])
    state.count[:], state.cover[:] = 0, 7
    state.cover[:, 0, 2, 0] = 10
    state.shape = replace(state.shape, sink=0)
    out, lse = attended(heads, 0, query)
    for row, mine in ((1, slice(0, 4)), (2, slice(0, 2))):
        assert (out[row, mine] == 0).all()
        assert (lse[row, mine] == -torch.inf).all()
    assert torch.isfinite(lse[0]).all()
    assert torch.isfinite(lse[2, 2:]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_scores_neither_overflow_nor_vanish(rng: np.random.Generator, dtype: str) -> None:
    heads = Heads(rng, d=32, dtype=dtype)
    query = 1000 * heads.normal(heads.rows.count, 4, 32)
    for got, wanted in zip(attended(heads, 0, query), expected(heads, 0, query), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-2)


def test_what_fills_a_record_up_is_not_read(rng: np.random.Generator) -> None:
    """36 of 64 columns, and records of 192 bytes of which 144 are K and V."""
    heads = Heads(rng, d=36, dtype="float16", slots=2)
    query = heads.normal(2, 4, 36)
    before = attended(heads, 0, query)
    for base in heads.state.base[0].flatten().tolist():
        places = heads.window[base:][: 300 * heads.record_bytes].reshape(-1, heads.record_bytes)
        places[:, 2 * 36 * 2 :] = 255
    after = attended(heads, 0, query)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


def test_the_order_of_places_hardly_matters(rng: np.random.Generator) -> None:
    heads = Heads(rng, slots=1, heads=1, group=4, d=64, resident_share=0)
    state, query = heads.state, heads.normal(1, 4, 64)
    state.count[:] = state.shape.places
    state.places[:] = torch.from_numpy(state.shape.sink + rng.permutation(state.shape.places).astype(np.int32))
    heads.rows.set([0], [CONTEXT // 2])
    state.cover[:] = CONTEXT // 2 - 100
    scattered = attended(heads, 0, query)
    state.places[:] = state.places.sort(-1).values
    compare(attended(heads, 0, query), scattered, TOLERANCE["float32"])
