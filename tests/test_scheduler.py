"""Requests that share an engine get what each would get alone, whoever joins, leaves, fails or is cancelled."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch

from decode_worker import scheduler as scheduler_module
from decode_worker._native import RingPoisoned
from decode_worker.model.sampling import Sampling, next_tokens
from decode_worker.model.tokenizer import TextStream
from decode_worker.scheduler import Finish, Generation, Output, Progress, Request, Scheduler
from decode_worker.stop_text import StopText
from decode_worker.turns import Turns
from decode_worker.work import Pieces, Work
from kvstore_service.client import StoreError

VOCAB = 97
SLOTS = 3


@pytest.fixture(autouse=True)
def whole_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps there is time for all pieces of a prompt, however busy the machine is."""
    monkeypatch.setattr(scheduler_module, "PIECES_S", 60.0)


@pytest.fixture
def piecemeal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps there is time for one piece."""
    monkeypatch.setattr(scheduler_module, "PIECES_S", 0.0)


@dataclass
class Held:
    """What a prompt waits for until the test lets it go."""

    free: bool = False
    waits: int = 0  # for it

    def done(self) -> bool:
        return self.free

    def wait(self, timeout_s: float) -> None:
        self.waits += 1
        time.sleep(timeout_s)


@dataclass(eq=False)
class Seat:
    tokens: list[int]
    open: bool = True
    reused: int = 0
    stored: int = 0


@dataclass
class Pretended:
    """An engine whose next token is a function of all tokens before; `faults` raise before a step takes any,
    `row_fault` is that of one session.

    `log`: prompts and steps in their order, a piece of a prompt per token of it.
    """

    slots: int = SLOTS
    piece_s: float = 0.0
    log: list[str] = field(default_factory=list)
    waits: dict[int, Held] = field(default_factory=dict)  # first token of a prompt -> what its second piece waits for
    faults: list[Callable[[Sequence[Seat]], Exception | None]] = field(default_factory=list)
    row_fault: Callable[[Seat], Exception | None] = lambda seat: None
    admitted: list[list[int]] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    seats: list[Seat] = field(default_factory=list)

    @property
    def free_slots(self) -> int:
        return self.slots - sum(seat.open for seat in self.seats)

    def begin(self, ids: Sequence[int], progress: Progress | None, growth: int) -> Work[tuple[Seat, torch.Tensor]]:
        if not ids:
            raise ValueError("the prompt is empty")
        return Work(self._pieces(list(ids), progress))

    def _pieces(self, ids: list[int], progress: Progress | None) -> Pieces[tuple[Seat, torch.Tensor]]:
        if not self.free_slots:
            raise StoreError("RESOURCE_EXHAUSTED", "no slot")
        self.admitted.append(ids)
        self.seats.append(seat := Seat(list(ids)))
        try:
            for done, token in enumerate(ids, 1):
                self.log.append(f"prompt {token}")
                if progress is not None:
                    progress(done, len(ids))
                time.sleep(self.piece_s)
                yield self.waits.get(token)
        except BaseException:
            seat.open = False
            raise
        return seat, logits_of(ids)

    def advance(
        self, sessions: Sequence[Seat], tokens: Sequence[int], samplings: Sequence[Sampling]
    ) -> tuple[list[int | None], list[Exception | None]]:
        assert len({id(seat) for seat in sessions}) == len(sessions) <= self.slots
        assert all(seat.open for seat in sessions)
        for fault in self.faults:
            if (error := fault(sessions)) is not None:
                raise error
        self.batches.append(len(sessions))
        self.log.append("step")
        faults = [self.row_fault(seat) for seat in sessions]
        for seat, token, error in zip(sessions, tokens, faults, strict=True):
            if error is None:
                seat.tokens.append(token)
        logits = torch.stack([logits_of(seat.tokens) for seat in sessions])
        return next_tokens(samplings, [len(seat.tokens) for seat in sessions], logits), faults

    def close_session(self, session: Seat) -> None:
        session.open = False

    def give_up(self, session: Seat, error: BaseException) -> None:
        session.open = False


def logits_of(tokens: Sequence[int]) -> torch.Tensor:
    """Several likely tokens, other ones for every sequence."""
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(hash(tuple(tokens)) % (1 << 62)))


class Words(TextStream):
    """Token 17 is the text `17 `."""

    def __init__(self) -> None:
        pass

    def push(self, token: int) -> str:
        return f"{token} "

    def finish(self) -> str:
        return ""


def scheduler_of(engine: Pretended) -> Scheduler[Seat]:
    return Scheduler(engine, Words, Turns())


def run_out(scheduler: Scheduler[Seat]) -> None:
    while scheduler.advance():
        pass


def tokens_of(generation: Generation[Seat]) -> list[int]:
    return tokens_in(generation.outputs)


def tokens_in(outputs: Iterable[Output]) -> list[int]:
    return [output.token for output in outputs if output.token is not None]


def alone(request: Request) -> list[int]:
    scheduler = scheduler_of(Pretended())
    return tokens_in(scheduler.stream(scheduler.submit(request)))


def random_request(chooser: random.Random) -> Request:
    sampling = Sampling(chooser.choice([0.0, 0.8]), seed=chooser.randrange(1000))
    prompt = [chooser.randrange(VOCAB) for _ in range(chooser.randint(1, 6))]
    stops = frozenset(chooser.sample(range(VOCAB), chooser.choice([0, 6])))
    return Request(prompt, chooser.randint(1, 12), sampling, chooser.randint(0, 2), stops)


@pytest.mark.parametrize("seed", range(20))
def test_a_crowd_gets_what_each_would_get_alone(seed: int) -> None:
    chooser = random.Random(seed)
    engine = Pretended()
    scheduler = scheduler_of(engine)
    made: list[Generation[Seat]] = []
    cancelled = set()
    for _ in range(200):
        if len(made) < 24 and chooser.random() < 0.3:
            made.append(scheduler.submit(random_request(chooser)))
        if made and chooser.random() < 0.05:
            victim = chooser.choice(made)
            if victim.finish is None:
                scheduler.cancel(victim)
                cancelled.add(id(victim))
        scheduler.advance()
    run_out(scheduler)
    for generation in made:
        expected, got = alone(generation.request), tokens_of(generation)
        if id(generation) in cancelled:
            assert (generation.finish, got) == (Finish.CANCELLED, expected[: len(got)]), seed
        else:
            full = len(got) == generation.request.new_tokens
            assert (generation.finish, got) == (Finish.LENGTH if full else Finish.STOP, expected), seed
    assert not any(seat.open for seat in engine.seats), seed
    assert max(engine.batches) > 1, seed
    assert not scheduler.busy, seed


def test_higher_priorities_are_admitted_first_and_equal_ones_in_their_order() -> None:
    engine = Pretended(slots=1)
    scheduler = scheduler_of(engine)
    for prompt, priority in (([1], 0), ([2], 1), ([3], 0), ([4], 1)):
        scheduler.submit(Request(prompt, 2, priority=priority))
    run_out(scheduler)
    assert engine.admitted == [[2], [4], [1], [3]]


def test_requests_join_while_others_decode() -> None:
    engine = Pretended()
    scheduler = scheduler_of(engine)
    first = scheduler.submit(Request([1], 10))
    for _ in range(4):
        scheduler.advance()
    second = scheduler.submit(Request([2], 3))
    run_out(scheduler)
    assert (tokens_of(first), tokens_of(second)) == (alone(first.request), alone(second.request))
    assert engine.batches == [1, 1, 1, 1, 2, 2, 1, 1, 1]


def test_steps_lie_between_the_pieces_of_a_prompt(piecemeal: None) -> None:
    engine = Pretended()
    scheduler = scheduler_of(engine)
    running = scheduler.submit(Request([1], 9))
    while running.session is None:
        scheduler.advance()
    engine.log.clear()
    long = scheduler.submit(Request([2, 3, 4, 5], 2))
    run_out(scheduler)
    pieces = [f"prompt {token}" for token in (2, 3, 4, 5)]
    assert engine.log[:8] == [entry for piece in pieces for entry in (piece, "step")]
    assert (tokens_of(running), tokens_of(long)) == (alone(running.request), alone(long.request))


def test_a_more_urgent_prompt_goes_before_one_that_has_begun(piecemeal: None) -> None:
    engine = Pretended()
    scheduler = scheduler_of(engine)
    scheduler.submit(Request([1, 2, 3], 1))
    scheduler.advance()
    for prompt, priority in (([4, 5], 1), ([6], 0)):
        scheduler.submit(Request(prompt, 1, priority=priority))
    run_out(scheduler)
    assert engine.log == [f"prompt {token}" for token in (1, 4, 5, 2, 3, 6)]


def test_a_prompt_that_waits_for_the_store_keeps_none_waiting(piecemeal: None) -> None:
    engine = Pretended(waits={1: Held()})
    scheduler = scheduler_of(engine)
    first, second = scheduler.submit(Request([1, 2], 3)), scheduler.submit(Request([3], 3))
    while second.finish is None:
        scheduler.advance()
    assert first.finish is None
    engine.waits[1].free = True
    run_out(scheduler)
    assert tokens_of(first) == alone(first.request)


def test_only_the_prompt_that_began_first_is_waited_for_and_only_while_all_wait(piecemeal: None) -> None:
    """The others may wait for it, and computing goes on behind a piece that ends in a wait."""
    engine = Pretended(waits={1: Held(), 3: Held()})
    scheduler = scheduler_of(engine)
    scheduler.submit(Request([1, 2], 3))
    scheduler.advance()
    assert engine.waits[1].waits == 0
    scheduler.submit(Request([3, 4], 3, priority=1))
    for _ in range(3):
        scheduler.advance()
    assert (engine.waits[1].waits, engine.waits[3].waits) == (2, 0)


def test_a_prompt_that_is_cancelled_gives_its_slot_back_at_once(piecemeal: None) -> None:
    engine = Pretended(slots=1)
    scheduler = scheduler_of(engine)
    cancelled, next_one = scheduler.submit(Request([1, 2, 3], 3)), scheduler.submit(Request([4], 3))
    scheduler.advance()
    assert engine.free_slots == 0
    scheduler.cancel(cancelled)
    assert engine.free_slots == 1
    run_out(scheduler)
    assert engine.log[:2] == ["prompt 1", "prompt 4"]
    assert (cancelled.finish, tokens_of(next_one)) == (Finish.CANCELLED, alone(next_one.request))


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("pieces_s", [0.0, 60.0])
def test_a_prompt_that_its_own_progress_cancels_gives_its_slot_back(
    monkeypatch: pytest.MonkeyPatch, at: int, pieces_s: float
) -> None:
    monkeypatch.setattr(scheduler_module, "PIECES_S", pieces_s)
    engine = Pretended(slots=1)
    scheduler = scheduler_of(engine)

    def progress(done: int, total: int) -> None:
        if done == at:
            scheduler.cancel_key("mine")

    generation = scheduler.submit(Request([1, 2, 3], 5, key="mine"), progress)
    assert [output.finish for output in scheduler.stream(generation)] == [Finish.CANCELLED]
    assert (engine.free_slots, scheduler.busy) == (1, False)
    assert len(tokens_in(scheduler.stream(scheduler.submit(Request([4], 5))))) == 5


def test_the_last_output_says_what_the_text_took() -> None:
    scheduler = scheduler_of(Pretended(piece_s=0.01))
    *outputs, last = scheduler.stream(scheduler.submit(Request([1, 2], 5)))
    assert [output.finish for output in outputs] == [None] * 5
    assert (last.token, last.finish) == (None, Finish.LENGTH)
    assert last.usage is not None
    assert (last.usage.prompt, last.usage.generated) == (2, 5)
    assert last.usage.prefill_s >= 0.02


def test_the_time_of_steps_is_theirs_alone_and_the_last_one_counts() -> None:
    """A stop token's step is a step; what the store takes to close a session is none."""
    usual = alone(Request([1, 2], 5))
    stop = usual[3]
    for stop_ids, generated, steps in (
        (frozenset[int](), 5, 4),
        (frozenset({stop}), usual.index(stop), usual.index(stop)),
    ):
        engine = Pretended()
        engine.close_session = lambda session: time.sleep(0.5)  # type: ignore[method-assign]
        scheduler = scheduler_of(engine)
        *_, last = scheduler.stream(scheduler.submit(Request([1, 2], 5, stop_ids=stop_ids)))
        assert last.usage is not None
        assert (last.usage.generated, last.usage.steps) == (generated, steps)
        assert last.usage.decode_s < 0.4


