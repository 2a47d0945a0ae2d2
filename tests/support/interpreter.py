"""Triton's interpreter, as tests run kernels in it: sooner, and with an eye on what they touch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest


class OutOfBounds(AssertionError):
    """A kernel has touched memory that it was not given. On a device nobody would have noticed."""


@contextmanager
def prepared_once() -> Iterator[None]:
    """The interpreter looks through all of Triton's language at every call of a device function, tl.sum included. The
    first call of each function has done what there is to do; the others would take half of a test's time."""
    from triton.runtime import interpreter

    prepared: set[Any] = set()
    call = interpreter.InterpretedFunction.__call__

    def called(self: Any, *arguments: object, **options: object) -> object:
        if self in prepared:
            return self.rewrite()(*arguments, **options)
        prepared.add(self)
        return call(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", called)
        yield


@pytest.fixture
def patched_once() -> Iterator[None]:
    with prepared_once():
        yield


@pytest.fixture
def bounded() -> Iterator[None]:
    """Loads and stores of a launch stay within the tensors that it was given."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    run, load, store = interpreter.GridExecutor.__call__, builder.create_masked_load, builder.create_masked_store
    starts = ends = np.empty(0, np.uint64)

    def launched(self: Any, *arguments: Any, **options: Any) -> None:
        nonlocal starts, ends
        tensors = [t for t in (*arguments, *options.values()) if hasattr(t, "data_ptr") and t.numel()]
        spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors)
        starts, ends = np.array(spans, np.uint64).T
        ends = np.maximum.accumulate(ends)  # some lie within others
        run(self, *arguments, **options)

    def check(pointers: Any, mask: Any) -> None:
        at = np.broadcast_to(pointers.data, mask.data.shape)[mask.data.astype(bool)]
        before = np.searchsorted(starts, at, side="right")
        inside = (before > 0) & (at < ends[before - 1])
        if not inside.all():
            raise OutOfBounds(f"{(~inside).sum()} of {len(at)} pointers lie in none of {len(starts)} tensors")

    def loaded(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return load(self, pointers, mask, *rest)

    def stored(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", launched)
        patch.setattr(builder, "create_masked_load", loaded)
        patch.setattr(builder, "create_masked_store", stored)
        yield
