"""Whatever a neighbour's ticket holds, others are served between its parts: tickets, commands and signals."""

import signal
from collections.abc import Callable

import pytest

from bench.neighbour import ATTACKS, SMALL, Attack, Document, Neighbour
from kvstore_service.client import AdminClient
from tests.isolation.conftest import HOT
from tests.support.daemon_process import Daemon

ANSWER_US_MAX = 2_000_000
END_S_MAX = 10.0
FLOODED = Document("flooded", 16384)
FLOOD, MANY_RUNS = ATTACKS["flood"], ATTACKS["many_runs"]


def warm(neighbour: Neighbour) -> None:
    """Then nothing of its tickets waits for the disk."""
    neighbour.fetch(neighbour.range(0, neighbour.tokens, 2))


def open_runs(neighbour: Neighbour, ticket: int) -> int:
    return int((neighbour.ring.poll(ticket)[:, 0] == 0).sum())


def begun(neighbour: Neighbour, attack: Attack) -> int:
    """Posts a ticket of the attack and returns it when its first run is answered."""
    ticket = neighbour.post(next(attack.tickets(neighbour)))
    while open_runs(neighbour, ticket) == attack.geometry.runs_max:
        pass
    return ticket


def test_hot_tickets_are_answered_within_a_neighbours_ticket(daemon: Daemon, victim: Neighbour) -> None:
    """At one ticket per ring and turn it is one."""
    hot = victim.gather([5])
    with Neighbour(daemon, FLOODED, FLOOD.geometry) as neighbour:
        warm(neighbour)
        ticket, answers = neighbour.post(next(FLOOD.tickets(neighbour))), 0
        while open_runs(neighbour, ticket):
            victim.fetch(hot, ANSWER_US_MAX)
            answers += 1
        assert answers >= 20


def test_an_unbind_does_not_wait_for_a_neighbours_ticket(daemon: Daemon, victim: Neighbour) -> None:
    with Neighbour(daemon, FLOODED, FLOOD.geometry) as neighbour:
        warm(neighbour)

        def unbound_in_time() -> bool:
            ticket = begun(neighbour, FLOOD)
            victim.unbind()
            left = open_runs(neighbour, ticket)
            victim.bind()
            neighbour.ring.wait(ticket, 10 * ANSWER_US_MAX)
            return left > 0

        assert once_in(5, unbound_in_time)


def once_in(attempts: int, succeeds: Callable[[], bool]) -> bool:
    """On a busy machine any process may be kept from its work for a while."""
    return any(succeeds() for _ in range(attempts))


@pytest.mark.timeout(120)
def test_a_ticket_of_all_runs_and_a_million_pairs_delays_nobody(daemon: Daemon, victim: Neighbour) -> None:
    hot = victim.gather([5])
    with Neighbour(daemon, FLOODED, MANY_RUNS.geometry) as neighbour:
        neighbour.post(next(MANY_RUNS.tickets(neighbour)))
        for _ in range(50):
            victim.fetch(hot, ANSWER_US_MAX)
        with Neighbour(daemon, HOT, SMALL) as newcomer:  # registers, attaches, binds
            newcomer.fetch(newcomer.gather([7]), ANSWER_US_MAX)
        with AdminClient.connect(daemon.socket, daemon.broker) as admin:
            assert all(check.ok for check in admin.audit())
        assert not victim.ring.poisoned


@pytest.mark.timeout(120)
def test_a_worker_that_leaves_takes_its_ticket_with_it(daemon: Daemon, victim: Neighbour) -> None:
    with Neighbour(daemon, FLOODED, MANY_RUNS.geometry) as neighbour:
        neighbour.post(next(MANY_RUNS.tickets(neighbour)))
        victim.fetch(victim.gather([5]), ANSWER_US_MAX)
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        assert all(check.ok for check in admin.audit())
        assert dict(admin.get_status().counters)["workers"] <= 2


@pytest.mark.timeout(120)
def test_no_ticket_keeps_the_daemon_from_ending(daemon: Daemon) -> None:
    """Its worker has gone already, so there is nothing to drain."""
    assert daemon.process is not None
    with Neighbour(daemon, FLOODED, MANY_RUNS.geometry) as neighbour:
        neighbour.post(next(MANY_RUNS.tickets(neighbour)))
    daemon.process.send_signal(signal.SIGTERM)
    daemon.process.wait(END_S_MAX)
