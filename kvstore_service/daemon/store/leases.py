"""Leases: packs that a worker was just told of stay until it has had the time to attach them."""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence

LEASES_MAX = 1 << 16


class Leases:
    """Thread-safe. A pack that is continued by another cannot be evicted anyway, so a chain is held by its last pack.

    Who takes a lease looks afterwards whether the pack is still there; who evicts condemns it before it looks here."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._lock = threading.Lock()
        # Monotonic, by user id, then by pack id and holder, the oldest first.
        self._until_s: dict[int, OrderedDict[tuple[bytes, str], float]] = {}
        self._holders: dict[bytes, set[str]] = {}
        self._held: dict[str, set[bytes]] = {}
        self._users: dict[str, int] = {}  # by holder

    def take(self, names: Sequence[bytes], holder: str, uid: int) -> None:
        """`holder`: a session's id or, for what is found before there is one, a worker's token; of this user. Beyond
        LEASES_MAX the oldest of whichever user has most end, so that nobody ends another's."""
        if not names:
            return
        until_s = time.monotonic() + self._lease_s
        with self._lock:
            leases = self._until_s.setdefault(uid, OrderedDict())
            self._users[holder] = uid
            for name in names:
                leases[name, holder] = until_s
                leases.move_to_end((name, holder))
                self._holders.setdefault(name, set()).add(holder)
                self._held.setdefault(holder, set()).add(name)
            while sum(map(len, self._until_s.values())) > LEASES_MAX:
                most = max(self._until_s.values(), key=len)
                self._drop(*next(iter(most)))

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
            holders = self._holders.get(name, ())
            return any(self._until_s[self._users[holder]][name, holder] > now_s for holder in holders)

    def expire(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            for leases in list(self._until_s.values()):
                while leases and next(iter(leases.values())) <= now_s:
                    self._drop(*next(iter(leases)))

    def _drop(self, name: bytes, holder: str) -> None:
        uid = self._users.get(holder)
        if uid is None or self._until_s[uid].pop((name, holder), None) is None:
            return
        if not self._until_s[uid]:
            del self._until_s[uid]
        self._holders[name].discard(holder)
        if not self._holders[name]:
            del self._holders[name]
        self._held[holder].discard(name)
        if not self._held[holder]:
            del self._held[holder], self._users[holder]
