"""Prefills and seals go on in pieces beside others' steps: they change no bit, and given up they leave nothing."""

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from decode_worker import _native
from decode_worker.config import WorkerConfig
from decode_worker.engine import prefill, sealing
from decode_worker.engine.engine import Engine
from decode_worker.engine.sealing import SEAL_STEPS
from decode_worker.engine.session import Session
from decode_worker.kernels.base import Rows
from decode_worker.policy.plan import NO_PAIRS, RUN_DTYPE, Ticket
from decode_worker.scheduler import Finish, Request
from decode_worker.transport import Transport
from decode_worker.work import TICK_S, Work
from decode_worker.worker import Worker
from kvstore_service.client import AdminClient, StoreError
from tests.support.daemon_process import Daemon

from .conftest import LAYERS, EngineFactory, Expected, greedy, joined, random_ids, worker_settings

CHUNK = 256
PROMPT = 520
SEAL_DUE = 512 + 256 + 64  # position: the prompt stores 512 tokens, recent is 64
TAIL_FULL = 512 + 576
SEALING = {"policy": "qsac", "eta": 0.5, "budget": 64, "order": "token", "context": 2048}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "CHUNK_TOKENS", CHUNK)


def piece(work: Work[Any]) -> bool:
    """One piece; waits first if it must. True behind the last one."""
    while work.waiting:
        work.wait(TICK_S)
    return work.advance()


def require_nothing_left(daemon: Daemon, engine: Engine) -> None:
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        status = admin.get_status()
    assert (status.sessions, status.counters["uploads_open"], status.counters["bound_slots"]) == (0, 0, 0)
    assert engine.free_slots == engine.config.slots


# --- prefill ---


@pytest.mark.timeout(120)
@pytest.mark.parametrize("policy", ["full", "qsac"])
def test_prompts_in_turns_between_steps_are_computed_bit_by_bit_as_alone(
    daemon: Daemon, checkpoint: Path, policy: str
) -> None:
    stored, running = random_ids(3 * CHUNK, 1), random_ids(300, 2)
    prompts = [stored + random_ids(300, 3), random_ids(600, 4)]
    with joined(daemon, checkpoint, policy=policy, slots=3, storage="bfloat16") as engine:
        computed = [engine.compute_only(prompt) for prompt in prompts]
        engine.close_session(engine.prefill(stored)[0])
        session, logits = engine.prefill(running)
        alone = greedy(engine, session, logits, 30)
        engine.close_session(session)

        session, logits = engine.prefill(running)
        works, tokens = [engine.begin(prompt) for prompt in prompts], []
        while not all([piece(work) for work in works]):
            if len(tokens) < len(alone):
                tokens.append(int(logits.argmax()))
                logits = engine.step([session], tokens[-1:])[0]
        assert tokens == alone, "a running session does not see them"
        assert [work.result[0].reused for work in works] == [len(stored), 0]
        for work, expected in zip(works, computed, strict=True):
            assert torch.equal(work.result[1], expected)
        together = [greedy(engine, *work.result, 8) for work in works]
        for work in works:
            engine.close_session(work.result[0])
        assert together == [greedy(engine, *engine.prefill(prompt), 8) for prompt in prompts]


@pytest.mark.timeout(120)
def test_steps_lie_between_the_layers_of_a_sessions_first_sets(engine: EngineFactory) -> None:
    settings = {"policy": "qsac", "eta": 0.5, "layer0": "offloaded", "slots": 2}
    running, prompt = random_ids(300, 15), random_ids(4 * CHUNK, 16)  # no token of it lies behind its packs
    worker = engine(**settings)
    session, logits = worker.prefill(prompt)
    alone = greedy(worker, session, logits, 8)
    worker.close_session(session)
    neighbour, other = worker.prefill(running)
    begun, begin = [], worker.loop.kernels.begin

    def recorded(rows: Rows, step: int) -> None:
        begun.append(rows.slot[: rows.count].tolist())
        begin(rows, step)

    worker.loop.kernels.begin = recorded  # type: ignore[method-assign]
    work = worker.begin(prompt)
    while not piece(work):
        other = worker.step([neighbour], [int(other.argmax())])[0]
    session, logits = work.result
    first_sets = [i for i, slots in enumerate(begun) if slots == [session.slot]]
    assert len(first_sets) == LAYERS
    assert all(later - earlier > 1 for earlier, later in itertools.pairwise(first_sets))
    assert greedy(worker, session, logits, 8) == alone


