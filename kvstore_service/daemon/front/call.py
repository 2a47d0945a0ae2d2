"""One call, as its handler sees it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore_service.daemon.store.registry import Worker
from kvstore_service.shared.types import StoreError


@dataclass(frozen=True)
class Caller:
    """Who calls: the peer behind a token, the subject of a certificate, or anybody. `name` tells callers apart."""

    name: str
    uid: int
    worker: Worker | None = None


ANYBODY = Caller("anybody", -1)


@dataclass(eq=False)
class Call:
    """What a handler needs to know of the call that it answers. A long one looks at `is_active` between its steps."""

    method: str
    request_id: str
    deadline_s: float  # monotonic
    caller: Caller
    began_s: float = field(default_factory=time.monotonic)
    cancelled: bool = False
    undo: Callable[[], object] | None = None  # of what only the caller can end, should it leave before it hears of it
    stands: Callable[[], bool] = lambda: False  # whether a repeated call has been given this one's answer

    def take_back(self) -> None:
        """Of an answer that was lost: undoes what it says, unless the caller has got it by asking again."""
        if self.undo is not None and not self.stands():
            self.undo()

    @property
    def worker(self) -> Worker:
        """The peer behind the call's token. UNAUTHENTICATED for one without."""
        if self.caller.worker is None:
            raise StoreError("UNAUTHENTICATED", "this call needs a token of the broker")
        return self.caller.worker

    def time_remaining(self) -> float:
        """Seconds; 0 once the deadline has passed."""
        return max(0.0, self.deadline_s - time.monotonic())

    def is_active(self) -> bool:
        """Whether somebody still waits for the answer who may have it."""
        return not self.cancelled and not self._expired() and self.time_remaining() > 0

    def _expired(self) -> bool:
        """Whether the call's token has become void since it began."""
        return self.caller.worker is not None and self.caller.worker.gone

    def require_active(self) -> None:
        """CANCELLED or DEADLINE_EXCEEDED once nobody waits any more, UNAUTHENTICATED once the token is void."""
        if self._expired() and not self.cancelled:
            raise StoreError(
                "UNAUTHENTICATED", "the broker connection behind the call's token has ended", reason="TOKEN_UNKNOWN"
            )
        if not self.is_active():
            code = "CANCELLED" if self.cancelled else "DEADLINE_EXCEEDED"
            raise StoreError(code, "nobody waits for this call any more")
