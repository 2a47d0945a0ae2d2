"""Records of a landed ticket, pulled from host memory."""

import numpy as np
import pytest
import torch

from decode_worker import _native
from decode_worker.gpu.kernels.gather import Pull, gather
from decode_worker.gpu.kernels.wishes import FIRST_PAIR, HEAD, PAIRS, SLOT, STATUS, Wishes
from decode_worker.gpu.sync import POISONED
from decode_worker.window.base import Frames

from .heads import Heads
from .interleave import interleaved

LAYER, TICKETS, PAIRS_MAX, NUMBER = 1, 4, 300, 7
PLACES = 300  # that every lane has
LINE = 16  # words


def pull_over(arena: torch.Tensor, window: torch.Tensor) -> Pull:
    lines = torch.full((len(window) // LINE + 1,), 2**31 - 1, dtype=torch.int32)
    words, counts = torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int32)
    return Pull(Frames(lines, arena), *words, *counts)


class Landed:
    """A ticket whose cells have all been read, over random runs; `expected` is what the window must hold."""

    def __init__(self, rng: np.random.Generator, d: int, pulls: bool) -> None:
        self.heads = heads = Heads(rng, d=d, heads=3, dtype="bfloat16")
        words = heads.record_bytes // 4
        self.window = torch.from_numpy(heads.window).view(torch.int32)
        self.source, arena = (
            torch.from_numpy(rng.integers(0, 2**31, size, dtype=np.int32)) for size in (len(self.window), 900 * LINE)
        )
        self.pull = pull_over(arena, self.window) if pulls else None
        lanes = [(slot, head) for slot in range(3) for head in range(3)]
        self.wishes = Wishes(2, 16, torch.device("cpu"))
        self.pairs = torch.full((TICKETS, PAIRS_MAX, 2), 2**30, dtype=torch.int32)
        self.expected, first = self.window.clone(), 0
        for i, lane in enumerate(rng.permutation(len(lanes))[: rng.integers(1, 9)]):
            slot, head = lanes[lane]
            count, came = int(rng.integers(1, 30)), bool(rng.random() < 0.8)
            wish = self.wishes.wishes[LAYER, i]
            wish[SLOT], wish[HEAD], wish[FIRST_PAIR], wish[PAIRS] = slot, head, first, count
            wish[STATUS] = _native.STATUS_OK if came else _native.STATUS_ERROR
            for n, place in enumerate(rng.permutation(PLACES)[:count].tolist()):
                to = int(heads.state.base[LAYER, slot, head]) // 4 + place * words
                self.pairs[NUMBER % TICKETS, first + n, 1] = place
                if not came:
                    continue  # and its lines name nothing
                from_, at = self.source, to
                if self.pull is not None:
                    line = int(rng.integers(0, 900 - words // LINE)) if rng.random() < 0.6 else -1
                    self.pull.frames.lines[to // LINE] = line + 1
                    from_, at = (arena, line * LINE) if line >= 0 else (from_, at)
                self.expected[to : to + words] = from_[at : at + words]
            first += count
            self.wishes.landed[LAYER] = torch.tensor([NUMBER, i + 1])

    def gather(self, programs: int) -> None:
        gather(
            self.heads.state, LAYER, self.wishes, self.pairs, self.pull, self.source, self.window,
            self.heads.record_bytes, programs,
        )  # fmt: skip


@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize(("pulls", "d"), [(False, 64), (True, 64), (True, 80), (True, 256)])
def test_records_of_runs_that_came_lie_in_their_places(rng, pulls, d, programs):
    landed = Landed(rng, d, pulls)
    landed.gather(programs)
    assert torch.equal(landed.window, landed.expected)


@pytest.mark.parametrize("seed", range(4))
def test_who_ends_last_says_that_all_has_been_read(rng, seed):
    landed = Landed(rng, 64, True)
    released, seen = landed.pull.released, []
    released[0] = NUMBER - 1
    with interleaved(seed, lambda: seen.append((int(released), torch.equal(landed.window, landed.expected)))) as ran:
        landed.gather(5)
    assert ran == ["gather"]
    assert int(released) == NUMBER
    assert torch.equal(landed.window, landed.expected)
    assert all(complete for said, complete in seen if said == NUMBER)
    assert (NUMBER - 1) in {said for said, _ in seen}
    assert not landed.pull.ended
    assert not landed.pull.error


def test_what_was_read_beside_poison_is_an_error(rng):
    landed = Landed(rng, 64, True)
    landed.pull.poison.fill_(-1)
    landed.gather(3)
    assert int(landed.pull.error) == POISONED


@pytest.mark.parametrize("pulls", [False, True])
def test_nothing_is_pulled_when_nothing_landed(rng, pulls):
    heads = Heads(rng)
    window = torch.from_numpy(heads.window).view(torch.int32)
    before = window.clone()
    wishes = Wishes(2, 16, torch.device("cpu"))
    wishes.wishes[LAYER, 0] = torch.tensor([0, 0, 0, 5, 0, _native.STATUS_OK, 0, 0])
    pairs = torch.zeros((TICKETS, PAIRS_MAX, 2), dtype=torch.int32)
    pull = pull_over(torch.zeros(LINE, dtype=torch.int32), window) if pulls else None
    gather(heads.state, LAYER, wishes, pairs, pull, torch.zeros_like(window), window, heads.record_bytes, 2)
    assert torch.equal(window, before)
    assert pull is None or not pull.released
