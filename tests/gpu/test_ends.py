"""Both ends of a step on a device: which row it goes on with, and what it tells the host, replay after replay."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from decode_worker import _native
from decode_worker.engine.graphs import Graphs
from decode_worker.gpu.ends import NOBODY, DeviceEnds, words_of
from decode_worker.gpu.launch import recorded
from decode_worker.gpu.sync import LATE
from decode_worker.kernels.ends import Row
from decode_worker.kernels.sets import KERNELS
from decode_worker.model.sampling import GREEDY, Sampling, next_tokens
from decode_worker.policy.counters import Counters
from tests.support.device_tensor import DEVICE
from tests.support.pretend_gpu import PretendGpu, RecordedGraph
from tests.support.torch_calls import TorchCalls

from .twins import Twins

SLOTS, VOCAB, TABLE, STEPS = 4, 23, 101, 200


class LateGpu(PretendGpu):
    """Replays happen behind the host's back: at its third look at whether they have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[Callable[[], None]] = []
        self.asked = torch.empty(0)
        self.looks = 0
        self.interrupts = 0

    def graph(self) -> "Deferred":
        return Deferred(self, super().graph())

    def idle(self) -> bool:
        self.looks += 1
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        if self.pending and self.looks % 3 == 0:
            with _disable_current_modes():  # what it does is nobody's call
                self.pending.pop(0)()
        return not self.pending


class Deferred:
    def __init__(self, gpu: LateGpu, graph: RecordedGraph) -> None:
        self._gpu, self._graph = gpu, graph

    def capture(self, launch: Callable[[], None]) -> None:
        self._graph.capture(launch)

    def replay(self) -> None:
        gpu, asked = self._gpu, self._gpu.asked.clone()

        def replay() -> None:
            assert self._graph.replays < 0 or torch.equal(gpu.asked, asked), (
                "the host has changed what a step under way reads"
            )
            self._graph.replay()

        gpu.pending.append(replay)


