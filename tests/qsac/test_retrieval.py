"""Retrievers: indexes survive their sidecar, selections follow the maps and limits, and no build decides a tie."""

import itertools

import numpy as np
import pytest

from decode_worker.calibration.profile import Profile
from decode_worker.retrieval.base import RETRIEVERS, make_retriever, top_k
from decode_worker.retrieval.exact import ExactRetriever
from decode_worker.retrieval.hash import HashRetriever
from decode_worker.retrieval.index import IndexFormatError
from decode_worker.retrieval.view import View

from .pretend import Bench, Pack, settings
from .test_profile import Shape

SHAPE = Shape()
SIZES = (256, 512)


def random_keys(rng) -> np.ndarray:
    return rng.standard_normal((SHAPE.layers, sum(SIZES), SHAPE.kv_heads, SHAPE.head_dim), dtype=np.float32)


def make_view(rng, retriever, keys: np.ndarray) -> View:
    """Packs of these keys [layers, n, H, d], the records of each in random order."""
    packs, first = [], 0
    for size in SIZES:
        k = keys[:, first : first + size]
        order = np.array([[rng.permutation(size) for _ in range(2)] for _ in range(SHAPE.layers)]).astype(np.uint16)
        built = [retriever.build(layer, k[layer], order[layer]) for layer in range(SHAPE.layers)]
        packs.append(Pack(first, size, order, retriever.assemble(built)))
        first += size
    return View(packs)


@pytest.fixture(params=RETRIEVERS.names)
def retriever(request):
    return make_retriever(request.param, SHAPE, Profile.default(SHAPE))


def test_sidecar_gives_the_same_index(rng, retriever):
    index = make_view(rng, retriever, random_keys(rng)).packs[0].index
    loaded = retriever.load(index.save())
    np.testing.assert_array_equal(loaded.data, index.data)
    assert loaded.index_bytes == index.data.nbytes
    with pytest.raises(ValueError, match="read-only"):
        loaded.data[:] = 0


