"""A read that a decode step waits for does not stand behind a neighbour's restore, claimed by a read-ahead or not."""

from collections.abc import Iterator

import numpy as np
import pytest

from bench.neighbour import LANES, RECORD_BYTES, SMALL, Document, Neighbour, Post
from decode_worker import _native
from kvstore_service.client import RingGeometry
from tests.support.daemon_process import Daemon

EXTENT_RECORDS = 32
ATTEMPTS = 5
OPEN_SHARE_MIN = 0.25  # of the RANGE's runs; behind all of it, next to none is left
PART = (48 << 20) // LANES // RECORD_BYTES  # of the RANGE, per lane: less than the DRAM tier
RUNS = 96
MINE = Document("mine", 16384)
BULK = Document("bulk", ATTEMPTS * PART)


@pytest.fixture
def reader(daemon: Daemon) -> Iterator[Neighbour]:
    with Neighbour(daemon, MINE, SMALL) as worker:
        yield worker


def open_share_behind(neighbour: Neighbour, reader: Neighbour, part: int, tickets: list[Post]) -> float:
    """Reads behind a RANGE that has begun; which share of its runs is open when the last of `tickets` is answered."""
    bulk = neighbour.post(neighbour.range(part * PART, PART, RUNS))
    while (neighbour.ring.poll(bulk)[:, 0] == 0).all():
        pass
    posted = [reader.post(ticket) for ticket in tickets]
    reader.ring.wait(posted[-1], 20_000_000)
    share = float((neighbour.ring.poll(bulk)[:, 0] == 0).mean())
    neighbour.ring.wait(bulk, 20_000_000)
    return share


def test_a_cold_read_overtakes_a_neighbours_range(daemon: Daemon, reader: Neighbour) -> None:
    with Neighbour(daemon, BULK, RingGeometry(2, RUNS, 1)) as neighbour:
        tickets = [[reader.gather([(1 + attempt) * EXTENT_RECORDS])] for attempt in range(ATTEMPTS)]
        shares = [open_share_behind(neighbour, reader, part, ticket) for part, ticket in enumerate(tickets)]
        assert max(shares) >= OPEN_SHARE_MIN


def test_a_block_that_is_being_read_ahead_is_read_at_once_when_it_is_wanted(daemon: Daemon, reader: Neighbour) -> None:
    """The hint's extents are claimed when the ticket for one of them comes."""

    def hinted(extent: int) -> list[Post]:
        records = np.arange(extent, extent + 8, dtype=np.uint32) * EXTENT_RECORDS
        hint = reader.gather(records)
        return [Post(_native.OP_PROMOTE, hint.runs, hint.pairs), reader.gather(records[-1:])]

    with Neighbour(daemon, BULK, RingGeometry(2, RUNS, 1)) as neighbour:
        shares = [open_share_behind(neighbour, reader, part, hinted(64 * (1 + part))) for part in range(ATTEMPTS)]
        assert max(shares) >= OPEN_SHARE_MIN
