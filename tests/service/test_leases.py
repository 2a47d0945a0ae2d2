"""Leases: a user's own end first when there are too many, and nothing of them is kept."""

from kvstore_service.daemon.store.leases import LEASES_MAX, Leases

ALICE, MALLORY = 7, 8
CALL = 16384  # packs that one call may name


def names(first: int, count: int) -> list[bytes]:
    return [index.to_bytes(32) for index in range(first, first + count)]


def test_nobody_ends_another_users_leases() -> None:
    leases = Leases(60.0)
    (found,) = names(0, 1)
    leases.take([found], "alice", ALICE)
    calls = [names(1 + index * CALL, CALL) for index in range(LEASES_MAX // CALL + 1)]
    for index, asked in enumerate(calls):
        leases.take(asked, f"session {index}", MALLORY)
    assert leases.holds(found)
    assert not leases.holds(calls[0][0])
    assert leases.holds(calls[-1][-1])
    assert sum(map(len, leases._until_s.values())) == LEASES_MAX


def test_leases_that_have_ended_leave_nothing() -> None:
    leases = Leases(0.0)
    leases.take(names(0, 3), "expires", ALICE)
    leases.take([], "empty", ALICE)
    assert not leases.holds(names(0, 1)[0])
    leases.expire()
    leases.take(names(0, 3), "goes", MALLORY)
    leases.drop_all("goes")
    leases.drop(names(0, 1), "nobody")
    assert not leases._until_s
    assert not leases._holders
    assert not leases._held
    assert not leases._users