class FunctionOfTokens:
    """Products whose logits depend on a row's token and position alone; and what goes wrong with rows, as told."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.tokens, self.positions = torch.zeros(2, SLOTS, dtype=torch.int64, device=DEVICE).unbind()
        self.logits = torch.full((SLOTS, VOCAB), torch.nan, device=DEVICE)
        self.table = torch.from_numpy(rng.normal(0, 2, (TABLE, VOCAB)).astype(np.float32))
        self.table[13, 5] = torch.nan
        self.its_table = self.table.to(DEVICE)
        self.fault = torch.zeros(SLOTS, dtype=torch.int32, device=DEVICE)
        self.error = torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def check(self, tokens: list[int], positions: list[int]) -> None:
        assert all(0 <= token < VOCAB for token in tokens)

    def finish(self, rows: int) -> None:
        self.logits[:rows].copy_(self.its_table[(31 * self.tokens[:rows] + 7 * self.positions[:rows]) % TABLE])

    def following(self, row: Row) -> int | None:
        logits = self.table[(31 * row.token + 7 * row.position) % TABLE]
        return next_tokens([row.sampling], [row.position + 1], logits[None])[0]


class Steps:
    """Steps of rows without layers."""

    def __init__(self, rng: np.random.Generator, gpu: PretendGpu) -> None:
        resident = np.array([[False, True], [False, False]])
        twins = Twins(rng, "qsac", gpu, slots=SLOTS, resident=resident)
        self.kernels = KERNELS["triton"](twins.triton.kernels.context)
        self.state, self.gpu = twins.triton.state, gpu
        self.state.cover[:] = torch.from_numpy(rng.integers(0, 1 << 20, self.state.cover.shape).astype(np.int32))
        self.state.parity[:] = torch.from_numpy(rng.integers(0, 2, self.state.parity.shape).astype(np.uint8))
        self.products = FunctionOfTokens(rng)
        self.ends: DeviceEnds = self.kernels.ends(self.products)  # type: ignore[arg-type, assignment]
        if isinstance(gpu, LateGpu):
            gpu.asked = self.ends._asked_rows
        self.graphs = Graphs(gpu)
        self.number = 0

    def launch(self, rows: int) -> None:
        for call in self.ends.first:
            call(rows)
        self.products.finish(rows)
        self.state.fault += self.products.fault
        self.kernels._error += self.products.error
        for call in self.ends.last:
            call(rows)

    def begin(self, wanted: list[Row]) -> None:
        rows = 1 << (len(wanted) - 1).bit_length()
        self.number += 1
        self.ends.place(wanted, rows, self.number)
        self.graphs.run(rows, lambda: self.launch(rows))

    def step(self, wanted: list[Row]) -> list[int | None]:
        self.begin(wanted)
        assert self.ends.read() == [int(self.products.fault[row.slot]) for row in wanted]
        assert self.ends.tokens() == [self.products.following(row) for row in wanted]
        return self.ends.tokens()

    def held(self) -> list[list[int]]:
        return self.ends._held.T.tolist()

    def copies(self) -> list[list[int] | None]:
        return [copy and words_of(copy) for copy in self.ends._copies]


@pytest.fixture(params=[PretendGpu, LateGpu], ids=["at-once", "late"])
def steps(request: pytest.FixtureRequest, rng: np.random.Generator) -> Steps:
    return Steps(rng, request.param())


def goes_on(row: Row, token: int | None) -> Row:
    return replace(row, token=token or 0, position=row.position + 1)


def a_row(rng: np.random.Generator, slot: int) -> Row:
    sampling = Sampling(float(rng.choice([0, 1])), seed=int(rng.integers(1 << 62)))
    return Row(slot, int(rng.integers(VOCAB)), int(rng.integers(1000)), sampling)


def test_hundreds_of_replays_leave_the_host_s_copy_what_the_device_has(rng, monkeypatch):
    """Rows join, leave, move, are forced to another token, and try again behind a fault."""
    steps = Steps(rng, LateGpu())
    for name in ("Event", "Stream"):  # none that is made within a capture is waited for outside
        monkeypatch.setattr(torch.cuda, name, None)
    rows = [a_row(rng, 0)]
    for _ in range(STEPS):
        steps.products.fault[:] = torch.from_numpy(rng.integers(1, 9, SLOTS) * (rng.random(SLOTS) < 0.03))
        tokens = steps.step(rows)
        for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            if not steps.products.fault[row.slot]:
                rows[i] = goes_on(row, token)
        free = sorted(set(range(SLOTS)) - {row.slot for row in rows})
        if free and rng.random() < 0.1:
            rows.insert(int(rng.integers(len(rows) + 1)), a_row(rng, int(rng.choice(free))))
        elif len(rows) > 1 and rng.random() < 0.1:
            del rows[int(rng.integers(len(rows)))]
        elif rng.random() < 0.1:
            rows[0] = replace(rows[0], token=int(rng.integers(VOCAB)))
        copies = steps.copies()
        assert copies == [held if copy else None for held, copy in zip(steps.held(), copies, strict=True)]
    assert Counters.of(steps.state.counters.tolist()).steps == STEPS == steps.ends.seen().counters.steps


def test_a_step_that_goes_on_with_its_rows_is_told_nothing(rng, steps):
    rows = [a_row(rng, 2), a_row(rng, 0), a_row(rng, 3)]
    for number in range(4):
        tokens = steps.step(rows)
        asked = steps.ends._asked_rows
        assert asked[-1].tolist() == ([0] * 4 if number else [1, 1, 1, 1]), "with padding"
        asked[:-1] = -99
        rows = [goes_on(row, token) for row, token in zip(rows, tokens, strict=True)]


def test_a_step_asks_torch_for_nothing(rng):
    """Neither copies to the device nor looks at it."""
    steps = Steps(rng, LateGpu())
    rows = [a_row(rng, 0), a_row(rng, 1)]
    for number in range(5):
        with TorchCalls() as calls:
            steps.begin(rows)
            steps.ends.read()
            tokens, seen = steps.ends.tokens(), steps.ends.seen()
        assert seen.covers.keys() == {0, 1}
        assert number < 2 or calls.names == ["aten.clone.default"], "of the test's own"
        rows = [goes_on(row, token) for row, token in zip(rows, tokens, strict=True)]
    with TorchCalls() as calls:
        steps.kernels.raise_for_error()
    assert "aten._local_scalar_dense.default" in calls.names, "a look would have been noticed"


def test_the_launches_do_not_depend_on_rows(rng):
    steps = Steps(rng, PretendGpu())
    traces = []
    for sampling in (GREEDY, Sampling(1.0, 0.9, 5)):
        steps.ends.place([replace(a_row(rng, slot), sampling=sampling) for slot in (0, 2)], 2, 1)
        with recorded() as launches:
            steps.launch(2)
        steps.ends.read()
        traces.append([(launch.name, launch.grid, *map(torch.is_tensor, launch.arguments)) for launch in launches])
    assert traces[0] == traces[1]
    assert [name for name, *_ in traces[0]] == ["_take", "_look", "_weigh", "_draw", "_advance"]


def test_a_row_that_joins_has_nothing_of_who_was_there_before(rng, steps):
    """Not its token, position, or number; nor has one that comes back behind steps of fewer rows."""
    first, second = a_row(rng, 0), a_row(rng, 1)
    for _ in range(3):
        steps.step([first, second])
        first, second = (goes_on(row, steps.products.following(row)) for row in (first, second))
    steps.step([first])
    first = goes_on(first, steps.products.following(first))
    steps.step([first, second])  # it has waited
    steps.step([goes_on(first, steps.products.following(first)), a_row(rng, 1)])
    steps.step([a_row(rng, 0), NOBODY_S_NEIGHBOUR])
    assert steps.held()[1][:3] == [3, steps.products.following(NOBODY_S_NEIGHBOUR), 1]


NOBODY_S_NEIGHBOUR = Row(3, 0, 0, GREEDY)


def test_padding_stays_padding(rng, steps):
    rows = [a_row(rng, slot) for slot in (0, 1, 2)]
    for _ in range(4):
        rows = [goes_on(row, token) for row, token in zip(rows, steps.step(rows), strict=True)]
        assert steps.held()[3] == words_of(NOBODY)
        assert steps.products.tokens[3] == steps.products.positions[3] == 0
        assert steps.kernels._rows.slots[3] == -1


def test_a_step_tells_covers_and_counters_without_a_look_at_the_state(rng, steps):
    steps.state.counters[:] = torch.from_numpy(rng.integers(0, 1 << 40, len(Counters.NAMES)))
    steps.step([a_row(rng, 3), a_row(rng, 1)])
    seen, selects = steps.ends.seen(), steps.state.resident == 0
    assert seen.covers == {slot: int(steps.state.current_cover(slot)[selects].min()) for slot in (1, 3)}
    assert seen.counters == Counters.of(steps.state.counters.tolist())


def test_without_heads_that_select_there_is_no_cover(rng, steps):
    steps.state.resident[:] = 1
    steps.step([a_row(rng, 3)])
    assert steps.ends.seen().covers == {}


def test_an_error_word_is_raised_once(rng, steps):
    row = a_row(rng, 0)
    for _ in range(3):
        steps.products.error[:] = LATE.value
        steps.begin([row])
        with pytest.raises(_native.RingTimeout):
            steps.ends.read()
        steps.products.error[:] = 0
        steps.step([row])


@pytest.mark.parametrize("settles", [True, False])
def test_an_interrupted_step_is_over_before_the_next_is_described(rng, settles):
    """Without that the device would read the next step's rows for the one that it still makes. What that one made of
    rows nobody knows: the same ones are described again."""
    gpu = LateGpu()
    steps = Steps(rng, gpu)
    rows = [a_row(rng, 0), a_row(rng, 1)]
    for _ in range(3):
        rows = [goes_on(row, token) for row, token in zip(rows, steps.step(rows), strict=True)]
    steps.begin(rows)
    assert gpu.pending
    gpu.interrupts = 1
    with pytest.raises(KeyboardInterrupt):
        steps.ends.read()
    assert gpu.pending
    if settles:
        steps.ends.settle(10.0)
        assert not gpu.pending
    for _ in range(3):
        rows = [goes_on(row, token) for row, token in zip(rows, steps.step(rows), strict=True)]


def test_a_kernel_that_fails_within_a_replay_is_noticed(rng, monkeypatch):
    gpu = LateGpu()
    steps = Steps(rng, gpu)
    rows = [a_row(rng, 0)]
    for _ in range(3):
        rows = [goes_on(rows[0], steps.step(rows)[0])]
    steps.begin(rows)
    gpu.pending[:] = [lambda: None]
    with pytest.raises(RuntimeError, match="ended without its result: a kernel failed; restart the worker"):
        steps.ends.read()

    def failed() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(gpu, "idle", failed)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        steps.ends.read()
    steps.ends.settle(1.0)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        steps.begin(rows)


def test_a_device_that_hangs_is_noticed(rng, monkeypatch):
    gpu = LateGpu()
    steps = Steps(rng, gpu)
    row = a_row(rng, 0)
    for _ in range(2):
        row = goes_on(row, steps.step([row])[0])
    monkeypatch.setattr(steps.ends, "_timeout_s", 0.05)
    monkeypatch.setattr(gpu, "idle", lambda: False)
    steps.ends._under_way = False
    steps.begin([row])
    with pytest.raises(RuntimeError, match=r"a step has not ended after .* the device hangs; restart"):
        steps.ends.read()
