"""What an operator sees of a busy daemon, and can end: quotas, workers, uploads, events, explanations."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore_service import kvctl
from kvstore_service._proto import store_service_pb2 as store_pb
from kvstore_service.client import AdminClient, StoreClient, StoreError
from kvstore_service.daemon.store.events import BACKLOG_MAX, Events
from kvstore_service.shared import wire
from tests.service.test_administration import ROOT, chain, run
from tests.service.test_observability import scrape
from tests.service.test_room import PACK_BYTES, RECORDS, ids, store, write
from tests.support.daemon_process import Daemon
from tests.support.life import until
from tests.support.world import LAYOUT, TestWorker, candidate, digest, expected, reservation

FRAME_BYTES = 16384
TENANT = f"uid-{os.getuid()}"


def test_a_quota_bounds_a_user_evicts_its_packs_and_is_durable(tmp_path: Path) -> None:
    with store(tmp_path, 100) as (daemon, worker, admin):
        admin.set_quota(TENANT, int(4.5 * PACK_BYTES))
        admin.set_quota("uid-12345", 1 << 30)
        for number in range(1, 8):
            write(worker, number)
        until(lambda: len(ids(admin)) <= 4, "the quota")
        quotas = {item.tenant: item for item in admin.list_quotas()}
        assert quotas[TENANT].nvme_bytes == int(4.5 * PACK_BYTES)
        assert quotas[TENANT].stored_bytes == len(ids(admin)) * PACK_BYTES
        admin.pin(list(ids(admin)))
        session = worker.client.open_session(LAYOUT, 4096)
        with pytest.raises(StoreError) as raised:
            worker.client.reserve_pack(session, [reservation(20 + n, n) for n in range(2)])
        assert (raised.value.code, raised.value.reason) == ("RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED")
        assert [item.subject for item in raised.value.violations] == [f"quota of {TENANT}"]
        worker.close()
        daemon.restart()
        with AdminClient.connect(daemon.socket, daemon.broker) as again:
            assert {item.tenant: item.nvme_bytes for item in again.list_quotas()} == {
                TENANT: int(4.5 * PACK_BYTES), "uid-12345": 1 << 30
            }  # fmt: skip
            again.set_quota(TENANT, 0)
            assert {item.tenant: item.nvme_bytes for item in again.list_quotas()}[TENANT] == 0
            with pytest.raises(StoreError, match=r"INVALID_ARGUMENT.*uid-N"):
                again.set_quota("everybody", 1)


def test_kvctl_sets_and_shows_quotas(daemon: Daemon) -> None:
    assert run(daemon, "quota", "1234", "8GiB").returncode == 0
    (shown,) = json.loads(run(daemon, "quota", "uid-1234", "--format=json").stdout)
    assert (shown["tenant"], shown["nvme_bytes"], shown["stored_bytes"]) == ("uid-1234", 8 << 30, 0)
    assert json.loads(run(daemon, "quota", "1234", "none", "--format=json").stdout) == []
    assert run(daemon, "quota", "1234", "much").returncode == 2


def test_quotas_on_dram_are_set_beside_those_on_disk(daemon: Daemon, admin: AdminClient) -> None:
    def shown() -> list[tuple[int, int]]:
        return [(item.nvme_bytes, item.dram_bytes) for item in admin.list_quotas()]

    (row,) = json.loads(run(daemon, "quota", "1234", "--dram", "1GiB", "--format=json").stdout)
    assert (row["nvme_bytes"], row["dram_bytes"], row["dram_used_bytes"]) == (0, 1 << 30, 0)
    admin.set_quota("uid-1234", nvme_bytes=8 << 30)
    assert shown() == [(8 << 30, 1 << 30)]
    small = run(daemon, "quota", "1234", "--dram", "1B")
    assert small.returncode == 1
    assert "a DRAM quota of 1 B is too small; set at least 131072 B, or none" in small.stderr
    with pytest.raises(StoreError, match=r"INVALID_ARGUMENT.*uid-N"):
        admin.set_quota("uid-4294967296", dram_bytes=1 << 30)
    assert run(daemon, "quota", "1234", "none", "--dram", "2GiB").returncode == 0
    assert shown() == [(0, 2 << 30)]
    admin.set_quota("uid-1234", dram_bytes=0)
    assert shown() == []


def test_a_quota_on_dram_bounds_a_user_shows_and_is_durable(tmp_path: Path) -> None:
    limit_bytes = 10 * FRAME_BYTES

    def read_all(worker: TestWorker, admin: AdminClient, number: int) -> int:
        """Writes a pack and reads it; what DRAM holds afterwards."""
        session = worker.client.open_session(LAYOUT, 4096)
        pack = worker.commit(session, number)
        worker.client.attach_packs(session, [pack])
        epoch = worker.client.bind_slot(session, 0, [pack], worker.windows(0))
        assert (worker.gather(0, epoch, RECORDS) == expected([number], RECORDS)).all()
        worker.client.unbind_slot(0)
        worker.client.close_session(session)
        (quota,) = admin.list_quotas()
        assert [check for check in admin.audit() if not check.ok] == []
        return quota.dram_used_bytes

    with store(tmp_path, 100, "--metrics-addr=127.0.0.1:0") as (daemon, worker, admin):
        assert read_all(worker, admin, 1) > limit_bytes
        admin.set_quota(TENANT, dram_bytes=limit_bytes)
        (quota,) = admin.list_quotas()
        assert (quota.nvme_bytes, quota.dram_bytes) == (0, limit_bytes)
        assert quota.dram_used_bytes == limit_bytes
        measured = scrape(daemon)
        assert measured[f'kvstore_user_dram_bytes{{uid="{os.getuid()}"}}'] == limit_bytes
        assert measured[f'kvstore_user_stored_bytes{{uid="{os.getuid()}"}}'] == quota.stored_bytes == PACK_BYTES
        assert measured["kvstore_frames_used"] * FRAME_BYTES == limit_bytes
        worker.close()
        daemon.restart()
        with ExitStack() as stack:
            again = TestWorker(stack.enter_context(StoreClient.connect(daemon.socket, daemon.broker)))
            stack.callback(again.close)
            operator = stack.enter_context(AdminClient.connect(daemon.socket, daemon.broker))
            assert read_all(again, operator, 2) == limit_bytes
            operator.set_quota(TENANT, dram_bytes=0)
            assert read_all(again, operator, 3) > limit_bytes


def test_quota_sums_stay_exact_beside_many_reservations(tmp_path: Path) -> None:
    """Eight sessions reserve at once where five packs fit: exactly five uploads."""
    with store(tmp_path, 100, "--on-full=refuse") as (daemon, _, admin), ExitStack() as stack:
        admin.set_quota(TENANT, 5 * PACK_BYTES)
        clients = [stack.enter_context(StoreClient.connect(daemon.socket, daemon.broker)) for _ in range(8)]
        workers = [TestWorker(client) for client in clients]

        def reserve(index: int) -> str:
            try:
                clients[index].reserve_pack(clients[index].open_session(LAYOUT, 4096), [reservation(50 + index)])
            except StoreError as error:
                return error.reason
            return "reserved"

        with ThreadPoolExecutor(8) as pool:
            outcomes = Counter(pool.map(reserve, range(8)))
        assert outcomes == {"reserved": 5, "QUOTA_EXCEEDED": 3}
        (quota,) = admin.list_quotas()
        assert quota.reserved_bytes == 5 * PACK_BYTES
        for each in workers:
            each.close()


def test_a_user_that_reserves_all_that_it_may_blocks_nobody(worker: TestWorker, daemon: Daemon) -> None:
    client = worker.client
    session = client.open_session(LAYOUT, 1 << 20)
    client.reserve_pack(session, [reservation(n, n) for n in range(1024)])
    with pytest.raises(StoreError, match="at most 1024") as raised:
        client.reserve_pack(session, [reservation(5000)])
    assert raised.value.violations[0].subject == "uploads of a worker"
    shown = json.loads(run(daemon, "uploads", "--format=json").stdout)
    assert len(shown) == 1024
    assert {item["missing_segments"] for item in shown} == {4}
    (listed,) = [row for row in json.loads(run(daemon, "workers", "--format=json").stdout) if not row["operator"]]
    assert (listed["uploads"], listed["tenant"], listed["pid"]) == (1024, TENANT, os.getpid())
    with StoreClient.connect(daemon.socket, daemon.broker) as other:
        neighbour = TestWorker(other)
        write(neighbour, 7000)
        neighbour.close()
    assert run(daemon, "kill", str(listed["worker_id"])).returncode == 0
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        until(lambda: not admin.get_status().counters["uploads_reserved"], "the worker's uploads end with it")
        assert [check for check in admin.audit() if not check.ok] == []
    with pytest.raises(StoreError, match="UNAUTHENTICATED"):
        client.lookup_prefix(LAYOUT.fingerprint, [])


def test_kill_names_one_worker(daemon: Daemon, admin: AdminClient) -> None:
    with pytest.raises(StoreError, match=r"NOT_FOUND.*kvctl workers"):
        admin.kill_worker("nobody")
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(StoreClient.connect(daemon.socket, daemon.broker, "twin"))
        with pytest.raises(StoreError, match=r"FAILED_PRECONDITION.*2 workers are called 'twin'"):
            admin.kill_worker("twin")


def test_a_workers_name_hides_nobody(daemon: Daemon, admin: AdminClient) -> None:
    """A worker cannot keep itself, or another one, from being killed by calling itself what that one goes by."""
    with StoreClient.connect(daemon.socket, daemon.broker, "meant") as client, ExitStack() as stack:
        meant = TestWorker(client)
        name = str(meant.memory.worker_id)
        stack.enter_context(StoreClient.connect(daemon.socket, daemon.broker, name))
        assert admin.kill_worker(name).name == "meant"
        meant.close()


def test_watch_tells_what_happens(daemon: Daemon, worker: TestWorker, admin: AdminClient) -> None:
    events = admin.watch(timeout_s=20.0)
    assert next(events).kind == "watch"
    pack = write(worker, 1)
    committed = next(events)
    assert (committed.kind, committed.tenant, committed.pack_id) == ("commit", TENANT, pack.pack_id)
    admin.evict([pack.pack_id])
    evicted = next(events)
    assert (evicted.kind, evicted.pack_id, evicted.bytes, evicted.detail) == (
        "evict", pack.pack_id, PACK_BYTES, "operator"
    )  # fmt: skip
    with StoreClient.connect(daemon.socket, daemon.broker, "visitor") as visitor:
        TestWorker(visitor).close()
        registered = next(events)
    assert (registered.kind, "visitor" in registered.detail) == ("worker", True)
    assert next(events).detail.startswith("released")
    admin.drain()
    assert next(events).kind == "drain"
    events.close()  # type: ignore[attr-defined]
    with pytest.raises(StoreError, match=r"INVALID_ARGUMENT.*the kinds are"):
        next(admin.watch(["comit"]))


def test_kvctl_watch_ends_at_its_timeout(daemon: Daemon, worker: TestWorker) -> None:
    command = [sys.executable, "-m", "kvstore_service.kvctl", "--socket", daemon.socket, "watch", "commit"]
    watching = subprocess.Popen([*command, "--format=json", "--timeout=8"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert watching.stdout is not None
    assert json.loads(watching.stdout.readline())["kind"] == "watch"
    pack = write(worker, 1)
    assert json.loads(watching.stdout.readline())["pack_id"] == pack.pack_id.hex()
    assert watching.wait(20) == 0
    watching.stdout.close()


def answers(admin: AdminClient, subject: str) -> dict[str, str]:
    return {finding.subject: finding.answer for finding in admin.explain(subject)}


def test_explain_says_why_a_prompt_was_not_found(worker: TestWorker, admin: AdminClient) -> None:
    session = worker.client.open_session(LAYOUT, 4096)
    first, second = chain(worker, session, [1, 2])
    worker.client.close_session(session)
    prompt = [candidate(1), candidate(2, 1), candidate(3, 2)]

    def ask() -> dict[str, str]:
        worker.client.lookup_prefix(LAYOUT.fingerprint, prompt)
        return answers(admin, digest(3).hex()[:16])

    third = [name for name, answer in ask().items() if answer == "missing" and name.startswith("pack")]
    assert len(third) == 1
    assert ask()[f"prompt {digest(3).hex()}"] == "partly"
    upload = worker.client.reserve_pack(worker.client.open_session(LAYOUT, 4096), [reservation(3, 2, second.pack_id)])
    assert ask()[third[0]] == "being_written"
    worker.client.abort_pack([item.upload_id for item in upload if item.upload_id is not None])
    admin.evict([second.pack_id])
    assert ask()[f"pack {second.pack_id.hex()}"] == "evicted"
    assert answers(admin, first.pack_id.hex()[:12]) == {f"pack {first.pack_id.hex()}": "stored"}
    assert admin.explain()[0].answer == "partly"
    with pytest.raises(StoreError, match="NOT_FOUND"):
        admin.explain("nonsense")


def test_explain_names_damage_and_shows_a_sessions_speed(
    daemon: Daemon, worker: TestWorker, admin: AdminClient
) -> None:
    (pack,) = chain(worker, worker.client.open_session(LAYOUT, 4096), [1])
    session = worker.client.open_session(LAYOUT, 4096)
    worker.client.attach_packs(session, [pack])
    assert [finding.answer for finding in admin.explain(session)] in (["open", "working"], ["open", "idle"])
    assert run(daemon, "explain", session).returncode == 0
    (path,) = (daemon.data_dir / "packs").iterdir()
    path.write_bytes(bytes(path.stat().st_size))
    list(admin.verify())
    assert answers(admin, session)[f"pack {pack.pack_id.hex()}"] == "damaged"


def test_packs_are_filtered_where_they_lie(worker: TestWorker, daemon: Daemon, admin: AdminClient) -> None:
    packs = [write(worker, number) for number in (1, 2, 3)]
    admin.pin([packs[0].pack_id])
    session = worker.client.open_session(LAYOUT, 4096)
    worker.client.attach_packs(session, [packs[1]])

    def listed(*flags: str) -> set[str]:
        return {item["pack_id"] for item in json.loads(run(daemon, "packs", "--format=json", *flags).stdout)}

    everything = {pack.pack_id.hex() for pack in packs}
    assert listed() == listed("--tenant", str(os.getuid())) == everything
    assert listed("--pinned") == {packs[0].pack_id.hex()}
    assert listed("--unused") == {packs[2].pack_id.hex()}
    assert listed("--damaged") == listed("--older-than=1h") == listed("--tenant=77") == set()
    table = run(daemon, "packs").stdout
    assert all(name[:16] in table for name in everything)
    assert run(daemon, "evict", "--unused", "--dry-run").stdout.count(packs[2].pack_id.hex()[:16]) == 1
    assert len(ids(admin)) == 3


def test_the_timeout_holds_for_every_command(daemon: Daemon, client: StoreClient) -> None:
    client.open_session(LAYOUT, 1024)
    started_s = time.monotonic()
    assert kvctl.main(["--socket", daemon.socket, "--timeout=1", "drain", "--wait=60"]) == 1
    assert kvctl.main(["--socket", daemon.socket, "--timeout=1", "watch"]) == 0
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        for command in ("packs", "verify"):
            assert kvctl.main(["--socket", daemon.socket, "--timeout=1", command]) == 1
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert time.monotonic() - started_s < 15.0


def test_an_open_session_seals_and_ends_while_the_daemon_drains(worker: TestWorker, admin: AdminClient) -> None:
    client = worker.client
    session = client.open_session(LAYOUT, 4096)
    packs = chain(worker, session, [1])
    client.bind_slot(session, 0, packs, worker.windows(0))
    admin.drain()
    (sealed,) = client.reserve_pack(session, [reservation(2, 1, packs[0].pack_id)])
    assert sealed.upload_id is not None
    worker.store(sealed.upload_id, 2)
    assert client.seal_tail(session, sealed.upload_id).pack_id == sealed.pack.pack_id
    with pytest.raises(StoreError, match=r"UNAVAILABLE.*draining"):
        client.open_session(LAYOUT, 4096)
    client.close_session(session)
    client.close_session(session)


def stopped(pid: int) -> bool:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)


def test_a_cancelled_opening_leaves_no_session(daemon: Daemon, client: StoreClient, admin: AdminClient) -> None:
    """The daemon finds request and cancellation together."""
    request = store_pb.OpenSessionRequest(layout=wire.layout_to(LAYOUT), declared_max_tokens=4096)
    for number in range(20):
        metadata = client._metadata(f"cancelled-{number}")
        os.kill(daemon.pid, signal.SIGSTOP)
        until(lambda: stopped(daemon.pid), "the daemon stands still")
        opening = client._stub.OpenSession.future(request, timeout=10.0, metadata=metadata)
        time.sleep(0.01)  # for the request to be sent
        opening.cancel()
        os.kill(daemon.pid, signal.SIGCONT)
        assert opening.cancelled()
    until(lambda: admin.list_sessions() == [], "sessions that nobody heard of are closed")


def test_a_slow_watcher_loses_the_oldest_events_and_is_told() -> None:
    events = Events()
    with events.watch(["commit"]) as watch:
        for number in range(BACKLOG_MAX + 10):
            events.tell("commit", detail=str(number))
            events.tell("drain")
        first = watch.take(0.0)
        assert first is not None
        assert (first.detail, watch.dropped, events.dropped()) == ("10", 10, 10)
    assert events.dropped() == 10
