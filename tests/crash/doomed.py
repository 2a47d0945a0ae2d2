"""A worker that comes into a state, says `up`, and stays there: python -m tests.crash.doomed STATE SOCKET BROKER

STATE is a method of Doomed. The endless ones say `up` first and then never rest. The daemon holds CHAIN. Where a state
needs a fault of the daemon (its runs delayed, or its serving stopped), FAULTS has it.
"""

import os
import signal
import sys
import time
from collections.abc import Callable

import numpy as np

from decode_worker._native import OP_STORE, RingError
from kvstore_service.client import AdminClient, StoreClient, StoreError
from tests.support.world import (
    GEOMETRY,
    LANES,
    LAYERS,
    LAYOUT,
    NO_PAIRS,
    SLOTS,
    STAGING_BYTES,
    TOKENS,
    WINDOW_BYTES,
    TestWorker,
    candidate,
    expected,
    gather_runs,
    reservation,
)

CHAIN = list(range(1, 21))  # more than the smallest DRAM tier holds
RECORDS = np.arange(0, len(CHAIN) * TOKENS, 10, dtype=np.uint32)  # something of every block
HELD = {"delay_us": 60_000_000}
FAULTS: dict[str, dict[str, bool | int]] = {
    "posted": {"stopped": True},
    "taken": HELD,
    "waiting": HELD,
    "partly_done": HELD,
    "storing": HELD,
}
FROZEN = (
    "posted", "taken", "waiting", "partly_done", "done", "storing", "reserved", "written", "bound", "handed_out",
    "offered", "sigstopped",
)  # fmt: skip
RESTLESS = ("reading", "committing", "binding")
ANSWER_S = 20.0


class Doomed:
    def __init__(self, socket: str, broker: str) -> None:
        self._client, self._other = (StoreClient.connect(socket, broker, "doomed", ANSWER_S) for _ in range(2))
        self._admin = AdminClient.connect(socket, broker, ANSWER_S)
        self._worker = TestWorker(self._client)

    # frozen

    def posted(self) -> None:
        """A ticket that the daemon has not taken."""
        seq, before = self._post(), self._counter("tickets")
        assert not self._worker.decode.poll(seq)[:, 0].any()
        assert self._counter("tickets") == before

    def taken(self) -> None:
        """Its runs wait inside the daemon."""
        before = self._counter("tickets")
        seq = self._post()
        self._until(lambda: self._counter("tickets") > before)
        assert not self._worker.decode.poll(seq)[:, 0].any()

    def waiting(self) -> None:
        """The worker itself sleeps on the ring."""
        seq = self._post()
        say("up")
        self._worker.decode.wait(seq, int(ANSWER_S * 3e6))

    def partly_done(self) -> None:
        """One run of the ticket is answered (its epoch is another), one is not."""
        seq = self._post(stale_lane=0)
        self._until(lambda: self._worker.decode.poll(seq)[0, 0] != 0)
        assert self._worker.decode.poll(seq)[1, 0] == 0

    def done(self) -> None:
        """Everything is answered and nothing collected."""
        before = self._counter("runs_ok")
        self._post()
        self._until(lambda: self._counter("runs_ok") >= before + LANES)

    def storing(self) -> None:
        """A STORE is taken and not written."""
        (upload_id,) = self._reserve(100)
        before = self._counter("tickets")
        self._worker.bulk.post(OP_STORE, 0, 0, self._worker.fill(upload_id, 100, 0), NO_PAIRS)
        self._until(lambda: self._counter("tickets") > before)

    def reserved(self) -> None:
        self._reserve(101, 102)

    def written(self) -> None:
        """All that the commit needs is there."""
        for upload_id, number in zip(self._reserve(103, 104), (103, 104), strict=True):
            self._worker.store(upload_id, number)

    def bound(self) -> None:
        self._bind(0)
        self._bind(1)

    def handed_out(self) -> None:
        """Registered; the descriptors lie in the broker and nobody has taken them."""
        self._other._connection.take = lambda transfer: [-1] * 4  # type: ignore[method-assign]
        self._other.register_worker(SLOTS, WINDOW_BYTES, STAGING_BYTES, [GEOMETRY])

    def offered(self) -> None:
        """A descriptor of ours lies in the broker, and no call has fetched it."""
        self._client._connection.offer("kvstore-sidecar", bytes(1 << 20))

    def sigstopped(self) -> None:
        self._bind(0)
        self._reserve(105)
        say("up")
        os.kill(os.getpid(), signal.SIGSTOP)

    # restless

    def reading(self) -> None:
        """Gathers, checked, as fast as it goes; a line for each."""
        epoch = self._bind(0)
        say("up")
        wanted = expected(CHAIN, RECORDS)
        while True:
            self._worker.window[:] = 0
            np.testing.assert_array_equal(self._worker.gather(0, epoch, RECORDS), wanted)
            say("read")

    def committing(self) -> None:
        say("up")
        number = int.from_bytes(os.urandom(3), "little") + 1000
        while True:
            session = self._client.open_session(LAYOUT, TOKENS)
            self._worker.commit(session, number)
            number += 1

    def binding(self) -> None:
        self._bind(0)
        say("up")
        while True:
            self._client.unbind_slot(0)
            self._bind(0)

    # parts

    def _bind(self, slot: int) -> int:
        session = self._client.open_session(LAYOUT, len(CHAIN) * TOKENS)
        refs = self._client.lookup_prefix(LAYOUT.fingerprint, [candidate(n, i) for i, n in enumerate(CHAIN)])
        self._client.attach_packs(session, refs)
        return self._client.bind_slot(session, slot, refs, self._worker.windows(slot))

    def _post(self, stale_lane: int | None = None) -> int:
        runs = gather_runs(0, self._bind(0), len(RECORDS))
        if stale_lane is not None:
            runs[stale_lane]["slot_epoch"] += 1
        return self._worker.post_gather(LAYERS - 1, runs, RECORDS)

    def _reserve(self, *numbers: int) -> list[int]:
        session = self._client.open_session(LAYOUT, len(numbers) * TOKENS)
        reserved = self._client.reserve_pack(session, [reservation(n, i) for i, n in enumerate(numbers)])
        return [item.upload_id for item in reserved if item.upload_id is not None]

    def _counter(self, name: str) -> int:
        return int(self._admin.get_status().counters[name])

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + ANSWER_S
        while not condition():
            assert time.monotonic() < deadline_s, "the state was not reached"
            time.sleep(0.002)


def say(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    state, socket, broker = sys.argv[1:]
    try:
        doomed = Doomed(socket, broker)  # named: what it holds lives as long as it does
        getattr(doomed, state)()
    except (StoreError, RingError) as error:
        say(f"ended {getattr(error, 'code', type(error).__name__)}")
        return 1
    say("up")
    signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