def test_turns_come_in_the_order_in_which_they_were_asked_for() -> None:
    turns, order = Turns(), []

    def take(number: int) -> None:
        with turns, turns:
            order.append(number)

    threads = []
    with turns:
        for number in range(8):
            threads.append(threading.Thread(target=take, args=(number,)))
            threads[-1].start()
            while len(turns._queue) <= number:
                time.sleep(0.001)
    for thread in threads:
        thread.join(30.0)
    assert order == list(range(8))


def test_who_asks_again_and_again_comes_behind_who_waits() -> None:
    turns, done, taken = Turns(), threading.Event(), threading.Event()

    def greedy() -> None:
        while not done.is_set():
            with turns:
                taken.set()

    thread = threading.Thread(target=greedy)
    thread.start()
    assert taken.wait(30.0)
    for _ in range(1000):
        with turns:
            pass
    done.set()
    thread.join(30.0)
    assert not turns.acquire(unless=lambda: True)


@pytest.mark.parametrize("at", ["queue", "lock"])
def test_a_dropped_stream_that_the_collector_closes_stops_nobody(at: str) -> None:
    """It runs in any thread at any moment: in one that stands in the queue, or amid a step."""
    turns = Turns()
    engine = Pretended()
    scheduler = Scheduler(engine, Words, turns)
    stream = scheduler.stream(scheduler.submit(Request([1], 50)))
    next(stream)
    streams, freed, had = [stream], [], []
    del stream

    def collect() -> bool:
        if streams:
            streams.pop().close()  # type: ignore[attr-defined]
            freed.append(engine.free_slots)
        return False

    def wait() -> None:
        if at == "lock":
            with turns:
                collect()
        else:
            assert turns.acquire(unless=collect)
            turns.release()
        had.append("waiter")

    def come() -> None:
        with turns:
            had.append("other")

    with turns:
        waiter = threading.Thread(target=wait, daemon=True)
        waiter.start()
        while not turns._queue:
            time.sleep(0.001)
        other = threading.Thread(target=come, daemon=True)
        other.start()
    waiter.join(10.0)
    other.join(10.0)
    assert had == ["waiter", "other"]
    assert freed == [SLOTS - 1], "not while somebody had the engine"
    assert (engine.free_slots, scheduler.busy) == (SLOTS, False)


