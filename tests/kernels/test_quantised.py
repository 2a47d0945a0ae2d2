"""Quantised vectors: what they lose, and `attend` over them and the worker's own records against the reference."""

import numpy as np
import pytest
import torch

from decode_worker import _native
from decode_worker.quantised import quantised, restored, rotated
from decode_worker.records import RecordFormat

PLACES = 300


def vectors(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    """Of very different sizes, with channels that are large in all of them."""
    x = rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 6, (*shape[:-1], 1))
    x[..., rng.integers(shape[-1])] *= 20
    return torch.from_numpy(x.astype(np.float32))


@pytest.mark.parametrize("d", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("bits", "steps"), [(8, 127.0), (4, 7.5)])
def test_an_element_is_half_a_step_off_and_one_that_carries_the_scale_a_step(rng, d, bits, steps):
    x = vectors(rng, 50, 3, d)
    raw = quantised(x, bits)
    assert raw.dtype == torch.uint8
    assert raw.shape == (50, 3, d * bits // 8)
    there, back = (rotated(x), rotated(restored(raw, bits))) if bits == 4 else (x, restored(raw, bits))
    # A bfloat16 that is rounded up is at most 1/128 larger.
    step = there.abs().amax(-1, keepdim=True) / steps * (1 + 1 / 128)
    off = (there - back).abs() / step
    assert off[..., :16].max() <= 1.001
    assert off[..., 16:].numel() == 0 or off[..., 16:].max() <= 0.501
    assert off[..., :16].max() > 0.6, "the first codes have a choice of half as many"


@pytest.mark.parametrize("bits", [8, 4])
def test_zero_stays_zero_and_what_is_no_number_is_none_afterwards(bits):
    x = torch.zeros(4, 64)
    x[1, 40] = float("nan")
    x[2, 3] = float("inf")
    x[3] = 1e-42
    back = restored(quantised(x, bits), bits)
    assert (back[0] == 0).all()
    assert back[1].isnan().all()
    assert not back[2].isfinite().any()
    assert back[3].abs().max() < 1e-38


def test_rotated_is_its_own_inverse_and_keeps_products(rng):
    for d in (16, 80, 128):
        x, y = (torch.from_numpy(rng.standard_normal((7, d))) for _ in range(2))
        torch.testing.assert_close(rotated(rotated(x)), x)
        torch.testing.assert_close((rotated(x) * rotated(y)).sum(1), (x * y).sum(1))


class Mixed:
    """Random lanes whose records are of two kinds, each kind in a part of the window."""

    def __init__(self, rng: np.random.Generator, d: int, group: int, storage: str, kind: str) -> None:
        self.rng, self.d, self.group = rng, d, group
        batch, heads = self.grid = 2, 2
        self.query = rng.standard_normal((batch, heads * group, d), dtype=np.float32)
        stored = RecordFormat(heads, d, storage, kind)
        self.windows, self.held, self.vectors, before = [], [], [], 0
        for records in (stored.own, stored):
            size, count = records.record_bytes, batch * heads * PLACES
            raw = torch.from_numpy(rng.integers(0, 256, (count, size), np.uint8))
            keys, values = (torch.from_numpy(rng.standard_normal((count, d), dtype=np.float32)) for _ in range(2))
            records.pack(keys, values * 3, raw)
            self.vectors.append([each.double().reshape(batch, heads, PLACES, d) for each in records.unpack(raw)])
            base = before + np.arange(batch * heads).reshape(self.grid) * PLACES * size
            ranges = np.stack([rng.integers(0, 200, (*self.grid, 3)), rng.integers(0, 100, (*self.grid, 3))], axis=-1)
            places = rng.integers(0, PLACES, (*self.grid, 90)).astype(np.int32)
            counts = rng.integers(0, 91, self.grid).astype(np.int32)
            self.held.append((base.astype(np.uint64), ranges.astype(np.int32), places, counts, records.code, size))
            self.windows.append(raw.numpy().reshape(-1))
            before += raw.numel()
        self.window = np.concatenate(self.windows)

    def native(self, threads: int) -> tuple[np.ndarray, np.ndarray]:
        return _native.attend(self.query, self.window, self.held, self.d**-0.5, threads)

    def reference(self) -> tuple[np.ndarray, np.ndarray]:
        out, lse = np.zeros_like(self.query), np.full(self.query.shape[:2], -np.inf, np.float32)
        for b, h in np.ndindex(self.grid):
            keys, values = [], []
            for (_, ranges, places, counts, *_), (k, v) in zip(self.held, self.vectors, strict=True):
                at = np.concatenate([*(np.arange(f, f + n) for f, n in ranges[b, h]), places[b, h, : counts[b, h]]])
                keys.append(k[b, h, at])
                values.append(v[b, h, at])
            for i in range(h * self.group, (h + 1) * self.group):
                scores = torch.cat(keys) @ torch.from_numpy(self.query[b, i]).double() * self.d**-0.5
                if len(scores):
                    lse[b, i] = scores.logsumexp(0)
                    out[b, i] = scores.softmax(0) @ torch.cat(values)
        return out, lse


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
@pytest.mark.parametrize("d", [16, 64, 80, 96, 128])
def test_attend_over_two_kinds_equals_the_reference(level, rng, d, storage, kind):
    for group in (1, 2, 3, 4, 7, 8):
        mixed = Mixed(rng, d, group, storage, kind)
        out, lse = mixed.native(1)
        for got, wanted in zip((out, lse), mixed.reference(), strict=True):
            np.testing.assert_allclose(got, wanted, atol=3e-5, rtol=1e-5)
        again = mixed.native(3)
        assert again[0].tobytes() == out.tobytes()
        assert again[1].tobytes() == lse.tobytes()


def test_a_dtype_that_is_not_attended_to_is_refused(rng):
    mixed = Mixed(rng, 64, 1, "bfloat16", "int8")
    *held, _, size = mixed.held[0]
    with pytest.raises(ValueError, match="dtype must be"):
        _native.attend(mixed.query, mixed.window, [(*held, _native.DTYPE_FLOAT16, size)], 1.0, 1)
    with pytest.raises(ValueError, match="one or two kinds"):
        _native.attend(mixed.query, mixed.window, [mixed.held[0]] * 3, 1.0, 1)
