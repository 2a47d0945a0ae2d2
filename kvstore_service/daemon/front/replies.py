"""Replies: the latest answers of each caller's mutations, by idempotency key."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field

from kvstore_service.shared.types import StoreError

REPLIES_MAX = 64  # per caller
GIVEN_UP = ("CANCELLED", "DEADLINE_EXCEEDED")
REPLIES_BYTES_MAX = 128 << 10  # per caller, who can have been answered with the largest reply each time
REPLY_BYTES_MAX = 64 << 10  # what is larger is not kept
IDEMPOTENCY_KEY_MAX = 128


@dataclass(eq=False)
class _Kept:
    digest: bytes  # of the request
    future: Future[bytes] = field(default_factory=Future)
    repeated: bool = False  # somebody has got this answer, or waits for it, by asking again

    @property
    def size_bytes(self) -> int:
        """0 while the call is under way."""
        return len(self.future.result()) if self.future.done() and self.future.exception() is None else 0


class Replies:
    """A repeated call gets the first one's answer, and waits for it if it is still under way; failures are not kept.

    Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: dict[str, OrderedDict[tuple[str, str], _Kept]] = {}

    def once(
        self, caller: str, method: str, key: str, request: bytes, act: Callable[[], bytes], timeout_s: float
    ) -> bytes:
        """INVALID_ARGUMENT for a key that came with another request."""
        if len(key) > IDEMPOTENCY_KEY_MAX:
            raise StoreError("INVALID_ARGUMENT", f"an idempotency key has at most {IDEMPOTENCY_KEY_MAX} letters")
        digest = hashlib.sha256(request).digest()
        while (answer := self._try(caller, (method, key), digest, act, timeout_s)) is None:
            pass
        return answer

    def _try(
        self, caller: str, name: tuple[str, str], digest: bytes, act: Callable[[], bytes], timeout_s: float
    ) -> bytes | None:
        """None if the first call was given up because its peer had left: this one is the first then."""
        with self._lock:
            answers = self._answers.setdefault(caller, OrderedDict())
            first = answers.get(name)
            if first is not None:
                first.repeated = True
            else:
                future = answers.setdefault(name, _Kept(digest)).future
                while len(answers) > REPLIES_MAX:
                    answers.popitem(last=False)
        if first is not None:
            return _repeat(first, digest, timeout_s)
        try:
            answer = act()
        except BaseException as error:
            with self._lock:
                answers.pop(name, None)
                if not answers and self._answers.get(caller) is answers:
                    del self._answers[caller]  # nobody forgets a caller again who had left when it called
            future.set_exception(error)
            raise
        future.set_result(answer)
        with self._lock:
            if len(answer) > REPLY_BYTES_MAX:
                answers.pop(name, None)
            while sum(kept.size_bytes for kept in answers.values()) > REPLIES_BYTES_MAX:
                answers.popitem(last=False)
        return answer

    def withdraw(self, caller: str, method: str, key: str) -> bool:
        """Forgets an answer that its caller never got. False if it was asked for again: then it stands."""
        with self._lock:
            answers = self._answers.get(caller)
            kept = None if answers is None else answers.get((method, key))
            if answers is None or kept is None:
                return True
            if kept.repeated:
                return False
            del answers[method, key]
            return True

    def forget(self, caller: str) -> None:
        with self._lock:
            self._answers.pop(caller, None)


def _repeat(first: _Kept, digest: bytes, timeout_s: float) -> bytes | None:
    if first.digest != digest:
        raise StoreError("INVALID_ARGUMENT", "the idempotency key was used with another request", reason="KEY_REUSED")
    try:
        return first.future.result(timeout_s)
    except FutureTimeout:
        raise StoreError("DEADLINE_EXCEEDED", "the first call with this idempotency key is still under way") from None
    except StoreError as error:
        if error.code in GIVEN_UP:
            return None
        raise
