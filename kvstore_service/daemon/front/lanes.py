"""Lanes: the threads in which calls are answered, a lane of its own for each kind of caller.

Whoever waits here waits without a thread: for its turn among its own calls, then among its user's, then for a thread.
So a caller delays itself first, its user's other callers next, and nobody of another lane at all.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from kvstore_service.daemon.front.call import Caller
from kvstore_service.shared.types import StoreError, Violation

RETRY_S = 0.1
LARGE_BYTES = 64 << 10  # a request that counts until its call ends, not only while it comes
_T = TypeVar("_T")


@dataclass(frozen=True)
class Limits:
    """Threads that all, one user and one caller may hold, requests of a user that may be coming or are large, calls in
    flight of a user and of a caller, and how long a request may take to come once its turn is there."""

    threads: int
    user_threads: int
    caller_threads: int
    user_requests: int
    user_calls: int
    caller_calls: int
    request_s: float = 5.0


WORKERS = Limits(threads=32, user_threads=24, caller_threads=4, user_requests=5, user_calls=1024, caller_calls=64)
OPERATORS = Limits(threads=8, user_threads=6, caller_threads=4, user_requests=5, user_calls=64, caller_calls=16)
STREAMS = Limits(threads=8, user_threads=6, caller_threads=4, user_requests=5, user_calls=12, caller_calls=4)


@dataclass(frozen=True)
class Room:
    """Of one user: for requests that are coming or are large, and for the one large request that is being answered,
    which takes several times its size."""

    requests: asyncio.Semaphore
    large: asyncio.Semaphore


class Lane:
    """Belongs to one event loop. Refuses a call beyond the limits at once: RESOURCE_EXHAUSTED, with the time after
    which to come again."""

    def __init__(self, name: str, limits: Limits) -> None:
        self.limits = limits
        self._threads = ThreadPoolExecutor(limits.threads, thread_name_prefix=name)
        self._free = asyncio.Semaphore(limits.threads)
        self._calls: Counter[str | int] = Counter()
        self._turns: dict[str | int, asyncio.Semaphore] = {}
        self._rooms: dict[int, Room] = {}

    @asynccontextmanager
    async def place(self, caller: Caller) -> AsyncIterator["Place"]:
        """Counts a call in flight, from its metadata to its end;
        what it began in a thread counts until it has ended there."""
        place = Place(self, caller)
        try:
            yield place
        finally:
            place.leave()

    def enter(self, caller: Caller) -> None:
        keys: dict[str | int, int] = {caller.name: self.limits.caller_calls, caller.uid: self.limits.user_calls}
        for key, limit in keys.items():
            if self._calls[key] >= limit:
                subject = "calls of this caller" if key == caller.name else f"calls of user id {caller.uid}"
                raise StoreError(
                    "RESOURCE_EXHAUSTED",
                    f"{limit} {subject} are in flight; try again",
                    retry_after_s=RETRY_S,
                    violations=[Violation(subject, f"at most {limit}")],
                    reason="OVERLOADED",
                )
        self._calls.update(keys.keys())

    def leave(self, caller: Caller) -> None:
        for key in (caller.name, caller.uid):
            self._calls[key] -= 1
            if not self._calls[key]:
                del self._calls[key]
                self._turns.pop(key, None)
        if caller.uid not in self._calls:
            self._rooms.pop(caller.uid, None)

    def turn(self, key: str | int, threads: int) -> asyncio.Semaphore:
        return self._turns.setdefault(key, asyncio.Semaphore(threads))

    def room(self, uid: int) -> "Room":
        return self._rooms.setdefault(uid, Room(asyncio.Semaphore(self.limits.user_requests), asyncio.Semaphore()))

    def submit(self, act: Callable[[], _T]) -> Future[_T]:
        return self._threads.submit(act)

    @property
    def free(self) -> asyncio.Semaphore:
        return self._free

    def close(self) -> None:
        """Returns when no thread of it runs any more."""
        self._threads.shutdown(cancel_futures=True)


class Place:
    """One call's place in a lane."""

    def __init__(self, lane: Lane, caller: Caller) -> None:
        lane.enter(caller)
        self._lane = lane
        self._caller = caller
        self._held: list[asyncio.Semaphore] = []
        self._running = 0
        self._left = False

    async def receive(self, read: Callable[[], Awaitable[bytes]]) -> bytes:
        """The request, in the caller's own turn, which lasts until the call ends, and in its user's room: so much of
        theirs lies in memory at once, and no more."""
        turn = self._lane.turn(self._caller.name, self._lane.limits.caller_threads)
        await turn.acquire()
        self._held.append(turn)
        room = self._lane.room(self._caller.uid)
        await room.requests.acquire()
        self._held.append(room.requests)
        request = await read()
        if len(request) > LARGE_BYTES:
            await room.large.acquire()
            self._held.append(room.large)
        else:
            self._held.remove(room.requests)
            room.requests.release()
        return request

    async def run(self, act: Callable[[], _T]) -> _T:
        """`act` in a thread of the lane. If the call is cancelled, a thread that has begun goes on, and counts."""
        loop = asyncio.get_running_loop()
        user = self._lane.turn(self._caller.uid, self._lane.limits.user_threads)
        await user.acquire()
        try:
            await self._lane.free.acquire()
        except BaseException:
            user.release()
            raise
        self._running += 1
        future = self._lane.submit(act)
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._ended, user))
        return await asyncio.wrap_future(future)

    def leave(self) -> None:
        self._left = True
        self._settle()

    def _ended(self, user: asyncio.Semaphore) -> None:
        self._running -= 1
        self._lane.free.release()
        user.release()
        self._settle()

    def _settle(self) -> None:
        if self._left and not self._running:
            for semaphore in self._held:
                semaphore.release()
            self._lane.leave(self._caller)
