"""The benchmark of policies: its bounds hold, and its smallest run has all figures."""

import random
from itertools import combinations

import numpy as np
import pytest

from bench import tiers
from bench.placement import belady, best_static, most_used_so_far, next_uses
from bench.stalled import replay_with_stalled_kept, segments, tickets, waiting_tickets
from bench.traces import Trace
from kvstore_service._native import TIER_POLICIES, replay
from tests.test_bench import SMALL


@pytest.fixture
def keys() -> np.ndarray:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    return np.random.default_rng(seed).zipf(1.2, 3000).astype(np.uint64) % np.uint64(200)


def test_no_policy_beats_belady(keys: np.ndarray) -> None:
    for frames in (1, 7, 40):
        most = belady(keys, frames).sum()
        for policy in TIER_POLICIES:
            assert replay(policy, frames, keys).sum() <= most


def test_belady_is_what_trying_everything_finds() -> None:
    keys = np.random.default_rng(random.randrange(1 << 32)).integers(0, 5, 9).astype(np.uint64)

    def most(at: int, held: frozenset[int]) -> int:
        if at == len(keys):
            return 0
        key = int(keys[at])
        if key in held:
            return 1 + most(at + 1, held)
        kept = [frozenset(part) for part in combinations(held, 2)] if len(held) == 3 else [held]
        return max(most(at + 1, part | {key}) for part in kept)

    assert belady(keys, 3).sum() == most(0, frozenset())


def test_the_best_static_placement_is_of_the_most_wanted(keys: np.ndarray) -> None:
    _, counts = np.unique(keys, return_counts=True)
    for frames in (1, 5, 1000):
        assert best_static(keys, frames).sum() == np.sort(counts)[::-1][:frames].sum()
    after = next_uses(np.array([3, 1, 3, 1, 1], np.uint64))
    assert after[:2].tolist() == [2, 3]
    assert after[3] == 4
    assert (after[[2, 4]] >= 5).all()


def test_counting_everything_holds_what_was_wanted_most(keys: np.ndarray) -> None:
    frames = 8
    hits = most_used_so_far(keys, frames)
    counts: dict[int, int] = {}
    held: set[int] = set()
    for key, hit in zip(keys.tolist(), hits, strict=True):
        assert hit == (key in held)
        counts[key] = counts.get(key, 0) + 1
        if key not in held and (len(held) < frames or counts[key] > min(counts[k] for k in held)):
            if len(held) == frames:
                held.remove(min(held, key=lambda k: (counts[k], k)))
            held.add(key)
        assert sorted(counts[k] for k in held) == sorted(counts.values())[-len(held) :]


def test_segments_that_stall_most_are_never_missed_and_the_others_share_the_rest() -> None:
    fields = np.dtype(
        [(name, "u8" if name == "pack" else "u4") for name in ("pack", "extent", "worker", "slot_epoch", "run")]
        + [(name, "u2") for name in ("slot", "layer", "lane", "bulk")]
    )
    accesses = np.zeros(900, fields)
    turn = np.arange(300)
    accesses["layer"], accesses["run"] = np.repeat(turn % 2, 3), np.repeat(turn << 16, 3)
    for lane, extents in enumerate((4, 3, 100)):  # in turns that are longer than the tier: each misses at each ticket
        of_lane = accesses[lane::3]
        of_lane["lane"], of_lane["extent"] = lane, 1000 * lane + 100 * of_lane["layer"] + turn % extents
    trace = Trace("turns", accesses, extents=12)  # two of each segment
    assert len(np.unique(tickets(trace))) == 300
    assert (np.diff(tickets(trace).reshape(300, 3)) == 0).all()
    hits = replay_with_stalled_kept(trace, "lru", frames=8, profiled=300)
    assert sorted(np.unique(segments(trace)[hits]).tolist()) == [0, 1]  # two segments' extents fill half of the tier
    assert hits[(segments(trace) == 0) | (segments(trace) == 1)].all()
    assert waiting_tickets(trace, hits, 300) == 1
    assert waiting_tickets(trace, hits | (accesses["layer"] == 1), 300) == 0.5
    accesses["bulk"][accesses["layer"] == 0] = 1
    assert waiting_tickets(trace, hits | (accesses["layer"] == 1), 300) == 0


def test_every_policy_stands_beside_both_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    settings = tiers.Settings(parts=(50, 25), shape=SMALL, tokens=2048, steps=6, budget=0.1)
    figures = {figure.name: figure for figure in tiers.measure(settings, ["random"])}
    for policy in TIER_POLICIES:
        for part in ("50", "25"):
            assert figures[f"hit_ratio.{policy}.random.{part}"].rival == "best static"
        for bound in ("best_static", "belady"):
            value = figures[f"hit_vs_{bound}.{policy}.random"].value
            assert value is not None
            assert 0 <= value <= (1 if bound == "belady" else 1.1)
    assert (figures["accesses.random"].value or 0) > 0
    capsys.readouterr()
