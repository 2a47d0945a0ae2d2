"""A disk that stalls costs those who read from it an error in time, and nobody else anything."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.neighbour import LAYOUT, PACK_TOKENS, SMALL, Document, Neighbour
from decode_worker import _native
from kvstore_service.client import AdminClient, PrefixCandidate, RingGeometry, StoreClient
from tests.isolation.conftest import HOT
from tests.support.daemon_process import Daemon
from tests.support.life import until

ALWAYS = 1 << 40
STALL_US = 4_000_000
WAIT_US = 3_000_000
HANG_US = 8_000_000  # longer than a command waits for the thread
COLD = Document("cold", 16384)
STARVED_RUNS = 8192


@pytest.fixture
def victim(slow_daemon: Daemon) -> Iterator[Neighbour]:
    """Has its document in DRAM."""
    with Neighbour(slow_daemon, HOT, SMALL) as worker:
        worker.fetch(worker.range(0, HOT.tokens, 2))
        yield worker


def test_a_stalled_disk_poisons_nobody(slow_daemon: Daemon, victim: Neighbour) -> None:
    hot = victim.gather([5])
    with Neighbour(slow_daemon, COLD, SMALL) as reader:
        slow_daemon.set_disk_faults(("gather", "delay", 1, ALWAYS, STALL_US))
        cold, bulk = reader.gather([64]), reader.range(1024, 1024, 2)
        posted = [reader.post(cold), reader.post(bulk)]
        for _ in range(20):
            victim.fetch(hot, WAIT_US)
        for seq in posted:
            for status, fault in reader.ring.wait(seq, WAIT_US).tolist():
                assert (status, fault) == (_native.STATUS_ERROR, _native.FAULT_UNAVAILABLE)
        slow_daemon.set_disk_faults()
        reader.fetch(reader.gather([96]), 2 * STALL_US)
        assert not reader.ring.poisoned
        until(lambda: bool(reader.ask(cold, 2 * STALL_US)[0, 0] == _native.STATUS_OK), "the disk is back")


def test_runs_that_wait_for_frames_take_no_processor(slow_daemon: Daemon) -> None:
    """Each of them would plan again in every turn of the loop."""
    with Neighbour(slow_daemon, COLD, RingGeometry(2, STARVED_RUNS, 1)) as neighbour:
        slow_daemon.set_disk_faults(("gather", "delay", 1, ALWAYS, STALL_US))
        neighbour.post(neighbour.range(0, COLD.tokens, STARVED_RUNS))
        time.sleep(0.2)
        before_s = processor_s(slow_daemon.pid)
        time.sleep(1.0)
        assert processor_s(slow_daemon.pid) - before_s <= 0.4


def processor_s(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def test_a_worker_that_leaves_a_copy_thread_that_hangs_is_let_go_in_the_end(slow_daemon: Daemon) -> None:
    """Its memory, rings and slots stayed until the daemon ended: nobody asked the thread again."""
    with AdminClient.connect(slow_daemon.socket, slow_daemon.broker) as admin:
        with Neighbour(slow_daemon, COLD, SMALL) as reader:
            slow_daemon.set_disk_faults(("submit", "delay", 1, 1, HANG_US))
            reader.post(reader.range(1024, 1024, 2))
        until(lambda: admin.get_status().counters["calls_late"] > 0, "the release has failed")
        until(lambda: admin.get_status().counters["workers"] == 0, "it is tried again")
        assert [check for check in admin.audit() if not check.ok] == []


def test_a_pack_that_opens_slowly_delays_no_lookup(slow_daemon: Daemon, victim: Neighbour) -> None:
    with Neighbour(slow_daemon, COLD, SMALL) as stored:
        (cold,) = stored.packs
    slow_daemon.restart()
    item = HOT.reservations()[0]
    candidates = [PrefixCandidate(0, min(HOT.tokens, PACK_TOKENS), item.token_digest)]
    with (
        StoreClient.connect(slow_daemon.socket, slow_daemon.broker, "opener") as opener,
        StoreClient.connect(slow_daemon.socket, slow_daemon.broker, "looker", timeout_s=2.0) as looker,
    ):
        fingerprint = LAYOUT.fingerprint
        assert len(looker.lookup_prefix(fingerprint, candidates)) == 1
        slow_daemon.set_disk_faults(("pack.open", "delay", 1, 1, STALL_US))
        opening = threading.Thread(target=opener.get_map, args=(cold,))
        opening.start()
        until(lambda: slow_daemon.disk_counts()["pack.open"][1] == 1, "the pack is being opened")
        try:
            assert len(looker.lookup_prefix(fingerprint, candidates)) == 1  # DEADLINE_EXCEEDED if it waits
            assert opening.is_alive()
        finally:
            opening.join(10)
