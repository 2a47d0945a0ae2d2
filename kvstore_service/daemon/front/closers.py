"""Closing what a peer has sent can take as long as the peer likes (a socket that lingers, a file of its own file
system), so it is done beside the broker: whoever makes it slow waits behind their own descriptors alone.
"""

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue

STRANGERS = -1  # whoever is in the sockets' group and not served: one of them can have a thousand user ids
BACKLOG_MAX = 4096  # descriptors of a user that wait to be closed: sixteen messages full of them


class Closers:
    """A thread for each user id that has sent any, and one for all strangers; it ends with the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, int] = {}
        self._queues: dict[int, SimpleQueue[int]] = {}

    def close(self, uid: int, fds: Sequence[int]) -> None:
        """Takes the descriptors over."""
        if not fds:
            return
        with self._lock:
            self._waiting[uid] = self._waiting.get(uid, 0) + len(fds)
            if uid not in self._queues:
                self._queues[uid] = SimpleQueue()
                threading.Thread(target=self._run, args=(uid,), name="closer", daemon=True).start()
            queue = self._queues[uid]
        for fd in fds:
            queue.put(fd)

    def behind(self, uid: int) -> bool:
        """Whether so many wait that nothing more of the user should be taken."""
        with self._lock:
            return self._waiting.get(uid, 0) > BACKLOG_MAX

    def _run(self, uid: int) -> None:
        queue = self._queues[uid]
        while True:
            with suppress(OSError):  # what its file system says at the end is its owner's affair; it is closed
                os.close(queue.get())
            with self._lock:
                self._waiting[uid] -= 1