@pytest.mark.timeout(120)
def test_a_prefill_that_is_given_up_anywhere_leaves_nothing(daemon: Daemon, checkpoint: Path) -> None:
    stored = random_ids(2 * CHUNK, 5)
    with joined(daemon, checkpoint) as engine:
        engine.close_session(engine.prefill(stored)[0])
        after, ended = 0, False
        while not ended:
            work = engine.begin(stored + random_ids(CHUNK + 40, 100 + after))
            ended = any(piece(work) for _ in range(after))
            work.give_up()
            if ended:
                engine.close_session(work.result[0])
            require_nothing_left(daemon, engine)
            after += 1 if after < 10 else after // 2
        assert after > 40, "it was given up at many places"


def side_by_side(works: list[Work[Any]]) -> None:
    """In turns, as a scheduler does it."""
    deadline = time.monotonic() + 60
    while not all([work.advance() for work in works]):
        assert time.monotonic() < deadline


@pytest.mark.timeout(120)
@pytest.mark.parametrize("first", ["ends", "is-given-up"])
def test_of_two_sessions_with_one_prompt_the_second_waits_for_what_the_first_computes(
    engine: EngineFactory, expected: Expected, first: str
) -> None:
    prompt, computed = random_ids(1100, 6), [0, 0]
    worker = engine(policy="infinigen", slots=2)

    def counter(number: int) -> Callable[[int, int], None]:
        def progress(done: int, total: int) -> None:
            computed[number] = total

        return progress

    works = [worker.begin(prompt, counter(number)) for number in range(2)]
    while not computed[0]:
        assert not piece(works[0])
    for _ in range(8):
        assert not piece(works[0])
        works[1].advance()
    assert computed == [1100 * LAYERS, 0]
    if first == "is-given-up":
        works.pop(0).give_up()
    side_by_side(works)
    assert computed[1] == (76 if first == "ends" else 1100) * LAYERS
    wanted = expected.tokens(prompt, 6, policy="infinigen", retriever="exact", budget=0.1)
    assert [greedy(worker, *work.result, 6) for work in works] == [wanted] * len(works)


@pytest.mark.timeout(120)
def test_a_prompt_waits_for_none_that_has_little_of_it_nor_for_what_the_store_has(engine: EngineFactory) -> None:
    stored, other = random_ids(2 * CHUNK, 17), random_ids(CHUNK, 18)
    worker = engine(policy="infinigen", slots=3)
    worker.close_session(worker.prefill(stored)[0])
    first = worker.begin([*stored, *other, *random_ids(600, 19)])
    while first.pieces < 3:
        piece(first)
    for late in ([*stored, *random_ids(40, 20)], [*stored, *other, *random_ids(1500, 21)]):
        second = worker.begin(late)
        while not piece(second):
            pass
        worker.close_session(second.result[0])
    assert not first.ended


@pytest.mark.timeout(60)
def test_a_prompt_that_is_computed_at_once_waits_for_none_that_nobody_goes_on_with(engine: EngineFactory) -> None:
    prompt, worker = random_ids(1100, 22), engine(policy="infinigen", slots=2)
    first = worker.begin(prompt)
    while first.pieces < 3:
        piece(first)
    session, logits = worker.prefill(prompt)
    assert torch.equal(logits, worker.compute_only(prompt))
    assert first.finish()[0].stored == session.stored == 1024


# --- deadlines ---


@pytest.mark.timeout(120)
def test_a_ticket_that_never_ends_is_waited_for_as_long_as_asked_and_given_up_at_its_deadline(
    daemon: Daemon, engine: EngineFactory
) -> None:
    worker = engine(wait_ms=1500)
    session, _ = worker.prefill(random_ids(900, 31))
    daemon.set_faults(stopped=True)
    (ticket, *_) = worker.policy.bind_tickets(session.slot, 4096, 1 << 16)
    posted = worker.transport.post(ticket)
    started = time.monotonic()
    posted.wait(0.2)
    assert 0.2 <= time.monotonic() - started < 1.0
    assert not posted.done()
    while not posted.done():
        assert time.monotonic() - started < 30
        time.sleep(0.01)
    assert time.monotonic() - started >= 1.5
    with pytest.raises(_native.RingTimeout, match="poisoned"):
        posted.check()
    assert worker.transport.bulk.poisoned


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["prompt", "seal"])
def test_work_that_is_only_polled_ends_when_its_daemon_stops(daemon: Daemon, engine: EngineFactory, kind: str) -> None:
    """Calls are answered, the copy thread is not there; nobody ever waits, and no step needs the store."""
    worker = engine(**SEALING | {"eta": -1.0}, wait_ms=1000)
    if kind == "seal":
        session, logits = worker.prefill(random_ids(PROMPT, 32))
        token = steps(worker, session, int(logits.argmax()), SEAL_DUE + 1 - PROMPT)
        daemon.set_faults(stopped=True)
        steps(worker, session, token, 1)
        assert session.sealing is not None
        work: Work[Any] = session.sealing
    else:
        work = worker.begin(random_ids(PROMPT, 33))
        while work.pieces < 2:
            piece(work)
        worker.transport.require_daemon = lambda: None  # type: ignore[method-assign]
        worker._prefill._alive = lambda: None
        daemon.set_faults(stopped=True)
    with pytest.raises(_native.RingTimeout):
        only_poll(work)
    assert worker.transport.bulk.poisoned


