"""The kernel sets keep the same state, bit for bit, over random steps of every policy and retriever.

Queries and projections are multiples of small powers of two: a code has no bit that depends on the order of a sum.
"""

import numpy as np
import pytest
import torch

from decode_worker.policy.presets import PRESETS
from decode_worker.retrieval.exact import ExactRetriever
from decode_worker.retrieval.hash import HashRetriever
from tests.gpu.exact import multiples

from .pretend import HEAD_DIM, Bench, RandomRetriever, counted, settings

CHANGED = (
    "held", "held_places", "held_count", "places", "count", "label", "label_kind", "cover", "generation", "parity",
    "issued", "stamp", "chosen", "missing", "fault", "counters",
)  # fmt: skip


def retriever(name: str, seed: int, layers: int, heads: int):
    if name == "random":
        return RandomRetriever(seed)
    if name == "exact":
        return ExactRetriever(HEAD_DIM**-0.5)
    rng = np.random.default_rng(seed)
    projection = multiples(rng.standard_normal((layers, heads, HEAD_DIM, 256)), 16)
    return HashRetriever(projection, rng.standard_normal((layers, heads, HEAD_DIM), dtype=np.float32))


@pytest.mark.parametrize("preset", PRESETS.names)
@pytest.mark.parametrize("index", ["random", "exact", "hash"])
def test_all_sets_keep_the_same_state(rng, patched_once, preset, index):
    group = int(rng.integers(1, 5))
    changes = {
        "group": group,
        "weights": rng.random((3, 2, group), dtype=np.float32),
        "slack": float(rng.choice([0, 0.125, 1])),
        "budget": int(rng.integers(1, 90)),
        "tau": rng.uniform(-0.2, 0.9, (3, 2)).astype(np.float32),
    }
    seed = int(rng.integers(1 << 30))
    benches = []
    for kernels in ("reference", "cpu", "triton") if index == "hash" else ("reference", "cpu"):
        own = np.random.default_rng(seed)
        bench = Bench(kernels, settings(preset, **changes), retriever(index, seed, 3, 2), own)
        keys = own.standard_normal((3, 1024, 2, HEAD_DIM), dtype=np.float32)
        packs = [bench.pack(first, size, keys[:, first : first + size]) for first, size in ((0, 256), (256, 512))]
        bench.bind(0, 768, 800, packs)
        bench.bind(1, 0, 3)
        benches.append(bench)
    drawn = [bench.queries(2) for bench in benches]  # by each, so that what they draw later is the same
    base = np.stack([drawn[0]] * 3)
    for number in range(6):
        noise = rng.choice([0.05, 2.0], (3, 2, 1, 1)) * rng.standard_normal(base.shape)
        for bench in benches:
            bench.step(multiples(base + noise, 64), failing=0.2)
        for name in CHANGED:
            right, *others = (counted(bench.state, name) for bench in benches)
            for bench, values in zip(benches[1:], others, strict=True):
                assert torch.equal(values, right), f"step {number}: {name} differs in {type(bench.kernels).__name__}"
        assert all((bench.window == benches[0].window).all() for bench in benches[1:])


def test_all_sets_hit_by_the_same_last_bit(rng, patched_once):
    """Thresholds are float32, similarities are not rounded to it: one just above its threshold is a hit."""
    group, hits = 3, []
    query = rng.standard_normal((3, 2, group, HEAD_DIM), dtype=np.float32)
    label = (query + 0.3 * rng.standard_normal(query.shape)).astype(np.float32)
    weights = rng.random((3, 2, group), dtype=np.float32)
    q, k, w = query.astype(np.float64), label.astype(np.float64), weights.astype(np.float64)
    cosine = (q * k).sum(-1) / np.sqrt((q * q).sum(-1) * (k * k).sum(-1))
    above = w.sum(-1) / (w / cosine).sum(-1)
    tau = above.astype(np.float32)
    tau = np.where(tau >= above, np.nextafter(tau, np.float32(-1)), tau)
    changes = {"group": group, "weights": weights, "tau": tau}
    for kernels in ("reference", "cpu", "triton"):
        bench = Bench(kernels, settings(**changes), retriever("hash", 1, 3, 2), np.random.default_rng(1))
        bench.bind(0, 256, 300)
        bench.state.first_position[0] = -1
        bench.seed(0, label.reshape(3, -1, HEAD_DIM))
        bench.step(query.reshape(3, 1, -1, HEAD_DIM))
        hits.append(bench.policy.counters.hits)
    assert hits == [4, 4, 4]


@pytest.mark.parametrize("spoilt", [np.nan, np.inf])
def test_a_query_that_is_no_number_misses_in_all_sets(rng, patched_once, spoilt):
    group = 3
    query = rng.standard_normal((3, 2, group, HEAD_DIM), dtype=np.float32)
    spoilt_query = query.copy()
    spoilt_query[:, 1, 1, 5] = spoilt
    for kernels in ("reference", "cpu", "triton"):
        bench = Bench(kernels, settings(group=group), retriever("hash", 1, 3, 2), np.random.default_rng(1))
        bench.bind(0, 256, 300)
        bench.state.first_position[0] = -1
        bench.seed(0, query.reshape(3, -1, HEAD_DIM))
        bench.begin([0], [300])
        for layer in (1, 2):
            bench.plan(layer, spoilt_query[layer].reshape(1, -1, HEAD_DIM))
        assert bench.policy.counters.hits == 2, f"{kernels} takes what is no number for similar"
