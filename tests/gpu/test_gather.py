"""Records of a landed ticket, pulled from host memory."""

import numpy as np
import pytest
import torch

from decode_worker import _native
from decode_worker.gpu.kernels.gather import gather
from decode_worker.gpu.kernels.wishes import FIRST_PAIR, HEAD, PAIRS, SLOT, STATUS, Wishes

from .heads import Heads

LAYER, TICKETS, PAIRS_MAX, NUMBER = 1, 4, 300, 7
PLACES = 300  # that every lane has


@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize(("same_place", "d"), [(True, 64), (False, 64), (False, 80)])
def test_records_of_runs_that_came_lie_in_their_places(rng, same_place, d, programs):
    heads = Heads(rng, d=d, heads=3, dtype="bfloat16")
    words = heads.record_bytes // 4
    window = torch.from_numpy(heads.window).view(torch.int32)
    source = torch.from_numpy(rng.integers(0, 2**31, len(window), dtype=np.int32))
    lanes = [(slot, head) for slot in range(3) for head in range(3)]
    wishes = Wishes(2, 16, torch.device("cpu"))
    pairs = torch.full((TICKETS, PAIRS_MAX, 2), 2**30, dtype=torch.int32)
    offsets = torch.full((TICKETS, PAIRS_MAX), 2**40, dtype=torch.int64)
    expected, first = window.clone(), 0
    for i, lane in enumerate(rng.permutation(len(lanes))[: rng.integers(1, 9)]):
        slot, head = lanes[lane]
        count, came = int(rng.integers(1, 30)), bool(rng.random() < 0.8)
        wish = wishes.wishes[LAYER, i]
        wish[SLOT], wish[HEAD], wish[FIRST_PAIR], wish[PAIRS] = slot, head, first, count
        wish[STATUS] = _native.STATUS_OK if came else _native.STATUS_ERROR
        for n, place in enumerate(rng.permutation(PLACES)[:count].tolist()):
            to = int(heads.state.base[LAYER, slot, head]) // 4 + place * words
            from_ = to if same_place else int(rng.integers(0, len(source) // words)) * words
            pairs[NUMBER % TICKETS, first + n, 1] = place
            offsets[NUMBER % TICKETS, first + n] = from_ * 4
            if came:
                expected[to : to + words] = source[from_ : from_ + words]
        first += count
        wishes.landed[LAYER] = torch.tensor([NUMBER, i + 1])
    gather(
        heads.state, LAYER, wishes, pairs, None if same_place else offsets, source, window, heads.record_bytes, programs
    )
    assert torch.equal(window, expected)


def test_nothing_is_pulled_when_nothing_landed(rng):
    heads = Heads(rng)
    window = torch.from_numpy(heads.window).view(torch.int32)
    before = window.clone()
    wishes = Wishes(2, 16, torch.device("cpu"))
    wishes.wishes[LAYER, 0] = torch.tensor([0, 0, 0, 5, 0, _native.STATUS_OK, 0, 0])
    pairs = torch.zeros((TICKETS, PAIRS_MAX, 2), dtype=torch.int32)
    gather(heads.state, LAYER, wishes, pairs, None, torch.zeros_like(window), window, heads.record_bytes, 2)
    assert torch.equal(window, before)
