"""A worker that has poisoned its rings, and keeps its connection: what it still asks for leaves nothing behind."""

import pytest

from kvstore_service.client import AdminClient, StoreClient, StoreError
from tests.support.daemon_process import Daemon
from tests.support.life import until
from tests.support.world import LAYOUT, TOKENS, TestWorker, reservation

RESERVATIONS = 40


def test_a_reservation_that_is_refused_keeps_no_file(daemon: Daemon) -> None:
    """Each was a file of full size that no quota counted, and a descriptor, until the daemon ended."""
    with (
        AdminClient.connect(daemon.socket, daemon.broker) as admin,
        StoreClient.connect(daemon.socket, daemon.broker, "poisoner") as client,
    ):
        worker = TestWorker(client)
        session = client.open_session(LAYOUT, TOKENS)
        before = daemon.open_descriptors()
        worker.decode.poison()
        until(lambda: worker.bulk.poisoned, "the daemon has seen it")
        for number in range(RESERVATIONS):
            with pytest.raises(StoreError, match="poisoned") as refused:
                client.reserve_pack(session, [reservation(number)])
            assert refused.value.code == "FAILED_PRECONDITION"
        assert [check for check in admin.audit() if not check.ok] == []
        assert daemon.open_descriptors() < before + RESERVATIONS // 2
        worker.close()
