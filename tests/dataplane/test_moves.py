"""When a copy thread leaves its worker's core: at once, and ever more seldom where that does not help."""

from itertools import pairwise

from kvstore_service._native import Moves

MS = 1_000_000


def moves_within(moves: Moves, times_ns: range) -> list[int]:
    return [now for now in times_ns if moves.move(now)]


def test_the_first_time_it_moves_at_once():
    assert Moves().move(0)
    assert Moves().move(123 * MS)


def test_a_thread_that_is_brought_back_at_once_moves_ever_more_seldom():
    """In the way at each look of a second, once in 10 us: the pauses double up to 100 ms."""
    moved = moves_within(Moves(), range(0, 1000 * MS, 10_000))
    pauses = [after - before for before, after in pairwise(moved)]
    assert pauses[0] == MS // 5
    assert all(after == min(2 * before, 100 * MS) for before, after in pairwise(pauses))
    assert pauses[-1] == 100 * MS
    assert len(moved) < 20


def test_a_move_that_held_makes_the_next_one_possible_soon():
    moves = Moves()
    moves_within(moves, range(0, 1000 * MS, 10_000))
    held = 2000 * MS
    assert moves.move(held)
    assert not moves.move(held + MS // 10)
    assert moves.move(held + MS // 5)