def only_poll(work: Work[Any]) -> None:
    deadline = time.monotonic() + 60
    while not work.advance():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class SlowRing:
    """Takes every ticket; those below `reached` have ended."""

    tickets, poisoned, posted, reached = 8, False, 0, 0

    def post(self, *_: object) -> int:
        self.posted += 1
        return self.posted

    def poll(self, seq: int) -> NDArray[np.uint32]:
        return np.full((1, 2), seq < self.reached, np.uint32)

    def poison(self) -> None:
        self.poisoned = True


@pytest.mark.timeout(120)
def test_a_ticket_behind_slow_ones_is_overdue_only_when_they_stand_still(
    monkeypatch: pytest.MonkeyPatch, daemon: Daemon, checkpoint: Path
) -> None:
    with joined(daemon, checkpoint, wait_ms=200) as worker, monkeypatch.context() as patch:
        require_patience(worker.transport, patch)


def require_patience(transport: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = SlowRing()
    monkeypatch.setattr(transport, "bulk", ring)
    posted = [transport.post(Ticket(_native.OP_STORE, 0, np.zeros(1, RUN_DTYPE), NO_PAIRS)) for _ in range(3)]
    time.sleep(0.3)  # nobody looks
    ring.reached = 2
    assert not posted[2].done()
    assert not ring.poisoned
    time.sleep(0.3)
    assert posted[2].done()
    with pytest.raises(_native.RingTimeout, match="ticket 3"):
        posted[2].check()
    assert ring.poisoned


# --- seals ---


def held(worker: Engine, name: str) -> tuple[threading.Event, threading.Event]:
    """(set when the call `name` is made, what it then waits for)."""
    made, go = threading.Event(), threading.Event()
    call: Callable[..., Any] = getattr(worker.client, name)

    def late(*arguments: Any, **named: Any) -> Any:
        made.set()
        assert go.wait(60)
        return call(*arguments, **named)

    setattr(worker.client, name, late)
    return made, go


def steps(worker: Engine, session: Session, token: int, count: int) -> int:
    """Greedy steps that wait for no seal; returns the next token."""
    for _ in range(count):
        token = int(worker.step([session], [token])[0].argmax())
    return token


@pytest.mark.timeout(120)
@pytest.mark.parametrize("call", ["reserve_pack", "seal_tail"])
def test_steps_go_on_while_the_store_takes_its_time_and_a_full_tail_waits(
    engine: EngineFactory, expected: Expected, call: str
) -> None:
    """Everything that is stored fits the budget: whenever N grows, the tokens are those of full attention."""
    prompt = random_ids(PROMPT, 7)
    worker = engine(**SEALING | {"policy": "infinigen", "budget": 4000})
    session, logits = worker.prefill(prompt, growth=1000)
    wanted = expected.tokens(prompt, TAIL_FULL - PROMPT + 40, policy="full")
    made, go = held(worker, call)
    token = steps(worker, session, int(logits.argmax()), TAIL_FULL - PROMPT)
    assert made.is_set()
    assert (session.position, session.stored) == (TAIL_FULL, 512), "every place of the tail was used meanwhile"
    assert [*session.tokens[PROMPT:], token] == wanted[: TAIL_FULL - PROMPT + 1]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(steps, worker, session, token, 39)
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        go.set()
        waiting.result(60)
    assert session.stored >= 768
    assert session.tokens[PROMPT:] == wanted[: len(session.tokens) - PROMPT]


@pytest.mark.timeout(120)
def test_n_grows_a_fixed_number_of_steps_after_a_seal_is_due(engine: EngineFactory) -> None:
    worker = engine(**SEALING)
    session, logits = worker.prefill(random_ids(PROMPT, 8))
    greedy(worker, session, logits, SEAL_DUE + SEAL_STEPS + 1 - PROMPT)
    assert (session.stored, session.sealing is not None and session.sealing.ended) == (512, True)
    steps(worker, session, 1, 1)
    assert session.stored == 768


CROWD, CROWD_PROMPT, CROWD_STEPS = 16, 1023, 48
CROWD_DUE = 768 + 256 + 64  # position: these prompts store 768 tokens


def continued(worker: Engine, sessions: list[Session], logits: list[torch.Tensor]) -> list[list[int]]:
    """[B, steps] tokens of sessions that step together until N has grown, beside a store that takes no time.

    Between two steps no seal does more than a piece, and at most half of them do one."""
    tokens = [[int(row.argmax())] for row in logits]
    pieces = [0] * len(sessions)
    for position in range(CROWD_PROMPT, CROWD_DUE + CROWD_STEPS + 4):
        rows = worker.step(sessions, [row[-1] for row in tokens])
        grown = 256 if position > CROWD_DUE + CROWD_STEPS else 0
        assert [session.stored for session in sessions] == [768 + grown] * len(sessions), position
        works = [session.sealing for session in sessions]
        done = [work.pieces if work is not None else 0 for work in works]
        extra = [max(0, now - before) for now, before in zip(done, pieces, strict=True)]
        assert max(extra) <= 1
        assert sum(extra) <= CROWD // 2
        pieces = done
        for work in works:
            while work is not None and work.waiting:
                work.wait(TICK_S)
        for row, logit in zip(tokens, rows, strict=True):
            row.append(int(logit.argmax()))
    return tokens


@pytest.mark.timeout(120)
def test_seals_that_are_due_together_are_as_punctual_as_one_alone(
    engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that has no time to spare beside steps."""
    monkeypatch.setattr(sealing, "STEP_SHARE", 0.0)
    monkeypatch.setattr(sealing, "SEAL_STEPS", CROWD_STEPS)
    worker = engine(**SEALING | {"context": 1280}, slots=CROWD)
    made = [worker.prefill(random_ids(CROWD_PROMPT, 40 + number)) for number in range(CROWD)]
    together = continued(worker, [session for session, _ in made], [logits for _, logits in made])
    for session, _ in made:
        worker.close_session(session)
    for number in range(0, CROWD, 5):
        session, logits = worker.prefill(random_ids(CROWD_PROMPT, 40 + number))
        assert continued(worker, [session], [logits]) == [together[number]]
        worker.close_session(session)


@pytest.mark.timeout(120)
def test_a_session_that_is_closed_during_its_seal_leaves_nothing(daemon: Daemon, checkpoint: Path) -> None:
    with joined(daemon, checkpoint, **SEALING) as worker:
        for pieces in range(0, 12, 2):
            session, logits = worker.prefill(random_ids(PROMPT, 20))
            token = steps(worker, session, int(logits.argmax()), SEAL_DUE + 1 - PROMPT)
            assert session.sealing is None
            steps(worker, session, token + pieces, 1)
            assert session.sealing is not None
            for _ in range(pieces):
                piece(session.sealing)
            if pieces % 4:
                worker.close_session(session)
            else:
                worker.give_up(session, StoreError("INTERNAL", "somebody gave up"))
            require_nothing_left(daemon, worker)


@pytest.mark.timeout(120)
def test_an_engine_is_closed_while_a_seal_is_under_way(daemon: Daemon, checkpoint: Path) -> None:
    with joined(daemon, checkpoint, **SEALING) as worker:
        session, logits = worker.prefill(random_ids(PROMPT, 9))
        made, go = held(worker, "seal_tail")
        steps(worker, session, int(logits.argmax()), SEAL_DUE + 20 - PROMPT)
        while not made.is_set():
            assert session.sealing is not None
            session.sealing.advance()
        go.set()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("store-calls")]


@pytest.mark.timeout(120)
def test_a_seal_that_fails_for_good_ends_its_own_generation_alone(daemon: Daemon, checkpoint: Path) -> None:
    requests = [Request(random_ids(PROMPT, seed), TAIL_FULL - PROMPT + 20) for seed in (10, 11)]
    with closing(Worker(WorkerConfig(**worker_settings(daemon, checkpoint, slots=2, **SEALING)))) as worker:
        scheduler, client = worker._scheduler, worker._engine.client
        made = [scheduler.submit(request) for request in requests]
        while any(generation.session is None for generation in made):
            scheduler.advance()
        victim, reserve = made[0].session, client.reserve_pack
        assert victim is not None

        def refuse(session_id: str, *arguments: Any) -> Any:
            if session_id == victim.session_id:
                raise StoreError("INTERNAL", "this session's packs cannot be written")
            return reserve(session_id, *arguments)

        client.reserve_pack = refuse  # type: ignore[method-assign]
        with pytest.raises(StoreError, match=r"the session's tail is full .* cannot be written"):
            list(scheduler.stream(made[0]))
        list(scheduler.stream(made[1]))
        assert (made[1].finish, made[1].produced) == (Finish.LENGTH, requests[1].new_tokens)
        assert worker._engine.free_slots == 2


@pytest.mark.timeout(120)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_logits_of_a_prefill_do_not_depend_on_its_threads(
    engine: EngineFactory, monkeypatch: pytest.MonkeyPatch, compute: str
) -> None:
    worker, prompt, logits = engine(compute=compute), random_ids(1100, 12), []
    for threads in (1, 2, 3):
        monkeypatch.setattr(prefill, "THREADS", threads)
        logits.append(worker.compute_only(prompt))
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
