"""Events: what happens in the store, for whoever watches; and the latest evictions, for whoever misses a pack."""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvstore_service.shared.types import StoreError, Violation

KINDS = ("commit", "damage", "drain", "evict", "quota", "retier", "upload", "worker")
WATCHERS_MAX = 4  # each holds a thread of the streams'
BACKLOG_MAX = 4096  # events that a slow watcher may be behind
EVICTED_MAX = 16384


@dataclass(frozen=True)
class Event:
    """`at_s`: Unix time."""

    kind: str
    tenant: str = ""
    pack_id: bytes = b""
    size_bytes: int = 0
    detail: str = ""
    at_s: float = 0.0


class Watch:
    """One watcher's backlog; what does not fit in is dropped, the oldest first, and counted."""

    def __init__(self, kinds: Sequence[str], news: threading.Condition) -> None:
        self.dropped = 0
        self._kinds = frozenset(kinds)
        self._news = news
        self._backlog: deque[Event] = deque()

    def offer(self, event: Event) -> None:
        """For a caller that holds the condition."""
        if self._kinds and event.kind not in self._kinds:
            return
        if len(self._backlog) == BACKLOG_MAX:
            self._backlog.popleft()
            self.dropped += 1
        self._backlog.append(event)

    def take(self, timeout_s: float) -> Event | None:
        """The next event; None if there is none in time."""
        with self._news:
            self._news.wait_for(lambda: self._backlog, timeout_s)
            return self._backlog.popleft() if self._backlog else None


class Events:
    """Thread-safe. Telling never waits for a watcher."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._watches: list[Watch] = []
        self._evicted: OrderedDict[bytes, Event] = OrderedDict()
        self._dropped = 0

    def tell(self, kind: str, tenant: str = "", pack_id: bytes = b"", size_bytes: int = 0, detail: str = "") -> None:
        event = Event(kind, tenant, pack_id, size_bytes, detail, time.time())
        with self._news:
            if kind == "evict":
                self._evicted.pop(pack_id, None)
                self._evicted[pack_id] = event
                if len(self._evicted) > EVICTED_MAX:
                    self._evicted.popitem(last=False)
            for watch in self._watches:
                watch.offer(event)
            self._news.notify_all()

    def evicted(self, pack_id: bytes) -> Event | None:
        """The pack's latest eviction, if it is remembered."""
        with self._news:
            return self._evicted.get(pack_id)

    def evictions(self) -> list[Event]:
        """Those that are remembered, the latest last."""
        with self._news:
            return list(self._evicted.values())

    @contextmanager
    def watch(self, kinds: Sequence[str]) -> Iterator[Watch]:
        """INVALID_ARGUMENT for an unknown kind; RESOURCE_EXHAUSTED at WATCHERS_MAX."""
        for kind in kinds:
            if kind not in KINDS:
                raise StoreError("INVALID_ARGUMENT", f"kind {kind!r}; the kinds are {', '.join(KINDS)}")
        watch = Watch(kinds, self._news)
        with self._news:
            if len(self._watches) >= WATCHERS_MAX:
                limit = Violation("watchers", f"at most {WATCHERS_MAX}")
                raise StoreError("RESOURCE_EXHAUSTED", f"{WATCHERS_MAX} watch already", 5.0, [limit])
            self._watches.append(watch)
        try:
            yield watch
        finally:
            with self._news:
                self._watches.remove(watch)
                self._dropped += watch.dropped

    def dropped(self) -> int:
        """Events that watchers have lost."""
        with self._news:
            return self._dropped + sum(watch.dropped for watch in self._watches)
