"""A store that may hold half of what is written: it evicts, and nobody notices."""

import random
import time
from pathlib import Path

import pytest

from kvstore_service.client import AdminClient
from tests.crash.pressure import PINNED, Counts, Pressure, daemon_options
from tests.support.daemon_process import Daemon

LASTS_S = 10.0


@pytest.mark.timeout(240)
def test_nothing_is_refused_lost_or_wrong_where_half_of_it_fits(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    with Daemon(tmp_path, options=daemon_options()) as daemon:
        pressure = Pressure(daemon, seed)
        pressure.run(time.monotonic() + LASTS_S)
    counts = pressure.counts
    print(counts)
    assert not pressure.failures, pressure.failures
    assert (counts.refusals, counts.pinned_lost, counts.wrong_bytes) == (0, 0, 0)
    assert counts.packs_evicted > 10
    assert counts.packs_written > counts.packs_evicted
    assert counts.records_verified


def test_a_pinned_chain_that_is_gone_is_noticed(tmp_path: Path) -> None:
    """The harness can fail."""
    with Daemon(tmp_path, options=daemon_options()) as daemon:
        pressure = Pressure(daemon, 1)
        pressure.run(time.monotonic())
        with AdminClient.connect(daemon.socket, daemon.broker) as admin:
            admin.unpin([pack.pack_id for pack in admin.list_packs()])
            admin.evict([pack.pack_id for pack in admin.list_packs()])
        assert pressure.counts == Counts(packs_written=2 * PINNED, records_verified=2 * PINNED * 256)
        pressure.look_at_pinned([(1, 2)])
        assert pressure.counts.pinned_lost == 2
