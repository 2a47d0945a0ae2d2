"""Work that decode steps need not wait for, a bounded piece at a time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from typing import Generic, Protocol, TypeVar

TICK_S = 0.05

T = TypeVar("T")


class Awaited(Protocol):
    """What a piece of work ends with when the next one has to wait for something."""

    def done(self) -> bool:
        """Whether the work can go on. Never blocks."""

    def wait(self, timeout_s: float) -> None:
        """Returns when it is done, or after `timeout_s`."""


Pieces = Generator[Awaited | None, None, T]


class Abandoned(Exception):
    """Thrown into work that nobody wants any more."""


class Work(Generic[T]):
    """One thing under way. Not thread-safe. `within`: entered for every piece, and never kept between two.

    `pieces`: how many are done, without those that ended in a wait."""

    def __init__(
        self,
        pieces: Pieces[T],
        within: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self._pieces = pieces
        self._within = within
        self._awaited: Awaited | None = None
        self._result: T | None = None
        self._error: BaseException | None = None
        self.pieces = 0
        self.ended = False

    @property
    def waiting(self) -> bool:
        """Whether there is nothing to do yet."""
        return self._awaited is not None and not self._awaited.done()

    @property
    def result(self) -> T:
        """Of work that has ended."""
        assert self.ended
        return self._result  # type: ignore[return-value]  # T may be None

    def advance(self, budget_s: float = 0.0) -> bool:
        """Does at least one piece, and more until `budget_s` is over; none while it waits. True once all are done.

        What a piece raises ends the work, and is raised again by whoever goes on with it."""
        if self._error is not None:
            raise self._error
        until_s = time.monotonic() + budget_s
        while not self.ended and not self.waiting:
            try:
                with self._within():
                    self._awaited = next(self._pieces)
                self.pieces += self._awaited is None
            except StopIteration as end:
                self._result, self.ended = end.value, True
            except BaseException as error:
                self._error = error
                raise
            if time.monotonic() >= until_s:
                break
        return self.ended

    def wait(self, timeout_s: float) -> None:
        """Returns when there is something to do, or after `timeout_s`."""
        if self._awaited is not None:
            self._awaited.wait(timeout_s)

    def finish(self) -> T:
        """Does all that is left, and waits in between."""
        try:
            while not self.advance(TICK_S):
                self.wait(TICK_S)
        except BaseException as error:
            self.give_up(error)
            raise
        return self.result

    def give_up(self, error: BaseException | None = None) -> None:
        """Ends it because of `error`; when this returns it has given back what it held. Idempotent."""
        reason = error if error is not None and not isinstance(error, Exception) else Abandoned()
        with contextlib.suppress(Exception, type(reason)):
            self._pieces.throw(reason)


def finish(pieces: Pieces[T]) -> T:
    """Does all pieces at once."""
    return Work(pieces).finish()


class Pause:
    """Nothing to do for `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._until_s = time.monotonic() + seconds

    def done(self) -> bool:
        return time.monotonic() >= self._until_s

    def wait(self, timeout_s: float) -> None:
        time.sleep(max(0.0, min(timeout_s, self._until_s - time.monotonic())))