def test_what_is_left_is_done_under_the_lock_and_at_once_where_it_is_free() -> None:
    turns, done = Turns(), []
    turns.leave(lambda: done.append(turns._owner))
    assert done == [threading.get_ident()]
    with turns, turns:
        turns.leave(lambda: done.append("late"))
        assert len(done) == 1
    assert done[1:] == ["late"]


def test_no_errand_is_lost_between_two_owners() -> None:
    turns, done = Turns(), []

    def work(number: int) -> None:
        for _ in range(500):
            with turns:
                pass
            turns.leave(lambda: done.append(number))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8), timeout=60))
    assert len(done) == 4000
    assert (turns._owner, len(turns._left)) == (None, 0)


def test_an_error_of_one_row_ends_that_row_alone() -> None:
    def damaged(seat: Seat) -> Exception | None:
        bad = seat.tokens[0] == 2 and len(seat.tokens) > 2
        return StoreError("DATA_LOSS", "a block failed its checksum") if bad else None

    engine = Pretended(row_fault=damaged)
    scheduler = scheduler_of(engine)
    made = [scheduler.submit(Request([number], 6)) for number in (1, 2, 3)]
    run_out(scheduler)
    assert [generation.finish for generation in made] == [Finish.LENGTH, Finish.FAILED, Finish.LENGTH]
    assert [tokens_of(made[0]), tokens_of(made[2])] == [alone(made[0].request), alone(made[2].request)]
    assert tokens_of(made[1]) == alone(made[1].request)[:3]
    with pytest.raises(StoreError, match="checksum"):
        list(scheduler.stream(made[1]))


