"""Waiting for a ticket's cells, and what its commit changes, against the reference set."""

import mmap
import os
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from decode_worker import _native
from decode_worker.gpu.kernels.arrive import Completions, await_ticket, commit
from decode_worker.gpu.kernels.wishes import AUX, HAS_OLD_SET, HEAD, PAIRS, SLOT, STATUS, Wishes
from decode_worker.gpu.sync import LATE, POISONED
from decode_worker.kernels.reference import ReferenceKernels, Wish

from .heads import Heads, same_state

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # it is not: on purpose

LAYER, TICKETS, NUMBER = 1, 4, 4 + 3
LONG_NS, SHORT_NS = 60 * 10**9, 20 * 10**6
STATUSES = (
    (_native.STATUS_OK, 0), (_native.STATUS_ERROR, 14), (_native.STATUS_ERROR, _native.FAULT_DATA_LOSS),
    (_native.STATUS_STALE, 0), (_native.STATUS_MISS, 0),
)  # fmt: skip


@dataclass
class Waiting:
    """Wishes of random heads, the ring that will answer them, and the reference set that has the same wishes."""

    heads: Heads
    wishes: Wishes
    answers: np.ndarray  # uint32[runs, 2]
    expected: ReferenceKernels
    ring: Completions
    cells: np.ndarray  # int64[TICKETS, runs_max, 2], as the daemon maps them

    @property
    def count(self) -> int:
        return len(self.answers)

    def answer(self, run: int) -> None:
        status, aux = (int(x) for x in self.answers[run])
        self.cells[NUMBER % TICKETS, run, 1] = status | aux << 32
        self.cells[NUMBER % TICKETS, run, 0] = NUMBER

    def arrive(self, timeout_ns: int = LONG_NS) -> None:
        await_ticket(self.heads.state, LAYER, self.wishes, self.ring, timeout_ns, self.heads.context.stale_fails)

    def check(self, answers: np.ndarray | None) -> None:
        """Everything is as the reference leaves it, and the ticket is over."""
        self.expected.commit(LAYER, answers)
        same_state(self.heads.state, self.expected.context.state)
        assert not self.wishes.number.any()
        assert not self.wishes.count.any()
        landed = [NUMBER, self.count] if answers is not None else [0, 0]
        assert self.wishes.landed[LAYER].tolist() == landed


def read_only(size_bytes: int) -> tuple[np.ndarray, torch.Tensor]:
    """One memory as its writer maps it and as a reader does that must not write."""
    fd = os.memfd_create("cells")
    os.ftruncate(fd, size_bytes)
    writable = np.frombuffer(mmap.mmap(fd, size_bytes), np.int64)
    mapped = np.frombuffer(mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ), np.int64)
    os.close(fd)
    return writable, torch.from_numpy(mapped)


@pytest.fixture(params=[False, True], ids=["use", "fail"])
def waiting(request: pytest.FixtureRequest, rng: np.random.Generator) -> Waiting:
    heads = Heads(rng, heads=9, group=1, d=16, slots=5, stale_fails=request.param)
    state = heads.state
    lanes = [(slot, head) for slot in range(5) for head in range(9)]
    chosen = sorted(rng.permutation(len(lanes))[: rng.integers(2, len(lanes) + 1)])
    wishes = Wishes(2, len(lanes), torch.device("cpu"))
    asked = []
    for i, lane in enumerate(chosen):
        (slot, head), has_old_set, pairs = lanes[lane], bool(rng.random() < 0.7), int(rng.integers(1, 50))
        wish = wishes.wishes[LAYER, i]
        wish[SLOT], wish[HEAD], wish[HAS_OLD_SET], wish[PAIRS] = slot, head, has_old_set, pairs
        asked.append(Wish(slot, head, has_old_set, np.zeros((pairs, 2), np.uint32)))
    wishes.count[LAYER], wishes.number[LAYER] = len(chosen), NUMBER
    shares = (0.6, 0.1, 0.1, 0.1, 0.1)
    answers = np.array([STATUSES[rng.choice(5, p=shares)] for _ in chosen], np.uint32)
    expected = heads.reference()
    state.fault[:] = 0
    expected._waiting[LAYER] = asked
    cells, seen = read_only(TICKETS * len(lanes) * 16)
    cells[:] = rng.integers(0, 2**31, len(cells))
    cells = cells.reshape(TICKETS, len(lanes), 2)
    cells[:, :, 0] = NUMBER - TICKETS  # those of the ticket before
    ring = Completions(
        seen.view(TICKETS, len(lanes), 2), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int32),
    )  # fmt: skip
    return Waiting(heads, wishes, answers, expected, ring, cells)


