"""The programs of a launch as a device may run them: started in any order, and taking turns.

Each is a thread; one at a time runs, and hands over where programs can notice each other: at atomic operations, and
where it pauses. What they do in between nobody sees, so this is every order that a launch can tell apart.
"""

from __future__ import annotations

import inspect
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from triton.runtime import interpreter

TURN_S = 60


class Turns:
    """One of several threads runs. `pass_on` blocks until the caller's turn comes again."""

    def __init__(self, draw: random.Random) -> None:
        self._draw, self._waiting = draw, dict[int, threading.Event]()
        self._over = threading.Event()
        self.error: BaseException | None = None

    def run(self, programs: list[Any]) -> None:
        threads = [threading.Thread(target=self._program, args=(i, program)) for i, program in enumerate(programs)]
        self._waiting = {i: threading.Event() for i in range(len(programs))}
        for thread in threads:
            thread.start()
        self._next()
        assert self._over.wait(TURN_S), "programs wait for each other"
        for thread in threads:
            thread.join(TURN_S)
        if self.error is not None:
            raise self.error

    def _program(self, number: int, program: Any) -> None:
        self._wait(number)
        try:
            if self.error is None:
                program()
        except BaseException as error:
            self.error = error
        del self._waiting[number]
        self._next()

    def pass_on(self, number: int) -> None:
        self._waiting[number].clear()
        self._next()
        self._wait(number)
        if self.error is not None:
            raise self.error

    def _next(self) -> None:
        if self._waiting:
            self._waiting[self._draw.choice(list(self._waiting))].set()
        else:
            self._over.set()

    def _wait(self, number: int) -> None:
        if not self._waiting[number].wait(TURN_S):
            self.error = AssertionError("programs wait for each other")


class _Once:
    """A kernel to whoever looks at it. The first of its calls is all of them, the others are none."""

    def __init__(self, function: Any, all_of: Any) -> None:
        self.__name__, self.__globals__ = function.__name__, function.__globals__
        self.__signature__, self.__annotations__ = inspect.signature(function), function.__annotations__
        self._function, self._all_of, self._called = function, all_of, False

    def __call__(self, **arguments: Any) -> None:
        if not self._called:
            self._called = True
            self._all_of(self._function, arguments)


@contextmanager
def interleaved(seed: int, between: Callable[[], None] = lambda: None) -> Iterator[list[str]]:
    """Within, launches run so. Gives the names of the kernels that ran. `between` is called at each turn."""
    builder, ran = interpreter.interpreter_builder, list[str]()
    draw = random.Random(seed)
    kind = type(builder)
    atomics = {name: getattr(kind, name) for name in ("create_atomic_rmw", "create_atomic_cas")}
    here = threading.local()

    def take_turns() -> None:
        turns, number, place = getattr(here, "program", (None, 0, ()))
        if turns is not None:
            between()
            turns.pass_on(number)
            builder.set_grid_idx(*place)

    def shared(atomic: Any) -> Any:
        def called(*arguments: Any) -> Any:
            take_turns()
            result = atomic(*arguments)
            take_turns()
            return result

        return called

    def launched(self: Any, *arguments: Any, **options: Any) -> None:
        ran.append(self.fn.__name__.lstrip("_"))
        self.fn = _Once(self.fn, all_of)
        execute(self, *arguments, **options)

    def all_of(function: Any, arguments: dict[str, Any]) -> None:
        turns = Turns(draw)

        def program(number: int, place: tuple[int, ...]) -> None:
            here.program = turns, number, place
            builder.set_grid_idx(*place)
            function(**arguments)

        places = itertools.product(*map(range, builder.grid_dim))
        turns.run([partial(program, number, place) for number, place in enumerate(places)])

    execute = interpreter.GridExecutor.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", launched)
        for name, atomic in atomics.items():
            patch.setattr(kind, name, shared(atomic))
        yield ran
