"""Calls of the store that work in pieces makes: in a thread of their own, so that steps need not wait for them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
from typing import Any, TypeVar

from decode_worker.failures import INTERRUPTED_S
from decode_worker.work import Pieces

T = TypeVar("T")


class StoreCalls:
    """One call at a time."""

    def __init__(self) -> None:
        self._thread = futures.ThreadPoolExecutor(1, "store-calls")

    def call(
        self,
        function: Callable[..., T],
        *arguments: Any,
        undo: Callable[[T, BaseException], object] | None = None,
    ) -> Pieces[T]:
        """What the function returns or raises. Work that is given up meanwhile waits for its end: `undo(result,
        error)` then gives back what came too late."""
        answer = self._thread.submit(function, *arguments)
        try:
            while not answer.done():
                yield _Answer(answer)
        except BaseException as error:
            if not answer.cancel():
                futures.wait([answer], None if isinstance(error, Exception) else INTERRUPTED_S)
            came = answer.done() and not answer.cancelled() and answer.exception() is None
            if came and undo is not None:
                undo(answer.result(), error)
            raise
        return answer.result()

    def close(self) -> None:
        """Once the client is closed no call lasts."""
        self._thread.shutdown(cancel_futures=True)


class _Answer:
    def __init__(self, answer: futures.Future[Any]) -> None:
        self._answer = answer

    def done(self) -> bool:
        return self._answer.done()

    def wait(self, timeout_s: float) -> None:
        futures.wait([self._answer], timeout_s)