@pytest.mark.parametrize("error", [RingPoisoned("gone"), StoreError("DEADLINE_EXCEEDED", "silent")])
def test_a_lost_store_ends_all_at_once(error: Exception) -> None:
    calls = []

    def lost(seats: Sequence[Seat]) -> Exception | None:
        calls.append(len(seats))
        return error

    engine = Pretended()
    scheduler = scheduler_of(engine)
    made = [scheduler.submit(Request([number], 6)) for number in (1, 2)]
    for _ in made:
        scheduler.advance()
    engine.faults.append(lost)
    scheduler.advance()
    assert [generation.finish for generation in made] == [Finish.FAILED] * 2
    assert calls == [2], "nobody is tried alone after the store has gone"
    assert not any(seat.open for seat in engine.seats)
    for generation in made:
        with pytest.raises(type(error)):
            list(scheduler.stream(generation))


def test_a_prompt_that_cannot_run_is_its_callers_error_alone() -> None:
    scheduler = scheduler_of(Pretended(slots=1))
    bad, good = scheduler.submit(Request([], 2)), scheduler.submit(Request([1], 2))
    with pytest.raises(ValueError, match="empty"):
        list(scheduler.stream(bad))
    assert len(tokens_in(scheduler.stream(good))) == 2


def test_no_slot_and_nobody_who_could_free_one_is_an_error_and_no_wait() -> None:
    scheduler = scheduler_of(Pretended(slots=0))
    with pytest.raises(StoreError, match="no slot"):
        list(scheduler.stream(scheduler.submit(Request([1], 2))))


