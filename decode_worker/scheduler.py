"""Continuous batching: requests join and leave one engine between decode steps, a token of each per step.

Between two steps the most urgent prompt gets a bounded time of its prefill, so that none holds up those that decode.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, Protocol, TypeVar

import torch

from decode_worker.model.sampling import Sampling, next_tokens
from decode_worker.model.tokenizer import TextStream
from decode_worker.stop_text import StopText
from decode_worker.turns import Turns

PIECES_S = 0.02  # of prefill between two steps, or one piece that takes longer


class HasTokens(Protocol):
    """A session, as far as a scheduler looks at it. `reused`: of the prompt's tokens, not computed."""

    reused: int

    @property
    def stored(self) -> int: ...


Session = TypeVar("Session", bound=HasTokens)
Progress = Callable[[int, int], None]


SessionOf = TypeVar("SessionOf", covariant=True)


class Prompt(Protocol[SessionOf]):
    """A prefill in pieces (decode_worker.work.Work)."""

    @property
    def waiting(self) -> bool: ...

    @property
    def result(self) -> tuple[SessionOf, torch.Tensor]: ...

    def advance(self, budget_s: float) -> bool: ...

    def wait(self, timeout_s: float) -> None: ...

    def give_up(self, error: BaseException | None) -> None: ...


class Engine(Protocol[Session]):
    """What is scheduled (decode_worker.engine.engine.Engine)."""

    @property
    def free_slots(self) -> int: ...

    def begin(self, ids: Sequence[int], progress: Progress | None, growth: int) -> Prompt[Session]: ...

    def advance(
        self, sessions: Sequence[Session], tokens: Sequence[int], samplings: Sequence[Sampling]
    ) -> tuple[list[int | None], list[Exception | None]]: ...

    def close_session(self, session: Session) -> None: ...

    def give_up(self, session: Session, error: BaseException) -> None: ...


@dataclass(frozen=True)
class Request:
    """A prompt to continue by at most `new_tokens`, from 1 on. `priority`: higher ones are admitted first, equal ones
    in their order. The text ends before a token of `stop_ids` and before any of the strings `stop`. `key`: its name, by
    which it can be cancelled."""

    prompt: Sequence[int]
    new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    priority: int = 0
    stop_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    key: str = ""

    def __post_init__(self) -> None:
        if self.new_tokens < 1:
            raise ValueError(f"new_tokens is {self.new_tokens}; ask for at least 1")


class Finish(Enum):
    LENGTH = "length"  # new_tokens were generated
    STOP = "stop"  # a stop token or a stop string
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True)
class Usage:
    """What a generation took, in tokens and seconds: waiting for its prefill to begin, the prefill, its steps.

    `reused`: of the prompt's tokens, read from the store instead of computed; `stored`: of all, in packs at the end.
    `steps`: one for each token behind the first, and for a token that ended the text, which is not `generated`."""

    prompt: int
    reused: int
    stored: int
    generated: int
    steps: int
    waited_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True)
class Output:
    """A generated token and the text that can be shown with it. The last one of a text has no token, but says how it
    ended and what it took."""

    token: int | None
    text: str
    finish: Finish | None = None
    usage: Usage | None = field(default=None, compare=False)


@dataclass(eq=False)
class Generation(Generic[Session]):
    """What has become of a request. Fields are the scheduler's; `finish` is None until it has ended."""

    request: Request
    stream: TextStream
    progress: Progress | None
    stop_text: StopText
    outputs: deque[Output] = field(default_factory=deque)  # not taken yet
    produced: int = 0
    steps: int = 0
    last: int = -1  # the latest token, which no step has processed yet
    turn: tuple[int, int] = (0, 0)  # the lower, the sooner its prompt is computed
    work: Prompt[Session] | None = None  # its prefill, once it has begun
    session: Session | None = None
    submitted_s: float = field(default_factory=time.monotonic)
    begun_s: float | None = None
    prefilled_s: float | None = None
    ending: tuple[Finish, BaseException | None] | None = None  # asked for within a piece of its own prompt
    finish: Finish | None = None
    error: Exception | None = None


