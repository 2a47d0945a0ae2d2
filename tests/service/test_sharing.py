"""One prompt, many workers at once: one of them writes each pack, the others wait for it or take over."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore_service.client import AdminClient, StoreClient
from tests.support.daemon_process import Daemon
from tests.support.life import until
from tests.support.world import LAYOUT, TestWorker, reservation

CHAIN = [reservation(number, index) for index, number in enumerate(range(1, 17))]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Daemon, TestWorker, TestWorker]]:
    """Two workers of a daemon that is quick to lose patience."""
    options = ("--copy-threads=1", "--upload-stall-s=1", "--upload-ttl-s=3")
    with Daemon(tmp_path, options=options) as daemon, ExitStack() as stack:
        clients = [stack.enter_context(StoreClient.connect(daemon.socket, daemon.broker)) for _ in range(2)]
        yield daemon, TestWorker(clients[0]), TestWorker(clients[1])


def test_eight_workers_open_one_upload_per_pack(daemon: Daemon) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(StoreClient.connect(daemon.socket, daemon.broker)) for _ in range(8)]
        for client in clients:
            stack.callback(TestWorker(client).close)
        opened: list[int] = []

        def reserve(client: StoreClient) -> None:
            session = client.open_session(LAYOUT, 1 << 20)
            answers = client.reserve_pack(session, CHAIN)
            assert not any(item.exists for item in answers)
            assert all((item.upload_id is None) == bool(item.retry_after_s) for item in answers)
            opened.append(sum(item.upload_id is not None for item in answers))

        threads = [threading.Thread(target=reserve, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(opened) == len(clients)
        assert sum(opened) == len(CHAIN)


def test_who_waits_reads_what_the_other_committed(pair: tuple[Daemon, TestWorker, TestWorker]) -> None:
    _, writer, waiter = pair
    upload = writer.write(writer.client.open_session(LAYOUT, 4096), 1)
    session = waiter.client.open_session(LAYOUT, 4096)
    (pending,) = waiter.client.reserve_pack(session, [reservation(1)])
    assert pending.retry_after_s
    assert upload.upload_id is not None
    (committed,) = writer.client.commit_pack(writer.client.open_session(LAYOUT, 4096), [upload.upload_id])
    (found,) = waiter.client.reserve_pack(session, [reservation(1)])
    assert found.exists
    assert found.pack == committed.pack
    waiter.client.attach_packs(session, [found.pack])


@pytest.mark.parametrize("end", ["abort", "death"])
def test_the_next_asker_takes_over_what_is_given_up(pair: tuple[Daemon, TestWorker, TestWorker], end: str) -> None:
    _, writer, waiter = pair
    upload = writer.write(writer.client.open_session(LAYOUT, 4096), 1)
    session = waiter.client.open_session(LAYOUT, 4096)
    assert waiter.client.reserve_pack(session, [reservation(1)])[0].upload_id is None
    if end == "abort":
        assert upload.upload_id is not None
        writer.client.abort_pack([upload.upload_id])
    else:
        writer.client.close()
    until(lambda: waiter.client.reserve_pack(session, [reservation(1)])[0].upload_id is not None, "a take-over")
    waiter.commit(session, 2)


def test_a_stalled_writer_blocks_nobody_and_a_rival_need_not_wait(
    pair: tuple[Daemon, TestWorker, TestWorker],
) -> None:
    daemon, writer, waiter = pair
    stalled = writer.write(writer.client.open_session(LAYOUT, 4096), 1)
    session = waiter.client.open_session(LAYOUT, 4096)
    (rival,) = waiter.client.reserve_pack(session, [reservation(1)], compete=True)
    assert rival.upload_id is not None
    waiter.client.abort_pack([rival.upload_id])
    until(lambda: waiter.client.reserve_pack(session, [reservation(1)])[0].upload_id is not None, "the stall ends")
    # Nor does it keep what it reserved for ever.
    assert stalled.upload_id is not None
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        until(lambda: admin.get_status().counters["uploads_expired"] == 2, "both have expired")
        assert admin.get_status().counters["uploads_open"] == 0
        assert [check for check in admin.audit() if not check.ok] == []