def test_damaged_or_foreign_sidecars_are_refused(rng, retriever):
    blob = bytearray(make_view(rng, retriever, random_keys(rng)).packs[0].index.save())
    other = ExactRetriever(0.123)
    with pytest.raises(IndexFormatError, match="other retriever parameters"):
        other.load(bytes(blob))
    blob[len(blob) // 2] ^= 1
    with pytest.raises(IndexFormatError, match="checksum"):
        retriever.load(bytes(blob))
    with pytest.raises(IndexFormatError):
        retriever.load(b"")


def test_hash_takes_32_bytes_per_record(rng):
    retriever = make_retriever("hash", SHAPE, Profile.default(SHAPE))
    index = make_view(rng, retriever, random_keys(rng)).packs[1].index
    assert index.index_bytes == 3 * 2 * 512 * 32


def test_selected_tokens_lie_within_the_limits(rng, retriever):
    view = make_view(rng, retriever, random_keys(rng))
    query = rng.standard_normal((2, 2, 8), dtype=np.float32)
    for limit, k in ((100, 1000), (600, 50), (768, 768), (10, 9), (4, 5)):
        for head in (0, 1):
            records = retriever.select(1, head, view, query[head], 4, limit, k)
            tokens = view.tokens_of(1, head)[records]
            assert ((tokens >= 4) & (tokens < limit)).all()
            assert len(records) == min(k, limit - 4)
            assert (np.diff(records) > 0).all()


def test_exact_finds_the_tokens_with_the_most_attention(rng):
    retriever = ExactRetriever(8**-0.5)
    keys = random_keys(rng)
    view = make_view(rng, retriever, keys)
    query = rng.standard_normal((2, 8), dtype=np.float32)
    records = retriever.select(2, 1, view, query, 4, 700, 20)
    s = (query @ keys[2, 4:700, 1].T).astype(np.float64) * 8**-0.5
    weight = np.exp(s) / np.exp(s).sum(axis=1, keepdims=True)
    best = np.argsort(-weight.sum(axis=0))[:20] + 4
    assert sorted(view.tokens_of(2, 1)[records].tolist()) == sorted(best.tolist())


def test_unit_is_as_good_as_its_best_record(rng, retriever):
    view = make_view(rng, retriever, random_keys(rng))
    query = rng.standard_normal((2, 8), dtype=np.float32)
    tokens = view.tokens_of(1, 0)
    allowed = np.flatnonzero((tokens >= 4) & (tokens < 500))
    scores = np.full(view.stored, -np.inf)
    scores[allowed] = retriever.scores(1, 0, view, query, allowed)
    best = scores.reshape(-1, 8).max(axis=1)
    units = retriever.select(1, 0, view, query, 4, 500, 11, 8)
    assert sorted(units) == units.tolist()
    assert set(units) == set(np.lexsort((np.arange(len(best)), -best))[:11])
    assert len(retriever.select(1, 0, view, query, 4, 500, 96, 8)) == np.count_nonzero(np.isfinite(best))


@pytest.mark.parametrize("distinct", [1, 3, 40])
def test_two_builds_of_the_same_tokens_select_the_same(rng, distinct):
    """Keys that recur, so that a selection ends within a tie; `hash`, whose scores are whole numbers."""
    retriever = make_retriever("hash", SHAPE, Profile.default(SHAPE))
    assert isinstance(retriever, HashRetriever)
    kinds = rng.standard_normal((distinct, SHAPE.head_dim), dtype=np.float32)
    keys = kinds[rng.integers(0, distinct, (SHAPE.layers, sum(SIZES), SHAPE.kv_heads))]
    query = rng.standard_normal((2, 2, SHAPE.head_dim), dtype=np.float32)
    views = [make_view(rng, retriever, keys) for _ in range(2)]
    for high, k in ((768, 30), (500, 300), (200, 17)):
        chosen = [
            [set(view.tokens_of(1, h)[retriever.select(1, h, view, query[h], 4, high, k)].tolist()) for h in (0, 1)]
            for view in views
        ]
        assert chosen[0] == chosen[1]
        if distinct == 1:
            assert chosen[0] == [set(range(4, 4 + k))] * 2, "the lowest tokens"


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("preset", ["qsac", "infinigen", "litecache"])
def test_two_builds_of_the_same_tokens_attend_to_the_same(rng, kernels, preset):
    """Another order of records leads a step to the same tokens, also where keys are equal."""
    shape, seed = settings(preset), int(rng.integers(1 << 30))
    projection = rng.standard_normal((3, 2, shape.head_dim, 256), dtype=np.float32)
    retriever = HashRetriever(projection, np.zeros((3, 2, shape.head_dim), np.float32))
    kinds = rng.standard_normal((9, shape.head_dim), dtype=np.float32)
    keys = kinds[rng.integers(0, 9, (3, 512, 2))]
    read = []
    for order_seed in (1, 2):
        bench = Bench(kernels, shape, retriever, np.random.default_rng(order_seed))
        bench.bind(0, 512, 600, [bench.pack(first, 256, keys[:, first : first + 256]) for first in (0, 256)])
        queries = np.random.default_rng(seed).standard_normal((3, 3, 1, 4, shape.head_dim), dtype=np.float32)
        read.append([])
        for query in queries:
            position = bench.positions[0]
            bench.step(query)
            read[-1] += [sorted(bench.attended(layer, 0, head, position)) for layer in (1, 2) for head in (0, 1)]
    assert read[0] == read[1]


def test_top_k_breaks_ties_to_the_lower_index():
    assert top_k(np.array([1, 3, 3, 2, 3], np.float32), 2).tolist() == [1, 2]
    assert top_k(np.array([1, np.nan, 0], np.float32), 2).tolist() == [0, 2]
    assert top_k(np.array([1, 2], np.float32), 5).tolist() == [0, 1]
    assert top_k(np.array([1, 2], np.float32), 0).tolist() == []


def test_view_refuses_a_gap(rng, retriever):
    view = make_view(rng, retriever, random_keys(rng))
    with pytest.raises(ValueError, match="starts at token"):
        view.extend(view.packs[1])


def test_exact_gives_ties_to_the_lower_token_whatever_the_order_of_records(rng):
    """Seven different keys, again and again; a product of matrices need not give equal rows equal bits."""
    for d, group in itertools.product((16, 64, 128), (1, 2, 4, 8)):
        retriever, tokens = ExactRetriever(d**-0.5), 256 * int(rng.integers(1, 5))
        kinds = rng.integers(0, 7, tokens)
        keys = rng.standard_normal((7, d), dtype=np.float32)[kinds][:, None]
        query = rng.standard_normal((group, d), dtype=np.float32)
        for order in (rng.permutation(tokens), rng.permutation(tokens)):
            order = order.astype(np.uint16)[None, None]
            index = retriever.assemble([retriever.build(0, keys, order[0])])
            view = View([Pack(0, tokens, order, index)])
            found = np.sort(order[0, 0][retriever.select(0, 0, view, query, 4, tokens, tokens // 10)])
            for kind in np.unique(kinds[found]):
                same = np.flatnonzero(kinds == kind)
                same = same[same >= 4]
                chosen = found[kinds[found] == kind]
                assert chosen.tolist() == same[: len(chosen)].tolist()
