"""`RecordFormat.stage` against K and V moved and rounded by torch, one record after the other."""

import numpy as np
import pytest
import torch

from decode_worker.records import QUANTISED, STORAGE_DTYPES, RecordFormat


@pytest.mark.parametrize("kind", ["model", *QUANTISED])
@pytest.mark.parametrize("storage", STORAGE_DTYPES)
@pytest.mark.parametrize("computed", STORAGE_DTYPES)
@pytest.mark.parametrize("d", [16, 80, 128])
def test_stage_writes_each_token_where_its_order_says(level, rng, kind, storage, computed, d):
    heads, tokens = int(rng.integers(1, 4)), 256 * int(rng.integers(1, 3))
    records = RecordFormat(heads, d, storage, kind)
    raw = rng.standard_normal((2, tokens, heads, d), dtype=np.float32) * 1e3
    raw[:, rng.integers(tokens), :, :3] = (np.nan, np.inf, -0.0)
    keys, values = torch.from_numpy(raw).to(STORAGE_DTYPES[computed][1])
    order = np.stack([rng.permutation(tokens) for _ in range(heads)]).astype(np.uint16)
    grades = rng.integers(0, 4, (heads, records.blocks(tokens)), np.uint8)
    part = rng.integers(0, 256, records.staged_bytes(tokens), np.uint8)

    offsets = records.stage(part, keys, values, order, grades)

    expected = torch.zeros(heads, tokens, records.record_bytes, dtype=torch.uint8)
    rows = torch.from_numpy(order.astype(np.int64))
    for head in range(heads):
        records.pack(keys[rows[head], head], values[rows[head], head], expected[head])
    for head, first in enumerate(offsets.tolist()):
        end = first + tokens * records.record_bytes
        map_end = end + 2 * tokens
        staged = torch.from_numpy(part[first:end].reshape(tokens, -1))
        for mine, wanted in zip(records.unpack(staged), records.unpack(expected[head]), strict=True):
            torch.testing.assert_close(mine, wanted, rtol=0, atol=0, equal_nan=True)
        assert (part[end:map_end].view(np.uint16) == order[head]).all()
        assert (part[map_end : map_end + grades.shape[1]] == grades[head]).all()


@pytest.mark.parametrize("storage", STORAGE_DTYPES)
def test_what_lies_behind_a_short_value_is_zero(rng, storage):
    records = RecordFormat(2, 4, storage)
    keys, values = (torch.from_numpy(rng.standard_normal((256, 2, 4), dtype=np.float32)) for _ in range(2))
    order = np.stack([rng.permutation(256) for _ in range(2)]).astype(np.uint16)
    part = np.full(records.staged_bytes(256), 255, np.uint8)
    for first in records.stage(part, keys, values, order).tolist():
        staged = part[first : first + 256 * records.record_bytes].reshape(256, -1)
        assert not staged[:, 2 * 4 * STORAGE_DTYPES[storage][1].itemsize :].any()
