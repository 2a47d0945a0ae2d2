"""Upkeep: what the store does by itself, a little at a time, in a thread of its own."""

import threading
from collections.abc import Callable, Sequence
from logging import ERROR

from kvstore_service.daemon.logs import event
from kvstore_service.daemon.store.state import log

TURN_S = 0.5


class Upkeep:
    """Runs each of `chores` in turn until closed; one that fails is logged and comes again."""

    def __init__(self, chores: Sequence[Callable[[], object]]) -> None:
        self._chores = chores
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        while not self._closing.wait(TURN_S):
            for chore in self._chores:
                try:
                    chore()
                except Exception as error:
                    event(
                        log, ERROR, "chore failed", chore=chore.__qualname__, error=f"{type(error).__name__}: {error}"
                    )
