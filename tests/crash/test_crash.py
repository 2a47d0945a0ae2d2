"""SIGKILL of the daemon under mixed load: nothing durable lost, no wrong byte, serving again at once."""

import random
import statistics
import sys
import time
from pathlib import Path

import pytest

from kvstore_service.client import StoreClient, StoreError
from kvstore_service.client.private import PrivateDaemon
from tests.crash.crasher import Counts, Crasher, Lost
from tests.support.daemon_process import Daemon
from tests.support.world import LAYOUT

KILLS = 50
RESTART_S_MAX = 10.0  # on a machine that does other things as well; idle it is below 2


@pytest.mark.timeout(300)
def test_killed_daemons_lose_nothing_and_serve_again(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    counts = Counts()
    with Crasher(Daemon(tmp_path), seed, counts) as crasher:
        while counts.kills < KILLS or counts.kills_before_commit < KILLS // 2:
            crasher.kill()
        crasher.check_all()
    restarts_s = counts.restarts_s
    print(f"{counts}; restart {statistics.median(restarts_s):.2f} s, at most {max(restarts_s):.2f} s")
    assert counts.packs_acknowledged > KILLS, "the daemon was never busy"
    assert statistics.median(restarts_s) <= 2.0
    assert max(restarts_s) <= RESTART_S_MAX


@pytest.mark.timeout(60)
def test_a_daemon_that_acknowledges_too_early_is_found_out(tmp_path: Path) -> None:
    """The harness can fail: this daemon never ends the transactions that it acknowledges."""
    counts = Counts()
    liar = PrivateDaemon(tmp_path / "data", argv=(sys.executable, "-m", "tests.crash.lying_daemon"))
    with Crasher(liar, 1, counts) as crasher, pytest.raises(Lost) as found:
        any(crasher.kill() for _ in range(10))
    assert "seed 1, life" in "".join(found.value.__notes__)
    assert counts.lost == 1
    assert counts.wrong_bytes == counts.other_failures == 0


def test_a_client_joins_a_restarted_daemon_at_once_whatever_older_ones_met(tmp_path: Path) -> None:
    """An older client of the same process has seen the daemon gone, and its connection backs off."""
    with Daemon(tmp_path) as daemon, StoreClient.connect(daemon.socket, daemon.broker, "older", 5.0) as older:
        daemon.kill()
        for _ in range(5):
            with pytest.raises(StoreError, match="UNAVAILABLE"):
                older.lookup_prefix(LAYOUT.fingerprint, [])
            time.sleep(0.1)
        daemon.start()
        with StoreClient.connect(daemon.socket, daemon.broker, "newer", 5.0) as newer:
            assert newer.lookup_prefix(LAYOUT.fingerprint, []) == []
