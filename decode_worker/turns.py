"""A lock whose waiters get it in the order in which they came."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Self


class Turns:
    """Re-entrant. Unlike threading.RLock, whoever releases it and asks again comes behind those who wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        self._left: deque[Callable[[], object]] = deque()
        self._owner: int | None = None
        self._depth = 0

    def acquire(self, unless: Callable[[], bool] = lambda: False) -> bool:
        """Waits for its turn. False, without the lock, once `unless` holds, which is asked at every release."""
        me = threading.get_ident()
        with self._changed:
            if self._owner != me:
                turn = object()
                self._queue.append(turn)
                try:
                    self._changed.wait_for(lambda: unless() or (self._owner is None and self._queue[0] is turn))
                    if unless():
                        return False
                    self._owner = me
                finally:
                    self._queue.remove(turn)
                    self._changed.notify_all()
            self._depth += 1
            return True

    def release(self) -> None:
        try:
            while self._depth == 1 and self._left:
                self._left.popleft()()
        finally:
            with self._changed:
                self._depth -= 1
                if not self._depth:
                    self._owner = None
                    self._changed.notify_all()
        self._do_left()  # what came after the last look

    def leave(self, errand: Callable[[], object]) -> None:
        """Has `errand` done under the lock: at once if it is free, else by whoever has it, before they release it.

        Waits for no turn. So it may be called where a wait would never end: by the garbage collector, which runs in
        any thread at any moment, even in one that stands in the queue or has the lock."""
        self._left.append(errand)
        self._do_left()

    def _do_left(self) -> None:
        with self._changed:
            if self._owner is not None or not self._left:
                return
            self._owner, self._depth = threading.get_ident(), 1
        self.release()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
