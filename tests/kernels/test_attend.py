"""`attend` and `store_token` against float64 NumPy, for every storage, head size and instruction set."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from decode_worker import _native

FLOAT32, BFLOAT16 = 1, 2
PLACES = 400


class Lanes:
    """Random records of [B, H] lanes and a window that holds them."""

    def __init__(self, rng, batch, heads, group, d, dtype, places=PLACES):
        self.batch, self.heads, self.d, self.dtype = batch, heads, d, dtype
        element = 4 if dtype == FLOAT32 else 2
        self.record_bytes = -(-2 * d * element // 64) * 64
        rows = rng.standard_normal((batch * heads * places, self.record_bytes // element), dtype=np.float32)
        stored = torch.from_numpy(rows)
        if dtype == BFLOAT16:
            stored = stored.bfloat16()
        self.window = stored.view(torch.uint8).numpy().reshape(-1).copy()
        self.records = stored.double().numpy().reshape(batch, heads, places, -1)
        self.base = (np.arange(batch * heads) * places * self.record_bytes).astype(np.uint64).reshape(batch, heads)
        self.query = rng.standard_normal((batch, heads * group, d), dtype=np.float32)
        self.scale = d**-0.5

    def attend(self, ranges, places, counts, threads=1):
        return _native.attend(
            self.query, self.window, [(self.base, ranges, places, counts, self.dtype, self.record_bytes)],
            self.scale, threads,
        )  # fmt: skip

    def reference(self, ranges, places, counts):
        out, lse = np.zeros_like(self.query), np.full(self.query.shape[:2], -np.inf, np.float32)
        group = self.query.shape[1] // self.heads
        for b, h in np.ndindex(self.batch, self.heads):
            held = [np.arange(first, first + count) for first, count in ranges[b, h]]
            rows = self.records[b, h, np.concatenate([*held, places[b, h, : counts[b, h]]])]
            if not len(rows):
                continue
            for i in range(h * group, (h + 1) * group):
                score = rows[:, : self.d] @ self.query[b, i].astype(np.float64) * self.scale
                weight = np.exp(score - score.max())
                out[b, i] = weight @ rows[:, self.d : 2 * self.d] / weight.sum()
                lse[b, i] = score.max() + np.log(weight.sum())
        return out, lse


def random_segments(rng, batch, heads, places_max=150):
    ranges = np.zeros((batch, heads, 3, 2), np.int32)
    ranges[..., 0] = rng.integers(0, 100, (batch, heads, 3))
    ranges[..., 1] = rng.integers(0, 100, (batch, heads, 3)) * rng.integers(0, 2, (batch, heads, 3))
    places = np.stack([rng.permutation(PLACES)[:places_max] for _ in range(batch * heads)])
    places = places.reshape(batch, heads, places_max).astype(np.int32)
    return ranges, places, rng.integers(0, places_max + 1, (batch, heads)).astype(np.int32)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("d", [16, 64, 80, 96, 128])
def test_equals_numpy_on_ranges_and_places(level, rng, d, dtype):
    for group in (1, 2, 3, 4, 7, 8):
        lanes = Lanes(rng, 2, 2, group, d, dtype)
        segments = random_segments(rng, 2, 2)
        expected = lanes.reference(*segments)
        for threads in (1, 3):
            for got, wanted in zip(lanes.attend(*segments, threads), expected, strict=True):
                np.testing.assert_allclose(got, wanted, atol=2e-5)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_result_does_not_depend_on_the_number_of_threads(level, rng, dtype):
    """Lanes on both sides of a part's 1024 records, some of them empty."""
    length = 5000
    lanes = Lanes(rng, 2, 3, 4, 64, dtype, places=length)
    counts = np.array([[1024, 1025, 0], [2048, 3500, 1]], np.int32)
    ranges = np.zeros((2, 3, 3, 2), np.int32)
    ranges[..., 0] = rng.integers(0, 1000, (2, 3, 3))
    ranges[..., 1] = [[(0, 0, 0), (4, 0, 576), (0, 0, 0)], [(4, 1, 0), (4, 300, 276), (2000, 500, 1)]]
    places = np.stack([rng.permutation(length)[:3500] for _ in range(6)]).reshape(2, 3, 3500).astype(np.int32)
    segments = (ranges, places, counts)
    out, lse = lanes.attend(*segments, 1)
    for got, wanted in zip((out, lse), lanes.reference(*segments), strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-5)
    for threads in (2, 3, 7):
        again = lanes.attend(*segments, threads)
        assert again[0].tobytes() == out.tobytes()
        assert again[1].tobytes() == lse.tobytes()


def test_attention_over_two_halves_joins_by_the_log_sum_exp(level, rng):
    lanes = Lanes(rng, 1, 2, 4, 64, FLOAT32)
    places, counts = np.zeros((1, 2, 1), np.int32), np.zeros((1, 2), np.int32)
    (whole, total), *halves = (
        lanes.attend(np.array([[[[first, count]]] * 2], np.int32), places, counts)
        for first, count in ((0, 300), (0, 120), (120, 180))
    )
    joined = sum(out * np.exp(lse - total)[..., None] for out, lse in halves)
    np.testing.assert_allclose(joined, whole, atol=2e-5)