def test_a_closed_stream_frees_its_slot() -> None:
    engine = Pretended(slots=1)
    scheduler = scheduler_of(engine)
    generation = scheduler.submit(Request([1], 10))
    stream = scheduler.stream(generation)
    next(stream)
    stream.close()
    assert (generation.finish, engine.free_slots) == (Finish.CANCELLED, 1)


def test_an_interrupted_step_is_an_error_for_all_that_took_part() -> None:
    def interrupt(seats: Sequence[Seat]) -> Exception | None:
        raise KeyboardInterrupt

    engine = Pretended(slots=2)
    scheduler = scheduler_of(engine)
    made = [scheduler.submit(Request([number], 6)) for number in (1, 2, 3)]
    scheduler.advance()
    scheduler.advance()
    engine.faults.append(interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(scheduler.stream(made[0]))
    engine.faults.clear()
    with pytest.raises(RuntimeError, match="interrupted"):
        list(scheduler.stream(made[1]))
    assert len(tokens_in(scheduler.stream(made[2]))) == 6
    assert engine.free_slots == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StoreError("UNAVAILABLE", "gone")], ids=["interrupt", "error"])
def test_a_close_that_is_cut_short_loses_no_slot(error: BaseException) -> None:
    class Closing(Pretended):
        def close_session(self, session: Seat) -> None:
            raise error

    engine = Closing(slots=1)
    scheduler = scheduler_of(engine)
    with pytest.raises(type(error)):
        list(scheduler.stream(scheduler.submit(Request([1], 2))))
    assert engine.free_slots == 1
    assert not scheduler.busy


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("no such token")], ids=["interrupt", "error"])
def test_no_token_is_fed_twice_when_taking_one_is_cut_short(error: BaseException) -> None:
    class Cut(Words):
        pushed = 0

        def push(self, token: int) -> str:
            Cut.pushed += 1
            if Cut.pushed == 7:
                raise error
            return super().push(token)

    scheduler = Scheduler(Pretended(), Cut, Turns())
    made = [scheduler.submit(Request([first], 10)) for first in (1, 2, 3)]
    with pytest.raises(type(error)):
        for _ in scheduler.stream(made[0]):
            pass
    run_out(scheduler)
    for generation in made:
        got, expected = tokens_of(generation), alone(generation.request)
        assert got == expected[: len(got)]
        assert (generation.error is None) == (got == expected)
    assert [g.error is None for g in made].count(True) == (2 if isinstance(error, Exception) else 0)


