"""Token sets stay disjoint and complete over many random steps: failures, reordering, seals, several slots."""

import numpy as np
import pytest

from decode_worker.policy.presets import PRESETS

from .pretend import Bench, RandomRetriever, settings

EVERYTHING = 1 << 20


@pytest.mark.parametrize("preset", PRESETS.names)
@pytest.mark.parametrize("budget", [40, EVERYTHING], ids=["few", "all"])
@pytest.mark.parametrize("failing", [0.0, 0.2], ids=["sound", "failing"])
def test_token_is_in_exactly_one_set(rng, preset, budget, failing):
    bench = Bench("cpu", settings(preset, budget=budget), RandomRetriever(1), rng)
    bench.bind(0, 512, 720)
    bench.bind(1, 0, 210)  # its sinks are only in its tail, until that is sealed
    for _ in range(70):
        bench.step(failing=failing)
    assert len(bench.packs[0]) == 3
    assert len(bench.packs[1]) == 1


@pytest.mark.parametrize("preset", PRESETS.names)
def test_token_is_in_exactly_one_set_of_a_session_shorter_than_its_sinks(rng, preset):
    bench = Bench("cpu", settings(preset), RandomRetriever(2), rng)
    bench.bind(0, 0, 2)
    for _ in range(6):
        bench.step()
    assert bench.policy.counters.records_moved == 0


def test_token_is_in_exactly_one_set_while_queries_mostly_hit(rng):
    bench = Bench("cpu", settings(budget=EVERYTHING), RandomRetriever(3), rng)
    bench.bind(0, 256, 400)
    query = np.stack([bench.queries(1)] * 3)
    for _ in range(180):
        bench.step(query + 0.05 * rng.standard_normal(query.shape).astype(np.float32), failing=0.1)
    counters = bench.policy.counters
    assert counters.hit_ratio > 0.8
    assert counters.forced > 0, "a tail was never near its end: the test is too short"


def cover_is_wrong_by(bench: Bench, difference: int) -> None:
    """The planted bug."""

    def change(layer: int) -> None:
        for head in range(2):
            if not bench.settings.resident[layer, head]:
                bench.state.cover[bench.state.side(layer, 0, head)] += difference

    bench.after_commit = change


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_tail_token_counted_twice_is_caught(rng, kernels):
    bench = Bench(kernels, settings("infinigen", budget=EVERYTHING), RandomRetriever(4), rng)
    bench.bind(0, 512, 520)
    for _ in range(3):
        bench.step()
    cover_is_wrong_by(bench, -1)
    with pytest.raises(AssertionError, match="token twice"):
        bench.step()


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_token_in_no_set_is_caught(rng, kernels):
    bench = Bench(kernels, settings(budget=EVERYTHING), RandomRetriever(5), rng)
    bench.bind(0, 512, 600)
    cover_is_wrong_by(bench, 1)
    with pytest.raises(AssertionError, match="token in no set"):
        bench.step()


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_full_tail_is_an_error_not_an_overwrite(rng, kernels):
    bench = Bench(kernels, settings(), RandomRetriever(6), rng)
    bench.bind(0, 256, 500)
    query = np.stack([bench.queries(1)] * 3)
    bench.policy.wants_seal = lambda slot, position: False
    for _ in range(256 + settings().tail - 500):
        assert bench.policy.room(0, bench.positions[0]) > 0
        bench.step(query)
    assert bench.policy.room(0, bench.positions[0]) == 0
    with pytest.raises(RuntimeError, match=r"faults \[-1\]"):
        bench.step(query)
    full = bench.positions[0]
    oldest = bench.attended(1, 0, 0, full - 1)
    assert full - settings().tail in oldest, "the token whose place the new one would take"
    assert bench.policy.counters.forced == 0, "no miss would have moved a cover"