def test_lane_without_records_gives_zeros(level, rng):
    lanes = Lanes(rng, 1, 2, 4, 64, BFLOAT16)
    ranges = np.zeros((1, 2, 1, 2), np.int32)
    ranges[0, 1, 0] = (0, 1)
    out, lse = lanes.attend(ranges, np.zeros((1, 2, 1), np.int32), np.zeros((1, 2), np.int32))
    assert (out[0, :4] == 0).all()
    assert (lse[0, :4] == -np.inf).all()
    assert np.isfinite(lse[0, 4:]).all()
    np.testing.assert_allclose(out[0, 4:], np.tile(lanes.records[0, 1, 0, 64:128], (4, 1)), rtol=1e-6)


def test_large_scores_neither_overflow_nor_vanish(level, rng):
    lanes = Lanes(rng, 1, 1, 4, 64, FLOAT32)
    lanes.query *= 1000
    segments = random_segments(rng, 1, 1)
    segments[2][:] = 150
    for got, wanted in zip(lanes.attend(*segments), lanes.reference(*segments), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-3)


def test_the_order_of_places_does_not_matter(level, rng):
    lanes = Lanes(rng, 1, 1, 4, 128, BFLOAT16)
    none = np.zeros((1, 1, 1, 2), np.int32)
    places = rng.permutation(PLACES).astype(np.int32)[None, None]
    count = np.array([[PLACES]], np.int32)
    whole = np.array([[[[0, PLACES]]]], np.int32)
    scattered, in_a_row = lanes.attend(none, places, count), lanes.attend(whole, places, np.zeros((1, 1), np.int32))
    for got, wanted in zip(scattered, in_a_row, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_places_outside_the_window_are_refused(rng):
    lanes = Lanes(rng, 1, 1, 1, 64, FLOAT32)
    none, one = np.zeros((1, 1, 1, 2), np.int32), np.ones((1, 1), np.int32)
    for place in (PLACES, -1):
        with pytest.raises(ValueError, match="place"):
            lanes.attend(none, np.full((1, 1, 1), place, np.int32), one)
    with pytest.raises(ValueError, match="outside"):
        lanes.attend(np.array([[[[PLACES - 1, 2]]]], np.int32), np.zeros((1, 1, 1), np.int32), 0 * one)
    with pytest.raises(ValueError, match="R up to 3"):
        lanes.attend(np.zeros((1, 1, 4, 2), np.int32), np.zeros((1, 1, 1), np.int32), 0 * one)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_store_token_rounds_like_torch(level, rng, dtype):
    d, heads = 80, 2
    record_bytes = 640 if dtype == FLOAT32 else 320
    key, value = rng.standard_normal((2, 1, heads, d), dtype=np.float32)
    key[0, 0, :4] = (np.nan, np.inf, -0.0, 3.3895314e38)
    window = np.zeros(2 * heads * record_bytes, np.uint8)
    base = np.array([[0, 2 * record_bytes]], np.uint64)
    _native.store_token(window, base, np.array([[1, -1]], np.int32), key, value, dtype, record_bytes)
    rows = window.reshape(4, record_bytes)
    assert not rows[[0, 2, 3]].any()
    torch_dtype = torch.float32 if dtype == FLOAT32 else torch.bfloat16
    stored = torch.from_numpy(rows[1].copy()).view(torch_dtype).float()[: 2 * d]
    expected = torch.from_numpy(np.concatenate([key[0, 0], value[0, 0]])).to(torch_dtype).float()
    torch.testing.assert_close(stored, expected, rtol=0, atol=0, equal_nan=True)


def test_one_thread_starts_none():
    """In a process of its own: other tests leave the pool's threads behind."""
    program = """
import os
import numpy as np
from decode_worker import _native
def attend(threads):
    window = np.zeros(4096 * 256, np.uint8)
    base, none = np.zeros((1, 2), np.uint64), np.zeros((1, 2), np.int32)
    ranges = np.array([[[[0, 4096]]] * 2], np.int32)
    query = np.ones((1, 2, 64), np.float32)
    held = (base, ranges, np.zeros((1, 2, 1), np.int32), none, 2, 256)
    _native.attend(query, window, [held], 1.0, threads)
    return len(os.listdir("/proc/self/task"))
before = len(os.listdir("/proc/self/task"))
print(attend(1) - before, attend(3) - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["0", "2"]


@pytest.mark.parametrize("exponent", [6, 10, 15, 30])
def test_scores_of_any_size_give_finite_results(level, rng, exponent):
    """The difference of a score and their maximum rounds to something above zero where products are fused."""
    lanes = Lanes(rng, 1, 1, 4, 64, FLOAT32)
    lanes.query *= np.float32(10.0**exponent)
    ranges = np.array([[[[0, 200], [0, 0], [0, 0]]]], np.int32)
    places, counts = np.zeros((1, 1, 1), np.int32), np.zeros((1, 1), np.int32)
    out, lse = lanes.attend(ranges, places, counts)
    expected = lanes.reference(ranges, places, counts)[1]
    assert np.isfinite(out).all()
    np.testing.assert_allclose(lse, expected, rtol=1e-5)
