"""SIGKILL of workers in every state of ring, slot and upload: what they held comes back, and nobody else notices."""

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore_service.client import AdminClient
from tests.crash.doomed import FAULTS, FROZEN, RESTLESS
from tests.crash.doomed_process import DoomedProcess
from tests.crash.witness import Witness
from tests.support.daemon_process import Daemon
from tests.support.world import LAYOUT, TOKENS, reservation

NVME_BYTES = 12 << 20
RELEASE_S = 2.0
WITNESS_S = 5.0  # for one gather, beside the start of processes; alone it takes a millisecond
RANDOM_KILLS = 4  # of each restless worker


class Books:
    """What a daemon holds for its workers, so that before and after can be compared."""

    def __init__(self, daemon: Daemon, admin: AdminClient) -> None:
        self._daemon, self._admin = daemon, admin
        self.baseline = self.held()

    def held(self) -> dict[str, int]:
        status = self._admin.get_status()
        counters = status.counters
        names = ("workers", "sessions", "bound_slots", "rings", "uploads_open", "uploads_reserved")
        maps = Path(f"/proc/{self._daemon.pid}/maps").read_text().splitlines()
        spans = [line.split()[0].split("-") for line in maps if "/memfd:" in line]
        files = []
        for path in (self._daemon.data_dir / "packs").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the daemon removes what a dead worker began
                files.append(path.stat().st_size)
        return {
            **{name: counters[name] for name in names},
            "shared_bytes": sum(int(end, 16) - int(start, 16) for start, end in spans),
            "descriptors": self._daemon.open_descriptors() - counters["packs_open"],
            "files_without_row": len(files) - counters["packs"],
            "bytes_without_row": sum(files) - counters["stored_bytes"],
        }

    def require_baseline(self, within_s: float = RELEASE_S) -> None:
        deadline_s = time.monotonic() + within_s
        while True:
            held = self.held()
            # gRPC may close a descriptor of its own late or keep it; it is never to be one more.
            held["descriptors"] = max(held["descriptors"], self.baseline["descriptors"])
            if held == self.baseline:
                return
            assert time.monotonic() < deadline_s, f"left behind: {held}, before: {self.baseline}"
            time.sleep(0.01)

    def require_room(self, witness: Witness) -> None:
        """Every byte of the disk tier that no pack has can be reserved: no promise is left."""
        counters = self._admin.get_status().counters
        count = (NVME_BYTES - counters["stored_bytes"]) // (counters["stored_bytes"] // counters["packs"])
        session = witness.client.open_session(LAYOUT, count * TOKENS)
        reserved = witness.client.reserve_pack(session, [reservation(9000 + n, n) for n in range(count)])
        witness.client.abort_pack([item.upload_id for item in reserved if item.upload_id is not None])
        witness.client.close_session(session)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Its frames hold less than the witness reads in a round, so that gathers wait for the disk;
    one thread serves all workers."""
    options = (f"--nvme-bytes={NVME_BYTES}", "--copy-threads=1")
    with Daemon(tmp_path_factory.mktemp("kills"), "4MiB", options=options, faulty=True) as running:
        yield running


@pytest.fixture(scope="module")
def witness(daemon: Daemon) -> Iterator[Witness]:
    with Witness(daemon) as reading:
        yield reading


@pytest.fixture(scope="module")
def books(daemon: Daemon, witness: Witness) -> Iterator[Books]:
    with AdminClient.connect(daemon.socket, daemon.broker, timeout_s=20.0) as admin:
        yield Books(daemon, admin)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("state", FROZEN)
def test_a_worker_killed_in_any_state_gives_everything_back(
    daemon: Daemon, witness: Witness, books: Books, state: str
) -> None:
    witness.pause()
    daemon.set_faults(**FAULTS.get(state, {}))
    with DoomedProcess(daemon, state) as doomed:
        if state == "sigstopped":
            doomed.wait_stopped()
        held = books.held()
        assert all(held[name] > books.baseline[name] for name in ("workers", "shared_bytes", "descriptors")), held
        if state != "posted":  # the daemon serves others while this worker's runs stay where they are
            daemon.set_faults()
            witness.resume()
            witness.require_more()
        doomed.kill()
        books.require_baseline()
        daemon.set_faults()
        if state == "posted":
            witness.resume()
        witness.require_more()
        assert witness.slowest_s < WITNESS_S
        books.require_room(witness)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("state", RESTLESS)
def test_a_worker_killed_at_a_random_moment_gives_everything_back(
    daemon: Daemon, witness: Witness, books: Books, state: str
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    witness.resume()
    for _ in range(RANDOM_KILLS):
        with DoomedProcess(daemon, state) as doomed:
            time.sleep(moments.uniform(0, 0.05))
            doomed.kill()
            books.require_baseline()
            witness.require_more()
    assert witness.slowest_s < WITNESS_S
    books.require_room(witness)


def test_the_daemon_says_nothing_of_errors_when_workers_go(daemon: Daemon, books: Books) -> None:
    with DoomedProcess(daemon, "bound") as doomed:
        doomed.kill()
        books.require_baseline()
    log = daemon.log_tail(100_000).splitlines()
    assert [line for line in log if "worker released" in line]
    assert not [line for line in log if " ERROR " in line or "Traceback" in line]
