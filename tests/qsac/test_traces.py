"""A tiny hand-made session for each policy, with every fetched record written out.

256 tokens of which four have keys; records lie in reverse order, so record = 255 - token; sink 2, and places for half
as many more records as the budget names.
"""

import numpy as np
import pytest

from decode_worker.policy.cache.base import Cache, Stamp
from decode_worker.retrieval.exact import ExactRetriever

from .pretend import HEAD_DIM, Bench, RandomRetriever, settings

X, Y = np.eye(HEAD_DIM, dtype=np.float32)[:2]
KEYS = {10: 5 * X, 20: 4 * X, 30: 5 * Y, 40: 4 * Y}  # records 245, 235, 225, 215
QUERIES = [X, X, 0.9 * X + 0.3 * Y, Y, X + Y, X + Y, X, Y]


def units(*numbers: int) -> list[int]:
    return [8 * unit + record for unit in numbers for record in range(8)]


FETCHED = {
    # The third query is at cosine .95 of its label; the fourth changes both records and exceeds the slack.
    "qsac": [[[235, 245]], [], [], [[215, 225]], [[245]], [], [[235]], [[215, 225]]],
    # The same sets without looking at labels: nothing that is held travels twice.
    "infinigen": [[[235, 245]], [], [], [[215, 225]], [[245]], [], [[235]], [[215, 225]]],
    # A miss fetches its set whatever is held, and so exceeds the slack whenever there is an old one.
    "litecache": [[[235, 245]], [], [], [[215, 225]], [[225, 245]], [], [[235, 245]], [[215, 225]]],
    # Two units of eight records (26, 28, 29, 30), places for three. The fourth query needs the places of both units
    # in use: of these 29 goes, its place being the lower one. 30 is still there for the fifth. The seventh finds 26
    # out of use, the eighth none, and 29 goes again.
    "lru": [[units(29, 30)], [], [], [units(26, 28)], [], [], [units(29)], [units(26)]],
    "full": [[], [], [], [], [], [], [], []],
}
HITS = {"qsac": 3, "litecache": 3, "infinigen": 0, "lru": 0, "full": 0}
CLEARED = {"qsac": 2, "litecache": 4, "infinigen": 2, "lru": 2, "full": 0}


def one_head(kernels: str, rng: np.random.Generator, preset: str, **changes) -> Bench:
    values = {"layers": 2, "kv_heads": 1, "group": 1, "slots": 1, "sink": 2, "budget": 2, "slack": 0.5}
    bench = Bench(kernels, settings(preset, **{**values, **changes}), ExactRetriever(1.0), rng)
    keys = np.zeros((2, 256, 1, HEAD_DIM), np.float32)
    for token, key in KEYS.items():
        keys[:, token, 0] = key
    reverse = np.broadcast_to(np.arange(255, -1, -1), (2, 1, 256))
    bench.bind(0, 256, 300, [bench.pack(0, 256, keys, reverse)])
    return bench


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("preset", FETCHED)
def test_trace_is_the_one_worked_out_by_hand(rng, kernels, preset):
    bench = one_head(kernels, rng, preset, **({"budget": 16} if preset == "lru" else {}))
    for number, (query, fetched) in enumerate(zip(QUERIES, FETCHED[preset], strict=True)):
        bench.step(np.tile(query, (2, 1, 1, 1)))
        assert bench.fetched == fetched, f"step {number}"
    counters = bench.policy.counters
    assert (counters.hits, counters.cleared) == (HITS[preset], CLEARED[preset])
    assert counters.records_moved == sum(len(run) for step in FETCHED[preset] for run in step)


def test_first_sets_make_the_first_step_hit(rng):
    bench = Bench("cpu", settings(), RandomRetriever(1), rng)
    bench.bind(0, 256, 300)
    queries = np.stack([bench.queries(1)[0] for _ in range(3)])
    bench.seed(0, queries)
    moved = bench.policy.counters.records_moved
    assert moved > 0
    bench.step(queries[:, None])
    assert bench.policy.counters.records_moved == moved
    assert bench.policy.counters.lookups == 0, "the first step is not counted"


WANTED = [3, 7, 11, 15, 3, 20, 7, 3, 24, 11]  # one unit of eight records at each step, in places for four


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("stamp", "fetched", "left"),
    [
        (Stamp.STEP, [3, 7, 11, 15, 20, 7, 24, 11], [3, 7, 11, 24]),  # 7, 11, 15, 20 go: selected longest ago
        (Stamp.NONE, [3, 7, 11, 15, 20, 7, 3, 24, 11], [3, 7, 11, 24]),  # 7 (3 is in use), 3, 11, 15, 20: oldest
        (Stamp.COUNT, [3, 7, 11, 15, 20, 7, 24, 11], [3, 11, 15, 24]),  # 7, 11, 20, 7: all selected once, lower place
    ],
    ids=["lru", "oldest", "least-often"],
)
def test_unit_that_goes_is_the_one_that_the_stamp_names(rng, kernels, stamp, fetched, left):
    cache = Cache(keeps=True, stamp=stamp)
    bench = one_head(kernels, rng, "lru", budget=32, slack=0.0, attended=0.25, cache=cache)
    arrived = []
    for wanted in WANTED:
        bench.policy.retriever.select = lambda *asked, unit=wanted: np.array([unit], np.int32)
        bench.step()
        arrived += [run[0] // 8 for run in bench.fetched]
    assert arrived == fetched
    side = bench.state.side(1, 0, 0)
    assert bench.state.held[side][: int(bench.state.held_count[side])].tolist() == left
    assert bench.policy.counters.cleared == 0
