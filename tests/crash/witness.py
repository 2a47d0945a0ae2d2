"""Another worker of the same daemon, which reads and checks all the time: whatever befalls others must not reach it."""

import threading
import time
from types import TracebackType
from typing import Self

import numpy as np

from kvstore_service.client import StoreClient
from tests.crash.doomed import CHAIN, RECORDS
from tests.support.daemon_process import Daemon
from tests.support.world import LAYOUT, TOKENS, TestWorker, expected, reservation

PAUSE_S = 20.0


class Witness:
    """Stores CHAIN and gathers it in a thread of its own, between `resume` and `pause` or the block's end.

    `slowest_s` is the longest of its gathers since the last `resume`."""

    def __init__(self, daemon: Daemon) -> None:
        self.client = StoreClient.connect(daemon.socket, daemon.broker, "witness", timeout_s=20.0)
        self._worker = TestWorker(self.client)
        self.slowest_s = 0.0
        self._gathers = 0
        self._failure: BaseException | None = None
        self._running, self._ending = threading.Event(), threading.Event()
        self._between = threading.Lock()  # held during a gather
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Self:
        session = self.client.open_session(LAYOUT, len(CHAIN) * TOKENS)
        reserved = self.client.reserve_pack(session, [reservation(n, i) for i, n in enumerate(CHAIN)])
        uploads = [item.upload_id for item in reserved if item.upload_id is not None]
        for upload_id, number in zip(uploads, CHAIN, strict=True):
            self._worker.store(upload_id, number)
        refs = [item.pack for item in self.client.commit_pack(session, uploads) if item.pack is not None]
        self.client.attach_packs(session, refs)
        self._epoch = self.client.bind_slot(session, 0, refs, self._worker.windows(0))
        self._thread.start()
        self.resume()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._running.set()
        self._thread.join(PAUSE_S)
        self._worker.close()
        self.client.close()

    def pause(self) -> None:
        """Returns when no gather of ours is under way."""
        self._running.clear()
        assert self._between.acquire(timeout=PAUSE_S), "a gather does not end"
        self._between.release()
        self._raise_failure()

    def resume(self) -> None:
        self.slowest_s = 0.0
        self._running.set()

    def require_more(self, gathers: int = 3, timeout_s: float = 10.0) -> None:
        """Returns after so many more gathers, each of them right. AssertionError otherwise."""
        wanted, deadline_s = self._gathers + gathers, time.monotonic() + timeout_s
        while self._gathers < wanted:
            self._raise_failure()
            assert time.monotonic() < deadline_s, f"the witness made no {gathers} gathers in {timeout_s} s"
            time.sleep(0.002)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise AssertionError("the witness was disturbed") from self._failure

    def _read(self) -> None:
        wanted = expected(CHAIN, RECORDS)
        try:
            while self._running.wait() and not self._ending.is_set():
                with self._between:
                    if not self._running.is_set():
                        continue
                    self._worker.window[:] = 0
                    started_s = time.monotonic()
                    got = self._worker.gather(0, self._epoch, RECORDS)
                    self.slowest_s = max(self.slowest_s, time.monotonic() - started_s)
                np.testing.assert_array_equal(got, wanted)
                self._gathers += 1
        except BaseException as error:
            self._failure = error