class Scheduler(Generic[Session]):
    """Runs no thread of its own: whoever waits for a token drives the engine, for everybody. Thread-safe.

    `lock` is held while the engine computes, by whoever else uses the engine too."""

    def __init__(self, engine: Engine[Session], text_stream: Callable[[], TextStream], lock: Turns) -> None:
        self._lock = lock
        self._engine = engine
        self._text_stream = text_stream
        self._arrivals = itertools.count()
        self._prompts: list[Generation[Session]] = []  # whose prefill has not ended, the most urgent first
        self._running: list[Generation[Session]] = []
        self._in_piece: Generation[Session] | None = None  # whose prompt is being computed at the moment

    @property
    def busy(self) -> bool:
        """Whether any generation has not ended."""
        return bool(self._open())

    def submit(self, request: Request, progress: Progress | None = None) -> Generation[Session]:
        """`progress(done, total)` of its prefill is called by whoever drives the engine then. ValueError for a key that
        another request has now."""
        generation = Generation[Session](request, self._text_stream(), progress, StopText(request.stop))
        with self._lock:
            if request.key and any(other.request.key == request.key for other in self._open()):
                raise ValueError(f"key {request.key!r} is another request's, which has not ended; use a new one")
            generation.turn = (-request.priority, next(self._arrivals))
            bisect.insort(self._prompts, generation, key=lambda other: other.turn)
        return generation

    def stream(self, generation: Generation[Session]) -> Iterator[Output]:
        """The outputs of one generation as they come; its own error is raised behind them.

        A stream that is closed or interrupted cancels its generation, without a wait: the collector may be who closes
        it."""
        try:
            while self._await_output(generation):
                yield generation.outputs.popleft()
        except BaseException as error:
            reason = None if isinstance(error, GeneratorExit) else error
            self._lock.leave(lambda: self.cancel(generation, reason))
            raise
        if generation.error is not None:
            raise generation.error

    def _await_output(self, generation: Generation[Session]) -> bool:
        """Drives the engine until there is one, or sleeps while another thread does. False behind the last one."""

        def moved() -> bool:
            return bool(generation.outputs) or generation.finish is not None

        while not moved():
            if self._lock.acquire(unless=moved):
                try:
                    self.advance()
                finally:
                    self._lock.release()
        return bool(generation.outputs)

    def advance(self) -> bool:
        """Computes pieces of one prompt for up to PIECES_S, then makes one step of all that run. False if there was
        nothing to do."""
        with self._lock:
            busy = self.busy
            self._prefill()
            self._step()
            return busy

    def cancel(self, generation: Generation[Session], error: BaseException | None = None) -> None:
        """Ends a generation and frees its slot, whatever it was doing; idempotent. `error`: why it is abandoned."""
        with self._lock:
            if generation.finish is not None:
                return
            self._end(generation, Finish.CANCELLED, error)

    def end(self, error: Exception) -> None:
        """Fails whatever has not ended."""
        with self._lock:
            for generation in self._open():
                self._fail(generation, error)

    def cancel_key(self, key: str) -> None:
        """Cancels the generation whose request has this key, if it runs or waits; not one without a key."""
        with self._lock:
            for generation in self._open():
                if key and generation.request.key == key:
                    self.cancel(generation)

    def _open(self) -> list[Generation[Session]]:
        return [*self._running, *self._prompts]

    # --- prompts ---

    def _prefill(self) -> None:
        """Goes on with the most urgent prompt that has something to do."""
        generation = self._most_urgent()
        if generation is None:
            return
        request = generation.request
        try:
            if generation.work is None:
                generation.begun_s = time.monotonic()
                generation.work = self._engine.begin(request.prompt, generation.progress, request.new_tokens)
            work, outer = generation.work, self._in_piece
            self._in_piece = generation
            try:
                if work.waiting and not self._running:
                    work.wait(PIECES_S)
                computed = work.advance(PIECES_S)
            finally:
                self._in_piece = outer
            if computed:
                generation.session, logits = work.result
                generation.work, generation.prefilled_s = None, time.monotonic()
            if generation.ending is not None:
                self._end(generation, *generation.ending)
                return
            if not computed:
                return
            self._prompts.remove(generation)
            self._running.append(generation)
            self._take(generation, *next_tokens([request.sampling], [len(request.prompt)], logits[None]))
        except BaseException as error:
            self._fail(generation, error)
            if not isinstance(error, Exception):
                raise

    def _most_urgent(self) -> Generation[Session] | None:
        """If all that have begun wait, the one that did first: others may wait for its end."""
        # Within a piece, whose `progress` may ask for more, that piece's own prompt cannot go on.
        prompts = [generation for generation in self._prompts if generation is not self._in_piece]
        begun = [generation for generation in prompts if generation.work is not None]
        # Without a slot and with nobody who could free one the engine says why there is none.
        may_begin = self._engine.free_slots > 0 or not (self._running or begun)
        for generation in prompts:
            if not generation.work.waiting if generation.work is not None else may_begin:
                return generation
        return min(begun, key=lambda generation: generation.begun_s or 0.0, default=None)

    # --- a step ---

    def _step(self) -> None:
        untaken = deque(self._running)
        if not untaken:
            return
        try:
            tokens, faults = self._engine.advance(
                [_session(g) for g in untaken], [g.last for g in untaken], [g.request.sampling for g in untaken]
            )
            for token, fault in zip(tokens, faults, strict=True):
                if fault is None:
                    untaken[0].steps += 1
                    self._take(untaken[0], token)
                else:
                    self._fail(untaken[0], fault)
                untaken.popleft()
        except BaseException as error:
            # Their sessions may have the token of this step: another step with it would feed it twice.
            for generation in untaken:
                self._fail(generation, error)
            if not isinstance(error, Exception):
                raise

    def _take(self, generation: Generation[Session], token: int | None) -> None:
        """Goes on with the next token and says what of it can be shown; what it raises is this generation's alone."""
        try:
            self._go_on(generation, token)
        except Exception as error:
            self._fail(generation, error)

    def _go_on(self, generation: Generation[Session], token: int | None) -> None:
        request = generation.request
        if token is None:
            raise ValueError("logits are not finite; the model overflowed or its weights are bad")
        if token in request.stop_ids:
            self._end(generation, Finish.STOP)
            return
        generation.last = token
        generation.produced += 1
        text = generation.stop_text.push(generation.stream.push(token))
        generation.outputs.append(Output(token, text))
        if generation.stop_text.reached:
            self._end(generation, Finish.STOP)
        elif generation.produced == request.new_tokens:
            self._end(generation, Finish.LENGTH)

    # --- ends ---

    def _fail(self, generation: Generation[Session], error: BaseException) -> None:
        if generation.finish is not None:
            return
        generation.error = error if isinstance(error, Exception) else RuntimeError("generation was interrupted")
        self._end(generation, Finish.FAILED, error)

    def _end(self, generation: Generation[Session], finish: Finish, error: BaseException | None = None) -> None:
        """Frees the slot. What the store says to that is the generation's error, unless it has a better one.

        Asked for by the prompt's own `progress`, it comes behind the piece: none is given up from within."""
        if generation is self._in_piece:
            generation.ending = generation.ending or (finish, error)
            return
        ended_s = time.monotonic()
        self._running = [other for other in self._running if other is not generation]
        self._prompts = [other for other in self._prompts if other is not generation]
        (session, generation.session), (work, generation.work) = (generation.session, None), (generation.work, None)
        if work is not None:
            work.give_up(error)
        if session is not None:
            self._close(generation, session, error)
        rest = ""
        if not generation.stop_text.reached:
            rest = generation.stop_text.push(generation.stream.finish()) + generation.stop_text.finish()
        if generation.error is None:
            generation.outputs.append(Output(None, rest, finish, _usage(generation, session, ended_s)))
        elif rest:
            generation.outputs.append(Output(None, rest))
        generation.finish = finish

    def _close(self, generation: Generation[Session], session: Session, error: BaseException | None) -> None:
        if error is not None:
            self._engine.give_up(session, error)
            return
        try:
            self._engine.close_session(session)
        except BaseException as closing:
            self._engine.give_up(session, closing)
            if not isinstance(closing, Exception):
                raise
            generation.error = closing


def _usage(generation: Generation[Session], session: Session | None, ended_s: float) -> Usage:
    begun_s = ended_s if generation.begun_s is None else generation.begun_s
    prefilled_s = ended_s if generation.prefilled_s is None else generation.prefilled_s
    return Usage(
        prompt=len(generation.request.prompt),
        reused=session.reused if session is not None else 0,
        stored=session.stored if session is not None else 0,
        generated=generation.produced,
        steps=generation.steps,
        waited_s=begun_s - generation.submitted_s,
        prefill_s=prefilled_s - begun_s,
        decode_s=ended_s - prefilled_s,
    )


def _session(generation: Generation[Session]) -> Session:
    assert generation.session is not None
    return generation.session
