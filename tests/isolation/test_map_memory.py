"""Maps of packs take none of the daemon's memory, neither while packs are written nor when maps are read.

Records have 64 B: no pack has larger maps for its size, 4 MiB in 132.
"""

import hashlib
import mmap
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from bench.isolation import private_mib
from bench.neighbour import DAEMON_OPTIONS, NO_PAIRS, require_ok
from decode_worker import _native
from kvstore_service.client import (
    KindSpec,
    Layout,
    PackRef,
    PackReservation,
    RingGeometry,
    StoreClient,
    StoreError,
)
from kvstore_service.daemon.store import uploads
from tests.support.daemon_process import Daemon

LAYERS, LANES, TOKENS, RECORD_BYTES = 8, 16, 16384, 64
LAYOUT = Layout(hashlib.sha256(b"maps").digest(), LAYERS, (KindSpec(LANES, 32, 1, RECORD_BYTES),))
WAIT_US = 20_000_000
EXCESS_MIB_MAX = 32
RESERVED, STORED = 16, 3
READERS, READ_S = 8, 2.0


def reservation(index: int) -> PackReservation:
    """Of the pack that stands at this place of a chain."""
    return PackReservation(index * TOKENS, TOKENS, hashlib.sha256(bytes([index])).digest(), b"")


class Writer:
    """A worker that fills uploads with one staged segment."""

    def __init__(self, client: StoreClient) -> None:
        staging_bytes = TOKENS * (RECORD_BYTES + 2)
        self._memory = client.register_worker(1, 4096, staging_bytes, [RingGeometry(2, LANES, 1)])
        staging = np.frombuffer(mmap.mmap(self._memory.staging_fd, staging_bytes), np.uint8)
        staging[: TOKENS * RECORD_BYTES] = 1
        staging[TOKENS * RECORD_BYTES :] = np.arange(TOKENS, dtype=np.uint16).view(np.uint8)
        self._ring = _native.RingProducer(*self._memory.rings[0])
        client.serve_rings()
        self.client = client
        self.session = client.open_session(LAYOUT, RESERVED * TOKENS)

    def close(self) -> None:
        self._ring.close()
        self._memory.close()

    def reserve(self, packs: int) -> list[int]:
        chain = [reservation(index) for index in range(packs)]
        return [item.upload_id or 0 for item in self.client.reserve_pack(self.session, chain)]

    def store(self, upload: int) -> None:
        runs = np.zeros(LANES, _native.RUN_DTYPE)
        runs["slot"], runs["lane"] = upload, np.arange(LANES)
        for layer in range(LAYERS):
            require_ok(self._ring.wait(self._ring.post(_native.OP_STORE, 0, layer, runs, NO_PAIRS), WAIT_US))

    def commit(self, stored: Sequence[int]) -> list[PackRef]:
        return [item.pack for item in self.client.commit_pack(self.session, stored) if item.pack is not None]


@pytest.fixture
def writer(daemon: Daemon) -> Iterator[Writer]:
    with StoreClient.connect(daemon.socket, daemon.broker) as client:
        writer = Writer(client)
        yield writer
        writer.close()


@dataclass
class Peak:
    mib: float = 0.0


@contextmanager
def watched(daemon: Daemon) -> Iterator[Peak]:
    """How much more private memory the daemon has meanwhile, at most."""
    before_mib, peak, ended = private_mib(daemon.pid), Peak(), threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            peak.mib = max(peak.mib, private_mib(daemon.pid) - before_mib)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        ended.set()
        watcher.join()


@pytest.mark.timeout(120)
def test_an_upload_holds_no_map_from_its_reservation_to_its_commit(daemon: Daemon, writer: Writer) -> None:
    with watched(daemon) as peak:
        reserved = writer.reserve(RESERVED)
        assert all(reserved)
        for upload in reserved[:STORED]:
            writer.store(upload)
        assert len(writer.commit(reserved[:STORED])) == STORED
    assert peak.mib <= EXCESS_MIB_MAX


def test_what_uploads_do_hold_is_bounded_for_each_user(tmp_path: Path) -> None:
    """A reservation of 512 GiB is refused beside another one, before any file is made.

    Each block of 4 KiB takes 4 B, and each extent of four."""
    large = Layout(LAYOUT.fingerprint, 128, (KindSpec(256, 256, 1, 1024),))
    small_bytes, large_bytes = 132 * 1280, (512 << 10) * 1280  # of packs of 132 MiB and 512 GiB
    options = (*DAEMON_OPTIONS, "--nvme-bytes=64TiB")
    with Daemon(tmp_path, options=options) as daemon, StoreClient.connect(daemon.socket, daemon.broker) as client:
        writer = Writer(client)
        (upload,) = writer.reserve(1)
        with pytest.raises(StoreError, match=f"at most {uploads.MEMORY_PER_USER} B may be") as raised:
            client.reserve_pack(client.open_session(large, TOKENS), [reservation(0)])
        assert (raised.value.code, raised.value.violations[0].subject) == ("RESOURCE_EXHAUSTED", "memory of uploads")
        held_bytes, more_bytes, _ = (int(word) for word in re.findall(r"(\d+) B", raised.value.message))
        assert held_bytes == pytest.approx(small_bytes, rel=0.01)
        assert more_bytes == pytest.approx(large_bytes, rel=0.01)
        writer.store(upload)
        assert writer.commit([upload])
        writer.close()


def test_reading_maps_takes_no_memory_that_grows_with_them(daemon: Daemon, writer: Writer) -> None:
    (upload,) = writer.reserve(1)
    writer.store(upload)
    (pack,) = writer.commit([upload])
    end_s = time.monotonic() + READ_S

    def read() -> None:
        while time.monotonic() < end_s:
            assert writer.client.get_map(pack).shape == (LAYERS, LANES, TOKENS)

    with watched(daemon) as peak, ThreadPoolExecutor(READERS) as readers:
        for reader in [readers.submit(read) for _ in range(READERS)]:
            reader.result()
    assert peak.mib <= EXCESS_MIB_MAX