def test_keys_name_generations() -> None:
    scheduler = scheduler_of(Pretended(slots=1))
    made = [scheduler.submit(Request([1], 4, key=key)) for key in ("a", "", "b", "")]
    with pytest.raises(ValueError, match="another request's"):
        scheduler.submit(Request([2], 4, key="b"))
    scheduler.advance()
    for key in ("a", "b", "", "nobody"):
        scheduler.cancel_key(key)
    made.append(scheduler.submit(Request([2], 4, key="b")))
    run_out(scheduler)
    ends = [generation.finish for generation in made]
    assert ends == [Finish.CANCELLED, Finish.LENGTH, Finish.CANCELLED, Finish.LENGTH, Finish.LENGTH]


def test_a_request_asks_for_something() -> None:
    with pytest.raises(ValueError, match="new_tokens is 0"):
        Request([1], 0)


def test_threads_that_wait_drive_each_other() -> None:
    engine = Pretended()
    scheduler = scheduler_of(engine)
    requests = [Request([number], 30, Sampling(0.7, seed=number)) for number in range(12)]
    got: dict[int, list[int]] = {}

    def work(number: int) -> None:
        got[number] = tokens_in(scheduler.stream(scheduler.submit(requests[number])))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert got == {number: alone(request) for number, request in enumerate(requests)}


def test_a_stream_gets_its_outputs_while_another_waits_for_a_slot() -> None:
    """Whoever drives the engine for a request that cannot begin yet keeps nothing from those that run."""
    passed = threading.Semaphore(0)

    def slow(seats: Sequence[Seat]) -> Exception | None:
        assert passed.acquire(timeout=30.0)
        return None

    engine = Pretended(slots=1, faults=[slow])
    scheduler = scheduler_of(engine)
    running = scheduler.submit(Request([1], 6))
    passed.release()
    scheduler.advance()
    waiting = scheduler.submit(Request([2], 2))
    driver = threading.Thread(target=lambda: list(scheduler.stream(waiting)))
    driver.start()
    stream = scheduler.stream(running)
    next(stream)
    for _ in range(4):
        next(stream)  # a step is under way meanwhile
        passed.release()
    assert len(tokens_in(stream)) == 1
    passed.release()
    driver.join(30.0)
    assert waiting.finish is Finish.LENGTH


def test_a_text_ends_before_its_stop_string() -> None:
    request = Request([1], 12)
    tokens = alone(request)
    text = "".join(f"{token} " for token in tokens)
    stop = text[len(f"{tokens[0]} {tokens[1]} ") + 1 :][:5]
    expected = text[: text.index(stop)]
    scheduler = scheduler_of(Pretended())
    generation = scheduler.submit(Request([1], 12, stop=("nowhere", stop)))
    outputs = list(scheduler.stream(generation))
    assert ("".join(output.text for output in outputs), generation.finish) == (expected, Finish.STOP)


def test_what_may_begin_a_stop_string_is_shown_at_the_end() -> None:
    tokens = alone(Request([1], 3))
    held = f"{tokens[2]} "
    scheduler = scheduler_of(Pretended())
    outputs = list(scheduler.stream(scheduler.submit(Request([1], 3, stop=(f"{held}x",)))))
    assert outputs[-1] == Output(None, held, Finish.LENGTH)
    assert "".join(output.text for output in outputs) == "".join(f"{token} " for token in tokens)


@pytest.mark.parametrize("seed", range(50))
def test_stop_texts_do_not_depend_on_how_a_text_comes(seed: int) -> None:
    chooser = random.Random(seed)
    text = "".join(chooser.choices("ab", k=chooser.randint(0, 40)))
    stops = ["".join(chooser.choices("ab", k=chooser.randint(2, 8))) for _ in range(chooser.randint(0, 3))]
    expected = text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]
    stop_text, shown, rest = StopText(stops), "", text
    while rest and not stop_text.reached:
        count = chooser.randint(1, 5)
        shown, rest = shown + stop_text.push(rest[:count]), rest[count:]
    assert stop_text.reached == (expected != text), (seed, text, stops)
    assert shown + stop_text.finish() == expected, (seed, text, stops)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopText(["a", ""])
