"""A new token's record, against the reference set: bit for bit."""

import numpy as np
import pytest
import torch

from decode_worker.gpu.kernels.append import append

from .heads import Heads, same_state


def appended(heads: Heads, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """By the kernel, and by the reference on a copy; both must agree."""
    expected = heads.reference(keeps_faults=True)
    expected.append(layer, key, value)
    append(heads.state, heads.rows.slot, heads.rows.position, layer, key, value, heads.words, heads.record_bytes)
    np.testing.assert_array_equal(heads.window, expected.context.window)
    same_state(heads.state, expected.context.state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("heads", "d"), [(1, 128), (2, 64), (3, 80), (2, 256)])
def test_equals_the_reference(rng, heads, d, dtype):
    these = Heads(rng, heads=heads, d=d, dtype=dtype)
    for layer in range(2):
        key, value = these.normal(2, these.rows.count, heads, d)
        appended(these, layer, key, value)


def test_bfloat16_is_rounded_to_nearest_even(rng):
    heads = Heads(rng, slots=1, dtype="bfloat16")
    key, value = heads.normal(2, heads.rows.count, 2, 64)
    halves = torch.arange(64, dtype=torch.int32) << 15  # every second one lies between two numbers
    key[:] = (halves + 0x3F800000).view(torch.float32)
    value[0, 0, :5] = torch.tensor([torch.inf, -torch.inf, -0.0, 3.3895314e38, 1e-40])
    appended(heads, 0, key, value)


def test_a_nan_stays_one(rng):
    heads = Heads(rng, slots=1, dtype="bfloat16")
    before = int(heads.words.isnan().sum())
    key, value = heads.normal(2, heads.rows.count, 2, 64)
    key[0, 0, :2] = torch.tensor([0x7F800001, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    append(heads.state, heads.rows.slot, heads.rows.position, 0, key, value, heads.words, heads.record_bytes)
    assert int(heads.words.isnan().sum()) == before + 2


def test_a_full_tail_is_a_fault_and_nothing_of_it_is_written(rng):
    heads = Heads(rng, heads=3, slots=4, resident_share=0)
    state, rows = heads.state, heads.rows
    full = rng.random((4, 3)) < 0.3
    for row, (slot, position) in enumerate(zip(rows.slot.tolist(), rows.position.tolist(), strict=True)):
        for head in range(3 if slot >= 0 else 0):
            distance = state.shape.tail - 1 + bool(full[row, head])
            rows.position[row] = max(position, distance)
            state.cover[:, 0, slot, head] = int(rows.position[row]) - distance
    state.fault[int(rows.slot[0])] = 15  # kept: a lost block is graver
    appended(heads, 0, *heads.normal(2, 4, 3, 64))
