"""A hint is a hint: however many wait already, none fails."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.document import counters
from bench.neighbour import DAEMON_OPTIONS, LANES, Neighbour
from kvstore_service.client import PackImportance
from tests.isolation.conftest import HOT
from tests.support.daemon_process import Daemon
from tests.support.life import until

HINTS, PER_CALL = 5000, 100  # 4,096 can wait


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path, options=DAEMON_OPTIONS, faulty=True) as running:
        yield running


def test_more_hints_than_can_wait_are_accepted(daemon: Daemon, victim: Neighbour) -> None:
    """The copy thread is kept from reading ahead, so that they stay queued."""
    hint = PackImportance(victim.packs[0], np.full((1, LANES), HOT.tokens, np.uint32))
    daemon.set_faults(stopped=True)
    for _ in range(HINTS // PER_CALL):
        victim.client.hint_importance(victim.session, [hint] * PER_CALL)
    daemon.set_faults(stopped=False)
    until(lambda: counters(daemon)["hints_dropped"] > 0, "hints that were dropped")
    victim.fetch(victim.gather([5]))
