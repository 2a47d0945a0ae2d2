"""Lane offsets, the figures that follow from a geometry, and the places that presets and the slack give each head."""

from dataclasses import replace

import numpy as np
import pytest

from decode_worker.policy.presets import PRESETS
from decode_worker.window.geometry import WindowGeometry

from .pretend import Bench, RandomRetriever, settings

RESIDENT = np.array([[True, True], [False, True], [False, False]])
CAPACITY = np.array([[90, 90], [90, 90], [70, 96]], np.int32)


def geometry(**changes) -> WindowGeometry:
    values = {
        "layers": 3, "kv_heads": 2, "record_bytes": 512, "label_bytes": 2048, "sink": 4,
        "selected": np.full((3, 2), 64, np.int32), "capacity": CAPACITY, "tail": 576, "resident": RESIDENT,
        "resident_places": 1024,
    }  # fmt: skip
    return WindowGeometry(**{**values, **changes})


def test_lanes_do_not_overlap_and_fill_the_slot():
    g = geometry()
    ends = g.offsets.ravel() + g.places.ravel().astype(np.uint64) * np.uint64(512)
    assert g.offsets.ravel()[0] == 0
    assert (g.offsets.ravel()[1:] == ends[:-1]).all()
    assert ends[-1] == g.window_bytes <= g.slot_bytes < g.window_bytes + 4096
    assert (g.windows(8192)[..., 0] == g.offsets + np.uint64(8192)).all()
    assert g.places.tolist() == [[1024, 1024], [4 + 90 + 576, 1024], [4 + 70 + 576, 4 + 96 + 576]]
    assert g.first_tail[2].tolist() == [74, 100]


def test_figures_count_window_labels_and_slot_maps():
    g = geometry()
    offloaded, resident = 3, 3
    assert g.resident_bytes == resident * 1024 * 512
    assert g.window_bytes == g.resident_bytes + (offloaded * (4 + 576) + 90 + 70 + 96) * 512
    lists = (90 + 70 + 96) * (2 * 8 + 4) + offloaded * 64 * 2 * 4
    assert g.device_bytes == g.slot_bytes + offloaded * 2 * 2048 + lists
    assert g.offloaded_bytes(1000) == offloaded * 1000 * 512


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"record_bytes": 100}, "record_bytes"),
        ({"selected": np.zeros((3, 2), np.int32)}, "positive"),
        ({"selected": CAPACITY + 1}, "more records than it has places"),
        ({"resident": RESIDENT[:2]}, "shape"),
    ],
)
def test_impossible_geometries_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        geometry(**wrong)


@pytest.mark.parametrize("stored", [256, 5120])
def test_presets_compare_at_equal_device_bytes(stored):
    """A unit of eight may round a head's places up, by less than one unit."""
    sizes = {}
    for preset in PRESETS.names:
        if preset != "full":
            chosen = settings(preset, budget=0.1, context=8192)
            sizes[preset] = chosen.geometry(stored, 8192).window_bytes
    assert sizes["qsac"] == sizes["litecache"] == sizes["infinigen"]
    offloaded, record_bytes = 4, 128
    assert 0 <= sizes["lru"] - sizes["qsac"] < offloaded * 8 * record_bytes


class Sliding(RandomRetriever):
    """Selects k tokens in a row, `drift[head]` further at every selection: so many are new."""

    def __init__(self, *drift: int) -> None:
        super().__init__(0)
        self._drift, self._asked = drift, {}

    def select(self, layer, head, view, query, low, high, k, unit=1):
        turn = self._asked.setdefault((layer, head), 0)
        self._asked[layer, head] = turn + 1
        wanted = (low + turn * self._drift[head] + np.arange(k)) % view.stored
        tokens = view.tokens_of(layer, head)
        return np.flatnonzero(np.isin(tokens, wanted) & (tokens < high) & (tokens >= low)).astype(np.int32)


def test_spare_places_go_where_they_let_a_head_keep_its_old_set(rng):
    """k 40, slack 10 each: head 1 always wants 12 new ones, head 0 only 2. What head 0 leaves, head 1 gets."""
    bench = Bench("cpu", settings("infinigen", slack=0.25, slots=1), Sliding(2, 12), rng)
    bench.bind(0, 512, 600)
    assert (bench.state.capacity[1:, 0] == 50).all()
    for _ in range(40):
        bench.step()
    assert bench.policy.counters.cleared == 2 * 39, "head 1 of both layers at each step but the first"

    bench.unbind(0)
    bench.bind(0, 512, 600)
    assert bench.state.capacity[1:, 0].tolist() == [[44, 56], [44, 56]], "1.25 of what misses fetched on average"
    for _ in range(10):
        bench.step()
    assert bench.policy.counters.cleared == 2 * 39, "no head gives its old set up any more"


@pytest.mark.parametrize("drift", [(1, 40), (40, 40), (0, 0)])
def test_spare_places_are_never_more_than_the_slack_s(rng, drift):
    bench = Bench("cpu", settings("infinigen", slack=0.25), Sliding(*drift), rng)
    bench.bind(0, 512, 600)
    for _ in range(8):
        bench.step()
    offloaded = ~bench.settings.resident
    for stored in (256, 512, 1024, 2048):
        even = bench.settings.geometry(stored, 2048).capacity[offloaded]
        given = bench.policy.geometry(2048, stored).capacity[offloaded]
        assert given.sum() <= even.sum()
        assert (given >= bench.settings.budgeted(stored)).all()
        assert (given <= bench.settings.budgeted(stored) + bench.settings.spare_max(stored)).all()


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_heads_may_select_different_numbers(rng, kernels):
    bench = Bench(kernels, settings("infinigen"), RandomRetriever(3), rng)
    even = bench.policy.geometry

    def uneven(context: int, stored: int | None = None) -> WindowGeometry:
        g = even(context, stored)
        selected = g.selected - np.array([[0, 0], [0, 30], [10, 20]], np.int32)
        return replace(g, selected=selected, capacity=selected + 5)

    bench.policy.geometry = uneven
    bench.bind(0, 512, 600)
    for _ in range(5):
        bench.step(failing=0.1)
    counts = [[int(bench.state.count[bench.state.side(layer, 0, head)]) for head in (0, 1)] for layer in (1, 2)]
    assert counts == [[40, 10], [30, 20]]
