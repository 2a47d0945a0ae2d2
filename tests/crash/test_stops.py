"""SIGSTOP of either side: whoever waits for it waits a bounded time, and afterwards everything goes on."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from decode_worker._native import RingPoisoned, RingTimeout
from kvstore_service.client import AdminClient, StoreClient, StoreError
from tests.crash.doomed_process import DoomedProcess, wait_stopped
from tests.crash.load import Reader
from tests.crash.witness import Witness
from tests.support.daemon_process import Daemon
from tests.support.world import LAYOUT, SLOTS, TOKENS, TestWorker, gather_runs

WAIT_S = 0.5
DELAY_S_MAX = 3.0  # that a busy machine may add; a gather takes a millisecond
END_S_MAX = 10.0


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_stopped(pid)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def lasting(low_s: float, high_s: float) -> Iterator[None]:
    started_s = time.monotonic()
    yield
    took_s = time.monotonic() - started_s
    assert low_s <= took_s < high_s, f"took {took_s:.2f} s, not {low_s} to {high_s} s"


@pytest.mark.timeout(60)
def test_a_stopped_daemon_costs_deadlines_and_then_serves_again(daemon: Daemon) -> None:
    with StoreClient.connect(daemon.socket, daemon.broker, "before", timeout_s=WAIT_S) as client:
        worker = TestWorker(client, wait_us=int(WAIT_S * 1e6))
        session = client.open_session(LAYOUT, 4 * TOKENS)
        pack = worker.commit(session, 1)
        client.attach_packs(session, [pack])
        epoch = client.bind_slot(session, 0, [pack], worker.windows(0))
        records = np.arange(TOKENS, dtype=np.uint32)
        worker.gather(0, epoch, records)
        unanswered = worker.write(client.open_session(LAYOUT, 4 * TOKENS), 2)
        assert unanswered.upload_id is not None
        with stopped(daemon.pid):
            worker.window[:] = 7
            with lasting(WAIT_S, WAIT_S + DELAY_S_MAX), pytest.raises(RingTimeout):
                worker.gather(0, epoch, records)
            for call in (
                lambda: client.lookup_prefix(LAYOUT.fingerprint, []),
                lambda: client.commit_pack(session, [unanswered.upload_id or 0], timeout_s=WAIT_S),
            ):
                with lasting(WAIT_S * 0.9, WAIT_S + DELAY_S_MAX), pytest.raises(StoreError, match="DEADLINE_EXCEEDED"):
                    call()
        with lasting(0.0, DELAY_S_MAX), pytest.raises(RingPoisoned):
            worker.post_gather(0, gather_runs(0, epoch, TOKENS), records)
        with (
            StoreClient.connect(daemon.socket, daemon.broker, "anew", timeout_s=20.0) as again,
            closing(Reader(again)) as reader,
        ):
            assert reader.wrong_records((1,), reader.find((1,))) == 0
            found = reader.find((2,))  # the commit that was not answered: whole, or not at all
            assert reader.wrong_records((2,), found) == 0
            third = reader.worker.commit(again.open_session(LAYOUT, TOKENS), 3)
            assert reader.find((3,)) == [third]
            assert (worker.window == 7).all(), "the daemon stored into a window that was given up"
        worker.close()


@pytest.mark.timeout(60)
def test_a_stopped_worker_delays_nobody_and_goes_on(tmp_path: Path) -> None:
    with Daemon(tmp_path, "4MiB") as daemon, Witness(daemon) as witness, DoomedProcess(daemon, "reading") as reading:
        reading.read_until("read", 10.0)
        reading.signal(signal.SIGSTOP)
        reading.wait_stopped()
        witness.resume()
        started_s = time.monotonic()
        while time.monotonic() - started_s < 1.5:  # longer than a heartbeat
            witness.require_more()
            with lasting(0.0, DELAY_S_MAX):
                witness.client.close_session(witness.client.open_session(LAYOUT, TOKENS))
        assert witness.slowest_s < DELAY_S_MAX
        reading.drop_lines()
        reading.signal(signal.SIGCONT)
        for _ in range(3):
            reading.read_until("read", 10.0)
        witness.require_more()


@pytest.mark.timeout(60)
def test_a_daemon_ends_in_time_although_a_stopped_worker_holds_slots(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        with Witness(daemon):
            pass  # has stored what the other one reads
        with DoomedProcess(daemon, "reading") as reading:
            reading.read_until("read", 10.0)
            reading.signal(signal.SIGSTOP)
            reading.wait_stopped()
            with lasting(0.0, END_S_MAX):
                assert daemon.stop() == 0
            assert os.listdir(daemon.run_dir) == ["kvstored.log"]
            reading.signal(signal.SIGCONT)
            assert reading.read_until("ended", END_S_MAX) in ("ended RingPoisoned", "ended UNAVAILABLE")


@pytest.mark.timeout(60)
def test_a_worker_stopped_in_an_upload_keeps_it_and_can_be_killed(tmp_path: Path) -> None:
    """Slots are the scarce thing: those of the stopped worker are free again once it is dead."""
    options = ("--nvme-bytes=64MiB", "--copy-threads=1", f"--slots-max={2 * SLOTS}")
    with Daemon(tmp_path, options=options) as daemon, Witness(daemon) as witness:
        with DoomedProcess(daemon, "sigstopped") as doomed:
            doomed.wait_stopped()
            with AdminClient.connect(daemon.socket, daemon.broker) as admin:
                assert admin.get_status().counters["uploads_reserved"] == 1
            with StoreClient.connect(daemon.socket, daemon.broker, "third", 20.0) as third:
                with pytest.raises(StoreError, match="RESOURCE_EXHAUSTED"):
                    TestWorker(third)
                doomed.kill()
                deadline_s = time.monotonic() + 2.0
                while not registered(third):
                    assert time.monotonic() < deadline_s, "the slots did not come back"
                    time.sleep(0.01)
        witness.require_more()


def registered(client: StoreClient) -> bool:
    try:
        TestWorker(client).close()
    except StoreError as error:
        if error.code != "RESOURCE_EXHAUSTED":
            raise
        return False
    return True