def test_a_commit_is_the_reference_s(waiting: Waiting) -> None:
    wishes = waiting.wishes.wishes[LAYER, : waiting.count]
    wishes[:, [STATUS, AUX]] = torch.from_numpy(waiting.answers.astype(np.int32))
    commit(waiting.heads.state, LAYER, waiting.wishes, True, waiting.heads.context.stale_fails)
    waiting.expected.commit(LAYER, waiting.answers)
    same_state(waiting.heads.state, waiting.expected.context.state)
    assert not waiting.wishes.count.any()


def test_cells_that_lie_ready_are_committed(waiting: Waiting) -> None:
    for run in range(waiting.count):
        waiting.answer(run)
    waiting.arrive()
    waiting.check(waiting.answers)
    assert int(waiting.ring.error) == 0


def test_cells_are_waited_for_in_any_order(waiting: Waiting, rng: np.random.Generator) -> None:
    order, pauses = rng.permutation(waiting.count).tolist(), (rng.random(waiting.count) * 2e-3).tolist()

    def daemon() -> None:
        for run, pause in zip(order, pauses, strict=True):
            time.sleep(pause)
            waiting.answer(run)

    thread = threading.Thread(target=daemon)
    thread.start()
    waiting.arrive()
    thread.join()
    waiting.check(waiting.answers)


def test_a_deadline_poisons_the_ring_and_costs_once(waiting: Waiting) -> None:
    for run in range(waiting.count - 1):
        waiting.answer(run)
    started = time.monotonic_ns()
    waiting.arrive(SHORT_NS)
    assert time.monotonic_ns() - started >= SHORT_NS
    waiting.check(None)
    assert int(waiting.ring.error) == LATE.value
    assert int(waiting.ring.own_poison) == -1, "UINT64_MAX, which the daemon reads as poison"

    waiting.answer(waiting.count - 1)  # too late
    waiting.wishes.count[LAYER], waiting.wishes.number[LAYER] = waiting.count, NUMBER
    before = waiting.heads.state.parity.clone()
    waiting.arrive(LONG_NS)  # ends at the first look
    assert torch.equal(waiting.heads.state.parity, before)
    assert int(waiting.ring.error) == LATE.value, "what happened first is kept"


@pytest.mark.parametrize("whose", ["own_poison", "peer_poison"])
def test_an_answer_in_a_poisoned_ring_is_none(waiting: Waiting, whose: str) -> None:
    for run in range(waiting.count):
        waiting.answer(run)
    getattr(waiting.ring, whose)[0] = -1
    waiting.arrive()
    waiting.check(None)
    assert int(waiting.ring.error) == POISONED.value


def test_poison_ends_a_wait(waiting: Waiting) -> None:
    timer = threading.Timer(0.05, waiting.ring.peer_poison.fill_, (-1,))
    timer.start()
    waiting.arrive()
    timer.join()
    waiting.check(None)
    assert int(waiting.ring.error) == POISONED.value
    assert int(waiting.ring.own_poison) == 0


def test_wishes_without_a_ticket_are_not_waited_for(waiting: Waiting) -> None:
    waiting.wishes.number[LAYER] = 0
    waiting.arrive()
    waiting.check(None)
    assert int(waiting.ring.error) == 0


def test_nothing_is_waited_for_when_nothing_was_asked(waiting: Waiting) -> None:
    waiting.wishes.count[LAYER] = 0
    waiting.wishes.landed[LAYER] = torch.tensor([3, 1])
    before = waiting.heads.state.parity.clone()
    waiting.arrive()
    assert torch.equal(waiting.heads.state.parity, before)
    assert not waiting.heads.state.counters.any()
    assert waiting.wishes.landed[LAYER].tolist() == [0, 0]
