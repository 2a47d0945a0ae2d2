"""What heads are about to want is hinted: the same by every set of kernels, and nothing else changes."""

import numpy as np
import pytest
import torch

from decode_worker.config import DEFAULTS, ConfigError, WorkerConfig
from decode_worker.kernels import base
from decode_worker.policy.lookahead import Lookahead
from decode_worker.policy.presets import PRESETS
from decode_worker.retrieval.hash import HashRetriever
from tests.gpu.exact import multiples

from .pretend import HEAD_DIM, RECORD_BYTES, Bench, counted, settings
from .test_kernel_sets import CHANGED

SETS = ("reference", "cpu")


def drifting(rng, steps: int, group: int) -> np.ndarray:
    """Queries [steps, layers, 1, heads * group, d] that turn by a few degrees in each step."""
    ends = rng.standard_normal((2, 3, 1, 2 * group, HEAD_DIM))
    angle = np.linspace(0, np.pi / 2, steps)[:, None, None, None, None]
    return multiples(np.cos(angle) * ends[0] + np.sin(angle) * ends[1], 64)


def pair_of_benches(seed: int, lookaheads: tuple[str, str], kernels=SETS, **changes) -> list[Bench]:
    made = []
    for name, lookahead in zip(kernels, lookaheads, strict=True):
        own = np.random.default_rng(seed)
        projection = multiples(own.standard_normal((3, 2, HEAD_DIM, 256)), 16)
        index = HashRetriever(projection, own.standard_normal((3, 2, HEAD_DIM), dtype=np.float32))
        bench = Bench(name, settings(**changes), index, own, lookahead=Lookahead.of(lookahead))
        keys = own.standard_normal((3, 1024, 2, HEAD_DIM), dtype=np.float32)
        bench.bind(0, 768, 800, [bench.pack(first, 256, keys[:, first : first + 256]) for first in (0, 256, 512)])
        made.append(bench)
    return made


def step(bench: Bench, query: np.ndarray, failing: float = 0.0) -> list[tuple]:
    """A step with hints behind each look-up; what was hinted: (layer, head, records) of each run."""
    hinted = []
    bench.begin([0], [bench.positions[0]])
    for layer in range(bench.settings.layers):
        ticket = bench.plan(layer, query[layer])
        if bench.kernels.context.lookahead:
            hinted += told(bench, layer, query[layer])
        if ticket is not None:
            bench.kernels.commit(layer, bench.serve(ticket, failing))
        bench.state.fault[:] = 0
        bench.write(layer)
    bench.positions[0] += 1
    return hinted


def told(bench: Bench, layer: int, query: np.ndarray) -> list[tuple]:
    hint = bench.kernels.plan_ahead(layer, torch.from_numpy(np.ascontiguousarray(query, np.float32)))
    if hint is None:
        return []
    first, count = hint.runs["first_pair"], hint.runs["pair_count"]
    return [
        (layer, int(run["lane"]), hint.pairs[f : f + n, 0].tolist())
        for run, f, n in zip(hint.runs, first, count, strict=True)
    ]


@pytest.mark.parametrize("preset", [name for name in PRESETS.names if not PRESETS[name].resident])
@pytest.mark.parametrize("lookahead", ["next", "1", "4"])
def test_all_sets_hint_the_same(rng, preset, lookahead):
    group, seed = int(rng.integers(1, 4)), int(rng.integers(1 << 30))
    changes = {
        "preset": preset,
        "group": group,
        "weights": rng.random((3, 2, group), dtype=np.float32),
        "tau": rng.uniform(0.3, 0.95, (3, 2)).astype(np.float32),
        "budget": int(rng.integers(20, 90)),
    }
    benches = pair_of_benches(seed, (lookahead, lookahead), **changes)
    for number, query in enumerate(drifting(rng, 24, group)):
        left, right = (step(bench, query, failing=0.2) for bench in benches)
        assert left == right, f"step {number}"
    for name in CHANGED:
        assert torch.equal(*(counted(bench.state, name) for bench in benches)), name


