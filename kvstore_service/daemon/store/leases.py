"""Leases: packs that somebody was just told of stay until he has had the time to attach them."""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable

FOUND_S = 10.0  # after a lookup
WRITING_S = 120.0  # for a session that writes what continues them, or has just committed them
LEASES_MAX = 1 << 16


class Leases:
    """Thread-safe. A pack that is continued by another cannot be evicted anyway, so a chain is held by its last pack.

    Who takes a lease looks afterwards whether the pack is still there; who evicts condemns it before it looks here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until_s: OrderedDict[bytes, float] = OrderedDict()  # monotonic, by pack id

    def take(self, names: Iterable[bytes], for_s: float) -> None:
        until_s = time.monotonic() + for_s
        with self._lock:
            for name in names:
                self._until_s[name] = max(until_s, self._until_s.pop(name, 0.0))
            while len(self._until_s) > LEASES_MAX:
                self._until_s.popitem(last=False)

    def holds(self, name: bytes) -> bool:
        with self._lock:
            return self._until_s.get(name, 0.0) > time.monotonic()

    def expire(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            for name in [name for name, until_s in self._until_s.items() if until_s <= now_s]:
                del self._until_s[name]
