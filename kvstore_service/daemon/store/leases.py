"""Leases: packs that a worker was just told of stay until it has had the time to attach them."""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable

LEASES_MAX = 1 << 16


class Leases:
    """Thread-safe. A pack that is continued by another cannot be evicted anyway, so a chain is held by its last pack.

    Who takes a lease looks afterwards whether the pack is still there; who evicts condemns it before it looks here."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._until_s: OrderedDict[tuple[bytes, str], float] = OrderedDict()  # monotonic, by pack id and holder
        self._holders: dict[bytes, set[str]] = {}
        self._held: dict[str, set[bytes]] = {}

    def take(self, names: Iterable[bytes], holder: str) -> None:
        """`holder`: a session's id or, for what is found before there is one, a worker's token."""
        until_s = time.monotonic() + self._lease_s
        with self._lock:
            for name in names:
                self._until_s[name, holder] = until_s
                self._until_s.move_to_end((name, holder))
                self._holders.setdefault(name, set()).add(holder)
                self._held.setdefault(holder, set()).add(name)
            while len(self._until_s) > LEASES_MAX:
                self._drop(*next(iter(self._until_s)))

    def drop(self, names: Iterable[bytes], holder: str) -> None:
        """The packs are attached, and held by that."""
        with self._lock:
            for name in names:
                self._drop(name, holder)

    def drop_all(self, holder: str) -> None:
        with self._lock:
            for name in list(self._held.get(holder, ())):
                self._drop(name, holder)

    def holds(self, name: bytes) -> bool:
        now_s = time.monotonic()
        with self._lock:
            return any(self._until_s[name, holder] > now_s for holder in self._holders.get(name, ()))

    def expire(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            while self._until_s and next(iter(self._until_s.values())) <= now_s:
                self._drop(*next(iter(self._until_s)))

    def _drop(self, name: bytes, holder: str) -> None:
        if self._until_s.pop((name, holder), None) is None:
            return
        self._holders[name].discard(holder)
        if not self._holders[name]:
            del self._holders[name]
        self._held[holder].discard(name)
        if not self._held[holder]:
            del self._held[holder]