@pytest.mark.parametrize("kernels", SETS)
def test_hints_change_nothing_else(rng, kernels):
    seed = int(rng.integers(1 << 30))
    benches = pair_of_benches(seed, ("off", "3"), (kernels, kernels))
    hinted = 0
    for query in drifting(rng, 24, 2):
        hinted += len([step(bench, query) for bench in benches][1])
        for name in CHANGED:
            assert torch.equal(*(counted(bench.state, name) for bench in benches)), name
    assert hinted
    assert (benches[0].window == benches[1].window).all()


@pytest.mark.parametrize("kernels", SETS)
def test_what_is_hinted_is_what_a_miss_would_fetch(rng, kernels):
    bench, compared = pair_of_benches(int(rng.integers(1 << 30)), ("2", "off"), (kernels, kernels))[0], 0
    for query in drifting(rng, 24, 2):
        hinted = step(bench, query)
        for layer, head, records in hinted:
            thresholds = bench.state.tau.clone()
            bench.state.tau[layer, head] = 2.0  # a miss now
            bench.begin([0], [bench.positions[0] - 1])
            ticket = bench.plan(layer, query[layer])
            bench.state.tau[:] = thresholds
            runs = {int(run["lane"]): run for run in ticket.runs}
            first, count = (int(runs[head][name]) for name in ("first_pair", "pair_count"))
            assert records == ticket.pairs[first : first + count, 0].tolist()
            bench.kernels.commit(layer, bench.serve(ticket, 0))
            compared += 1
    assert compared


@pytest.mark.parametrize("kernels", SETS)
def test_a_falling_similarity_is_hinted_before_the_miss(rng, kernels):
    """Once per label within the horizon, and never behind the miss."""
    bench = pair_of_benches(int(rng.integers(1 << 30)), ("3", "3"), (kernels, kernels))[0]
    hinted_for, foreseen, missed = set(), 0, 0
    for query in drifting(rng, 40, 2):
        before = bench.state.issued.clone()
        hints = step(bench, query)
        for layer, _, head in torch.nonzero(bench.state.issued != before).tolist():
            missed += before[layer, 0, head] > 1
            foreseen += (layer, head, int(before[layer, 0, head])) in hinted_for
        for layer, head, _ in hints:
            assert bench.state.issued[layer, 0, head] == before[layer, 0, head], "a head that misses now is hinted"
            hinted_for.add((layer, head, int(before[layer, 0, head])))
    assert missed
    assert foreseen >= missed / 2


@pytest.mark.parametrize("kernels", SETS)
def test_a_step_hints_no_more_than_its_budget(rng, kernels, monkeypatch):
    monkeypatch.setattr(base, "HINTED_BYTES_MAX", 7 * RECORD_BYTES)
    bench = pair_of_benches(int(rng.integers(1 << 30)), ("8", "8"), (kernels, kernels))[0]
    sizes = [sum(len(records) for *_, records in step(bench, query)) for query in drifting(rng, 24, 2)]
    assert max(sizes) == 7


@pytest.mark.parametrize("value", ["on", "0", "-1", "1.5", "65", ""])
def test_bad_lookahead_is_one_line(tmp_path, value):
    with pytest.raises(ConfigError, match=f"^lookahead={value!r}: write off, next, or a number"):
        WorkerConfig(tmp_path, lookahead=value)


def test_lookahead_as_yaml_reads_it(tmp_path):
    assert WorkerConfig(tmp_path, lookahead=False).lookahead == "off"
    assert WorkerConfig(tmp_path, lookahead=3).lookahead == "3"
    assert DEFAULTS["lookahead"] == "off"


def test_next_needs_queries_that_are_made_ahead(tmp_path):
    with pytest.raises(ConfigError, match="lookahead=next"):
        WorkerConfig(tmp_path, lookahead="next", query="true")
