"""Triton's interpreter, as tests run kernels in it."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def patched_once() -> Iterator[None]:
    """The interpreter looks through all of Triton's language at every call of a device function, tl.sum included. The
    first call of each function has done what there is to do; the others would take half of a test's time."""
    from triton.runtime import interpreter

    prepared: set[interpreter.InterpretedFunction] = set()
    call = interpreter.InterpretedFunction.__call__

    def called(self: interpreter.InterpretedFunction, *arguments: object, **options: object) -> object:
        if self in prepared:
            return self.rewrite()(*arguments, **options)
        prepared.add(self)
        return call(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", called)
        yield
