"""No two threads of the daemon can wait for each other: locks are always taken in one order.

Every lock that the daemon makes is wrapped. Which one is taken while another is held is an edge from one place of
creation to another; a cycle of edges is a deadlock that only needs bad luck, whether or not it happened here.
"""

import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvstore_service.client import AdminClient, SidecarKey, StoreClient, StoreError
from kvstore_service.daemon import config, server
from kvstore_service.daemon.store import registry
from tests.support.world import LAYOUT, TestWorker, candidate, reservation

Place = str  # file:line of the lock's creation
ROUNDS = 6


class Order:
    """What was taken while what was held, by any thread."""

    def __init__(self) -> None:
        self.edges: defaultdict[Place, set[Place]] = defaultdict(set)
        self._held = threading.local()

    def taken(self, place: Place) -> None:
        held = self._held.__dict__.setdefault("places", [])
        for other in held:
            if other != place:  # several of one kind, such as workers' locks, are taken in the order of their tokens
                self.edges[other].add(place)
        held.append(place)

    def given(self, place: Place) -> None:
        held = self._held.places
        del held[len(held) - 1 - held[::-1].index(place)]

    def cycle(self) -> list[Place]:
        """Places that wait for each other in a circle; empty if there is none."""
        done: set[Place] = set()

        def walk(path: list[Place]) -> list[Place]:
            for after in sorted(self.edges[path[-1]]):
                if after in path:
                    return [*path[path.index(after) :], after]
                if after not in done and (found := walk([*path, after])):
                    return found
            done.add(path[-1])
            return []

        return next((found for place in sorted(self.edges) if place not in done and (found := walk([place]))), [])


class Watched:
    """A lock that tells `order` when it is taken and given back."""

    def __init__(self, lock: Any, place: Place, order: Order) -> None:
        self._lock, self._place, self._order = lock, place, order

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken: bool = self._lock.acquire(blocking, timeout)
        if taken:
            self._order.taken(self._place)
        return taken

    def release(self) -> None:
        self._order.given(self._place)
        self._lock.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)  # what a Condition asks of an RLock

    def __enter__(self) -> "Watched":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Order:
    """Watches the locks that kvstore_service.daemon makes from here on."""
    order = Order()

    def watched(name: str) -> None:
        make = getattr(threading, name)

        def lock() -> Any:
            frame = sys._getframe(1)
            while frame.f_code.co_name == "__init__" and "threading.py" in frame.f_code.co_filename:
                assert frame.f_back is not None
                frame = frame.f_back  # a Condition makes its own
            _, ours, file = frame.f_code.co_filename.partition("kvstore_service/daemon/")
            return Watched(make(), f"{file}:{frame.f_lineno}", order) if ours else make()

        monkeypatch.setattr(threading, name, lock)

    watched("Lock")
    watched("RLock")
    add_worker = registry.Registry.add_worker

    def add(self: registry.Registry, *arguments: Any) -> registry.Worker:
        worker = add_worker(self, *arguments)
        worker.lock = Watched(worker.lock, "a worker's", order)  # type: ignore[assignment]
        return worker

    monkeypatch.setattr(registry.Registry, "add_worker", add)
    return order


@pytest.fixture
def daemon(tmp_path: Path, order: Order) -> Iterator[server.Daemon]:
    where = [f"--data-dir={tmp_path}/data", f"--socket={tmp_path}/s", f"--broker={tmp_path}/b"]
    sizes = ["--dram-bytes=16MiB", "--nvme-bytes=4MiB", "--copy-threads=1", "--metrics-addr=127.0.0.1:0"]
    daemon = server.Daemon(config.load([*where, *sizes]))
    daemon.start()
    yield daemon
    daemon.close()


def live(client: StoreClient, admin: AdminClient, data_dir: Path, number: int) -> None:
    """Some of everything that workers and operators do."""
    worker = TestWorker(client)
    tenant = admin.list_workers()[0].tenant
    for round_ in range(ROUNDS):
        session = client.open_session(LAYOUT, 1 << 16)
        unwanted = client.reserve_pack(session, [reservation(1000 * number + round_)])
        pack = worker.commit(session, 100 * number + round_)
        client.put_sidecar(SidecarKey(pack.pack_id, pack.build, "hash"), b"index")
        client.attach_packs(session, client.lookup_prefix(LAYOUT.fingerprint, [candidate(100 * number + round_)]))
        epoch = client.bind_slot(session, 0, [pack], worker.windows(0))
        assert epoch > 0
        admin.audit()
        with suppress(StoreError):  # the other thread's bound may stand in the way
            admin.set_quota(tenant, (1 + round_ % 2) << 21)
            worker.write(session, 100 * number + round_ + 50, 1)
        client.abort_pack([item.upload_id for item in unwanted if item.upload_id is not None])
        for answer in (admin.get_status(), admin.list_uploads(), admin.list_quotas(), admin.explain(session)):
            assert answer is not None
        client.close_session(session)
        admin.pin([pack.pack_id])
        admin.unpin([pack.pack_id])
        list(admin.list_packs())
        if round_ % 2:
            file = next((data_dir / "packs").glob(f"{pack.pack_id.hex()}-*"))
            file.write_bytes(file.read_bytes()[:-1])
        list(admin.verify([pack.pack_id]))
        admin.evict([pack.pack_id])
    worker.close()


@pytest.mark.timeout(120)
def test_locks_are_taken_in_one_order(daemon: server.Daemon, order: Order) -> None:
    sockets = (str(daemon.config.socket), str(daemon.config.broker))
    failed: list[BaseException] = []

    def run(number: int) -> None:
        try:
            with StoreClient.connect(*sockets) as client, AdminClient.connect(*sockets) as admin:
                live(client, admin, daemon.config.data_dir, number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert not failed
    assert sum(map(len, order.edges.values())) > 5, "the locks were watched"
    assert order.cycle() == []


def test_a_cycle_is_found() -> None:
    order = Order()
    first, second = (Watched(threading.Lock(), place, order) for place in ("a:1", "b:2"))
    with first, second:
        pass
    assert order.cycle() == []
    with second, first:
        pass
    assert order.cycle() == ["a:1", "b:2", "a:1"]
