"""The life of a few packs through a store, every byte compared; and what must hold when it was cut short."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from google.rpc import code_pb2
from numpy.typing import NDArray

from decode_worker._native import STATUS_OK
from kvstore_service.client import (
    AdminClient,
    PackImportance,
    PackRef,
    PackReservation,
    PrefixCandidate,
    SidecarKey,
    StoreClient,
    StoreError,
)
from tests.support.daemon_process import Daemon
from tests.support.world import LANES, LAYERS, LAYOUT, TOKENS, TestWorker, expected, order_of

PACKS = 2  # committed together; a third is sealed, a fourth aborted
RECORDS = np.arange((PACKS + 1) * TOKENS, dtype=np.uint32)[::2]
WAIT_S = 10.0


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {WAIT_S} s"
        time.sleep(0.002)


def reservation(number: int, index: int = 0, parent: bytes = b"") -> PackReservation:
    """Pack `number`, any int, standing at place `index` of its chain."""
    return PackReservation(index * TOKENS, TOKENS, hashlib.sha256(str(number).encode()).digest(), parent)


def _numbers(life: int) -> list[int]:
    return [life * (PACKS + 1) + i for i in range(PACKS + 1)]


class Worker(TestWorker):
    """Transfers that fail raise StoreError, as the decode worker's do."""

    __test__ = False

    def settle(self, statuses: NDArray[np.uint32]) -> None:
        for status, fault in statuses.tolist():
            if status != STATUS_OK:
                raise StoreError(code_pb2.Code.Name(fault), "a transfer failed in the store")


class Life:
    """One worker at a daemon. A number stands for a chain of packs; to live it again is to try again."""

    def __init__(self, client: StoreClient, admin: AdminClient, data_dir: Path, reads_ahead: Callable[[], int]) -> None:
        """`reads_ahead`: how many reads ahead the daemon has begun."""
        self.worker = Worker(client)
        self._client = client
        self._admin = admin
        self.data_dir = data_dir
        self._reads_ahead = reads_ahead
        self._session = ""
        self._open: list[int] = []

    def live(self, number: int) -> None:
        """Reserves, stores, commits, hints, binds, gathers, verifies, keeps a sidecar, seals, aborts. StoreError."""
        client = self._client
        numbers = _numbers(number)
        self._session = client.open_session(LAYOUT, 4096)
        packs, fresh = self._write(numbers[:PACKS])
        client.attach_packs(self._session, packs)
        self._hint(packs[0], fresh)
        epoch = client.bind_slot(self._session, 0, packs, self.worker.windows(0))
        self._gather(epoch, numbers[:PACKS])
        for pack, name in zip(packs, numbers, strict=False):
            order = client.get_map(pack)
            for layer, lane in np.ndindex(LAYERS, LANES):
                np.testing.assert_array_equal(order[layer, lane], order_of(name, layer, lane))
        for answer in self._admin.verify([pack.pack_id for pack in packs]):
            if answer.error or answer.bad_blocks:
                lost = answer.bad_blocks or "ends before" in answer.error
                raise StoreError("DATA_LOSS" if lost else "UNAVAILABLE", answer.error)
        key = SidecarKey(packs[0].pack_id, packs[0].build, "hash")
        client.put_sidecar(key, bytes([number % 256]) * 3000)
        assert client.get_sidecar(key) == bytes([number % 256]) * 3000
        self._seal(packs[-1], numbers[-1])
        self._gather(epoch, numbers)
        (upload,) = client.reserve_pack(self._session, [reservation(-1 - number)])
        assert upload.upload_id is not None
        self._open = [upload.upload_id]
        self.give_up()

    def read(self, number: int) -> None:
        """Finds what a life has stored by its tokens and compares every record that is fetched."""
        numbers = _numbers(number)
        self._session = self._client.open_session(LAYOUT, 4096)
        chain = [reservation(name, index) for index, name in enumerate(numbers)]
        candidates = [PrefixCandidate(item.first_token, item.tokens, item.token_digest) for item in chain]
        packs = self._client.lookup_prefix(LAYOUT.fingerprint, candidates)
        assert len(packs) == len(numbers)
        self._client.attach_packs(self._session, packs)
        self._gather(self._client.bind_slot(self._session, 0, packs, self.worker.windows(0)), numbers)
        self.give_up()

    def give_up(self) -> None:
        """Closes what is open, as a worker does that will try again."""
        self._client.abort_pack(self._open)
        self._open = []
        if self._session:
            self._client.close_session(self._session)
        self._session = ""

    def check_nothing_is_left(self) -> None:
        """Between two lives: only what was committed holds anything, in memory and on disk."""

        def counters() -> dict[str, int]:
            return dict(self._admin.get_status().counters)

        until(lambda: counters()["frames_pinned"] == 0, "frames are unpinned")
        now = counters()
        for name in ("uploads_reserved", "uploads_open", "bound_slots", "sessions"):
            assert now[name] == 0, (name, now[name])
        files = {
            kind: [path.stat().st_size for path in (self.data_dir / kind).iterdir()] for kind in ("packs", "sidecars")
        }
        assert sum(files["packs"]) == now["pack_bytes"]
        assert len(files["packs"]) == now["packs"]
        assert sum(map(sum, files.values())) == now["stored_bytes"]

    def _write(self, numbers: list[int]) -> tuple[list[PackRef], bool]:
        """The chain of packs, and whether none of it was there already."""
        reserved = self._client.reserve_pack(self._session, [reservation(n, i) for i, n in enumerate(numbers)])
        self._open = [item.upload_id for item in reserved if item.upload_id is not None]
        for item, number in zip(reserved, numbers, strict=True):
            if item.upload_id is not None:
                self.worker.store(item.upload_id, number)
        for committed in self._client.commit_pack(self._session, self._open):
            if committed.error is not None:
                raise committed.error
        self._open = []
        return [item.pack for item in reserved], not any(item.exists for item in reserved)

    def _hint(self, pack: PackRef, fresh: bool) -> None:
        began = self._reads_ahead()
        self._client.hint_importance(self._session, [PackImportance(pack, np.full((LAYERS, LANES), TOKENS, np.uint32))])
        if fresh:  # else it may be in frames already
            until(lambda: self._reads_ahead() > began, "a read ahead begins")

    def _seal(self, parent: PackRef, number: int) -> None:
        (sealed,) = self._client.reserve_pack(self._session, [reservation(number, PACKS, parent.pack_id)])
        if sealed.upload_id is None:
            self._client.seal_existing(self._session, sealed.pack)
            return
        self._open = [sealed.upload_id]
        self.worker.store(sealed.upload_id, number)
        self._client.seal_tail(self._session, sealed.upload_id)
        self._open = []

    def _gather(self, epoch: int, numbers: list[int]) -> None:
        records = RECORDS[len(numbers) * TOKENS > RECORDS]
        np.testing.assert_array_equal(self.worker.gather(0, epoch, records), expected(numbers, records))


@contextmanager
def living(daemon: Daemon) -> Iterator[Life]:
    """At a daemon with the shim."""
    with (
        StoreClient.connect(daemon.socket, daemon.broker, "test", timeout_s=10.0) as client,
        AdminClient.connect(daemon.socket, daemon.broker) as admin,
    ):
        life = Life(client, admin, daemon.data_dir, lambda: daemon.disk_counts()["read_ahead"][0])
        yield life
        life.worker.close()
