"""The whole path through a real daemon, from reservation to gathered bytes; races and restarts."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore_service.client import (
    AdminClient,
    PackImportance,
    PackRef,
    PrefixCandidate,
    SidecarKey,
    StoreClient,
    StoreError,
)
from tests.support.daemon_process import Daemon
from tests.support.world import (
    LANES,
    LAYERS,
    LAYOUT,
    TOKENS,
    TestWorker,
    candidate,
    digest,
    expected,
    order_of,
    reservation,
)

RECORDS = np.random.default_rng(0).choice(2 * TOKENS, 300, replace=False).astype(np.uint32)


def connect(daemon: Daemon, name: str = "test") -> StoreClient:
    return StoreClient.connect(daemon.socket, daemon.broker, name, timeout_s=10.0)


@pytest.fixture
def worker(client: StoreClient) -> Iterator[TestWorker]:
    registered = TestWorker(client)
    yield registered
    registered.close()


def store_chain(worker: TestWorker, numbers: list[int]) -> list[PackRef]:
    session = worker.client.open_session(LAYOUT, 4096)
    reserved = worker.client.reserve_pack(session, [reservation(n, i) for i, n in enumerate(numbers)])
    uploads = [item.upload_id for item in reserved if item.upload_id is not None]
    for upload_id, number in zip(uploads, numbers, strict=True):
        worker.store(upload_id, number)
    committed = worker.client.commit_pack(session, uploads)
    worker.client.close_session(session)
    return [item.pack for item in committed if item.pack is not None]


def read_chain(worker: TestWorker, numbers: list[int], slot: int = 0) -> None:
    """Finds the chain by its tokens, binds it and compares every byte."""
    client = worker.client
    session = client.open_session(LAYOUT, 4096)
    found = client.lookup_prefix(LAYOUT.fingerprint, [candidate(n, i) for i, n in enumerate(numbers)])
    assert len(found) == len(numbers)
    assert client.attach_packs(session, found) == len(numbers) * TOKENS
    epoch = client.bind_slot(session, slot, found, worker.windows(slot))
    records = RECORDS[len(numbers) * TOKENS > RECORDS]
    np.testing.assert_array_equal(worker.gather(slot, epoch, records), expected(numbers, records))
    client.close_session(session)


def test_what_was_stored_is_read_byte_for_byte(worker: TestWorker) -> None:
    packs = store_chain(worker, [1, 2])
    read_chain(worker, [1, 2])
    order = worker.client.get_map(packs[1])
    assert order.shape == (LAYERS, LANES, TOKENS)
    np.testing.assert_array_equal(order[1, 0], order_of(2, 1, 0))


def test_no_call_is_made_inside_a_decode_step(worker: TestWorker) -> None:
    packs = store_chain(worker, [1, 2])
    session = worker.client.open_session(LAYOUT, 4096)
    worker.client.attach_packs(session, packs)
    epoch = worker.client.bind_slot(session, 0, packs, worker.windows(0))
    before = worker.client.rpc_count
    for _ in range(5):
        worker.gather(0, epoch, RECORDS)
    assert worker.client.rpc_count == before


def test_lookup_takes_the_longest_chain_of_whole_packs(worker: TestWorker) -> None:
    packs = store_chain(worker, [1, 2, 3])
    look = worker.client.lookup_prefix
    assert look(LAYOUT.fingerprint, [candidate(1), candidate(2, 1), candidate(3, 2)]) == packs
    assert look(LAYOUT.fingerprint, [candidate(1), candidate(9, 1), candidate(3, 2)]) == packs[:1]
    assert look(LAYOUT.fingerprint, [candidate(2, 1), candidate(3, 2)]) == []
    assert look(b"another model".ljust(32), [candidate(1)]) == []
    other_size = PrefixCandidate(0, 2 * TOKENS, digest(77))
    assert look(LAYOUT.fingerprint, [other_size, candidate(1), candidate(2, 1)]) == packs[:2]


def test_an_uncommitted_pack_is_seen_by_nobody(worker: TestWorker) -> None:
    session = worker.client.open_session(LAYOUT, 4096)
    worker.write(session, 1)
    assert worker.client.lookup_prefix(LAYOUT.fingerprint, [candidate(1)]) == []


def test_an_existing_pack_is_not_written_again(worker: TestWorker) -> None:
    (pack,) = store_chain(worker, [1])
    session = worker.client.open_session(LAYOUT, 4096)
    (again,) = worker.client.reserve_pack(session, [reservation(1)])
    assert again.exists
    assert again.pack == pack


def test_the_first_commit_wins_and_the_second_gets_its_build(daemon: Daemon, worker: TestWorker) -> None:
    with connect(daemon, "rival") as client:
        rival = TestWorker(client)
        sessions = [worker.client.open_session(LAYOUT, 4096), client.open_session(LAYOUT, 4096)]
        mine, theirs = worker.write(sessions[0], 1), rival.write(sessions[1], 1, compete=True)
        assert mine.upload_id is not None
        assert theirs.upload_id is not None
        assert mine.pack.build != theirs.pack.build
        (lost_or_won,) = client.commit_pack(sessions[1], [theirs.upload_id])
        (second,) = worker.client.commit_pack(sessions[0], [mine.upload_id])
        assert not lost_or_won.exists
        assert second.exists
        assert second.pack == theirs.pack
        rival.close()
    assert len(list((daemon.data_dir / "packs").iterdir())) == 1
    read_chain(worker, [1])


def test_a_half_stored_upload_cannot_be_committed(worker: TestWorker) -> None:
    session = worker.client.open_session(LAYOUT, 4096)
    reserved = worker.client.reserve_pack(session, [reservation(1), reservation(2, 1)])
    uploads = [item.upload_id for item in reserved if item.upload_id is not None]
    worker.store(uploads[0], 1, range(1))
    worker.store(uploads[1], 2)
    first, second = worker.client.commit_pack(session, uploads)
    assert first.error is not None
    assert first.error.code == "FAILED_PRECONDITION"
    assert second.error is not None
    assert "parent" in second.error.message
    worker.store(uploads[0], 1, range(1, LAYERS))
    assert all(item.error is None for item in worker.client.commit_pack(session, uploads))
    read_chain(worker, [1, 2])


def test_an_aborted_upload_leaves_nothing(daemon: Daemon, worker: TestWorker) -> None:
    session = worker.client.open_session(LAYOUT, 4096)
    reserved = worker.write(session, 1)
    assert reserved.upload_id is not None
    worker.client.abort_pack([reserved.upload_id])
    worker.client.abort_pack([reserved.upload_id])
    assert list((daemon.data_dir / "packs").iterdir()) == []
    with pytest.raises(StoreError, match="NOT_FOUND"):
        worker.client.commit_pack(session, [reserved.upload_id])


def test_another_list_than_the_sessions_is_refused(worker: TestWorker) -> None:
    client = worker.client
    packs = store_chain(worker, [1, 2])
    session = client.open_session(LAYOUT, 4096)
    client.attach_packs(session, packs)
    wrong_build = [packs[0], PackRef(packs[1].pack_id, bytes(16), TOKENS, TOKENS)]
    for refs in (packs[:1], wrong_build, []):
        with pytest.raises(StoreError, match="FAILED_PRECONDITION"):
            client.bind_slot(session, 0, refs, worker.windows(0))
    outside = worker.windows(0)
    outside[0, 0, 0] = 1 << 40
    with pytest.raises(StoreError, match="INVALID_ARGUMENT"):
        client.bind_slot(session, 0, packs, outside)
    assert client.bind_slot(session, 0, packs, worker.windows(0)) > 0


def test_attach_refuses_gaps_other_builds_and_more_than_declared(worker: TestWorker) -> None:
    client = worker.client
    packs = store_chain(worker, [1, 2])
    session = client.open_session(LAYOUT, TOKENS)
    for refs in ([packs[1]], packs, [PackRef(packs[0].pack_id, bytes(16), 0, TOKENS)]):
        with pytest.raises(StoreError, match="FAILED_PRECONDITION"):
            client.attach_packs(session, refs)
    with pytest.raises(StoreError, match="NOT_FOUND"):
        client.attach_packs(session, [PackRef(bytes(32), bytes(16), 0, TOKENS)])
    assert client.attach_packs(session, packs[:1]) == TOKENS


def test_a_sealed_tail_extends_the_bound_slot(worker: TestWorker) -> None:
    client = worker.client
    packs = store_chain(worker, [1])
    session = client.open_session(LAYOUT, 4096)
    client.attach_packs(session, packs)
    epoch = client.bind_slot(session, 0, packs, worker.windows(0))
    (reserved,) = client.reserve_pack(session, [reservation(2, 1, packs[0].pack_id)])
    assert reserved.upload_id is not None
    worker.store(reserved.upload_id, 2)
    assert client.seal_tail(session, reserved.upload_id) == reserved.pack
    np.testing.assert_array_equal(worker.gather(0, epoch, RECORDS), expected([1, 2], RECORDS))


def test_a_tail_can_be_sealed_with_another_writers_pack(worker: TestWorker) -> None:
    client = worker.client
    packs = store_chain(worker, [1, 2])
    session = client.open_session(LAYOUT, 4096)
    client.attach_packs(session, packs[:1])
    epoch = client.bind_slot(session, 0, packs[:1], worker.windows(0))
    (reserved,) = client.reserve_pack(session, [reservation(2, 1, packs[0].pack_id)])
    assert reserved.exists
    assert client.seal_existing(session, reserved.pack) == packs[1]
    np.testing.assert_array_equal(worker.gather(0, epoch, RECORDS), expected([1, 2], RECORDS))


def test_a_fork_shares_its_packs(daemon: Daemon, worker: TestWorker) -> None:
    packs = store_chain(worker, [1, 2])
    session = worker.client.open_session(LAYOUT, 4096)
    worker.client.attach_packs(session, packs)
    fork = worker.client.fork_session(session)
    worker.client.close_session(session)
    epoch = worker.client.bind_slot(fork, 1, packs, worker.windows(1))
    np.testing.assert_array_equal(worker.gather(1, epoch, RECORDS), expected([1, 2], RECORDS))
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        assert [item.references for item in admin.list_packs()] == [1, 1]


def test_a_full_store_says_which_limit_and_when_to_try_again(tmp_path: Path) -> None:
    with Daemon(tmp_path, options=("--nvme-bytes=1MiB", "--copy-threads=1")) as daemon, connect(daemon) as client:
        worker = TestWorker(client)
        session = client.open_session(LAYOUT, 1 << 20)
        with pytest.raises(StoreError) as raised:
            client.reserve_pack(session, [reservation(n, n) for n in range(10)])
        assert raised.value.code == "RESOURCE_EXHAUSTED"
        assert [item.subject for item in raised.value.violations] == ["nvme_bytes"]
        assert raised.value.retry_after_s
        worker.commit(session, 1)
        worker.close()


def test_sidecars_belong_to_a_build(worker: TestWorker) -> None:
    client = worker.client
    (pack,) = store_chain(worker, [1])
    key = SidecarKey(pack.pack_id, pack.build, "hash", b"seed 1")
    assert client.get_sidecar(key) is None
    client.put_sidecar(key, b"codes" * 1000)
    assert client.get_sidecar(key) == b"codes" * 1000
    with pytest.raises(StoreError, match="FAILED_PRECONDITION"):
        client.put_sidecar(SidecarKey(pack.pack_id, bytes(16), "hash"), b"codes")


def test_a_sidecar_stays_unless_it_is_to_be_replaced(daemon: Daemon, worker: TestWorker) -> None:
    (pack,) = store_chain(worker, [1])
    key = SidecarKey(pack.pack_id, pack.build, "labels", b"settings")
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        stored_bytes = admin.get_status().counters["stored_bytes"]
        for replace, content in ((True, b"first"), (False, b"second"), (True, b"third one"), (True, b"4")):
            worker.client.put_sidecar(key, content, replace)
            kept = content if replace else b"first"
            assert worker.client.get_sidecar(key) == kept
            (path,) = (daemon.data_dir / "sidecars").iterdir()
            assert admin.get_status().counters["stored_bytes"] == stored_bytes + path.stat().st_size
        assert all(check.ok for check in admin.audit())


def test_importance_is_a_hint(worker: TestWorker) -> None:
    (pack,) = store_chain(worker, [1])
    session = worker.client.open_session(LAYOUT, 4096)
    worker.client.hint_importance(session, [PackImportance(pack, np.full((LAYERS, LANES), 64, np.uint32))])
    with pytest.raises(StoreError, match="INVALID_ARGUMENT"):
        worker.client.hint_importance(session, [PackImportance(pack, np.zeros((1, 1), np.uint32))])


def test_a_killed_daemon_serves_what_was_committed_and_nothing_else(daemon: Daemon) -> None:
    with connect(daemon) as client:
        worker = TestWorker(client)
        packs = store_chain(worker, [1, 2])
        client.put_sidecar(SidecarKey(packs[0].pack_id, packs[0].build, "hash"), b"codes")
        worker.write(client.open_session(LAYOUT, 4096), 3)
        assert len(list((daemon.data_dir / "packs").iterdir())) == 3
        daemon.kill()
        with pytest.raises(StoreError, match="UNAVAILABLE"):
            client.open_session(LAYOUT, 4096)
        worker.close()
    daemon.start()
    assert len(list((daemon.data_dir / "packs").iterdir())) == 2
    with connect(daemon) as client:
        worker = TestWorker(client)
        assert client.lookup_prefix(LAYOUT.fingerprint, [candidate(3)]) == []
        read_chain(worker, [1, 2])
        assert client.get_sidecar(SidecarKey(packs[0].pack_id, packs[0].build, "hash")) == b"codes"
        worker.close()


def test_a_changed_block_is_found_and_its_pack_is_served_no_more(daemon: Daemon, worker: TestWorker) -> None:
    (pack,) = store_chain(worker, [1])
    (path,) = (daemon.data_dir / "packs").iterdir()
    with path.open("r+b") as file:
        file.seek(3 * 4096 + 17)
        byte = file.read(1)
        file.seek(3 * 4096 + 17)
        file.write(bytes([byte[0] ^ 1]))
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        (answer,) = admin.verify()
    assert answer.bad_blocks or answer.error
    assert worker.client.lookup_prefix(LAYOUT.fingerprint, [candidate(1)]) == []
    session = worker.client.open_session(LAYOUT, 4096)
    with pytest.raises(StoreError, match="DATA_LOSS"):
        worker.client.attach_packs(session, [pack])
    worker.commit(session, 1)
    read_chain(worker, [1])


def test_faults_can_be_injected_into_a_real_daemon(tmp_path: Path) -> None:
    with Daemon(tmp_path, faulty=True) as daemon, connect(daemon) as client:
        worker = TestWorker(client)
        packs = store_chain(worker, [1, 2])
        session = client.open_session(LAYOUT, 4096)
        client.attach_packs(session, packs)
        epoch = client.bind_slot(session, 0, packs, worker.windows(0))
        daemon.set_faults(fail_every=1)
        with pytest.raises(AssertionError):
            worker.gather(0, epoch, RECORDS)
        daemon.set_faults(delay_us=200, delay_random=True, reorder=True, seed=3)
        np.testing.assert_array_equal(worker.gather(0, epoch, RECORDS), expected([1, 2], RECORDS))
        worker.close()
