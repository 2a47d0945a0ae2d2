"""Retrievers: indexes survive their sidecar, selections follow the maps and limits."""

import numpy as np
import pytest

from decode_worker.calibration.profile import Profile
from decode_worker.retrieval.base import make_retriever, top_k
from decode_worker.retrieval.exact import ExactRetriever
from decode_worker.retrieval.hash import HashRetriever, select_reference
from decode_worker.retrieval.index import IndexFormatError
from decode_worker.retrieval.view import View

from .pretend import Pack
from .test_profile import Shape

SHAPE = Shape()


def make_view(rng, retriever, sizes=(256, 512)):
    packs, first, keys = [], 0, []
    for size in sizes:
        k = rng.standard_normal((SHAPE.layers, size, SHAPE.kv_heads, SHAPE.head_dim), dtype=np.float32)
        order = np.array([[rng.permutation(size) for _ in range(2)] for _ in range(SHAPE.layers)]).astype(np.uint16)
        built = [retriever.build(layer, k[layer], order[layer]) for layer in range(SHAPE.layers)]
        packs.append(Pack(first, size, order, retriever.assemble(built)))
        keys.append(k)
        first += size
    return View(packs), np.concatenate(keys, axis=1)


@pytest.fixture(params=["exact", "hash"])
def retriever(request):
    return make_retriever(request.param, SHAPE, Profile.default(SHAPE))


def test_sidecar_gives_the_same_index(rng, retriever):
    index = make_view(rng, retriever)[0].packs[0].index
    blob = index.save()
    loaded = retriever.load(blob)
    np.testing.assert_array_equal(loaded.data, index.data)
    assert loaded.index_bytes == index.data.nbytes
    with pytest.raises(ValueError, match="read-only"):
        loaded.data[:] = 0


def test_damaged_or_foreign_sidecars_are_refused(rng, retriever):
    blob = bytearray(make_view(rng, retriever)[0].packs[0].index.save())
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
    index = make_view(rng, retriever)[0].packs[1].index
    assert index.index_bytes == 3 * 2 * 512 * 32


def test_selected_tokens_lie_within_the_limits(rng, retriever):
    view, _ = make_view(rng, retriever)
    query = rng.standard_normal((2, 2, 8), dtype=np.float32)
    for limit, k in ((100, 1000), (600, 50), (768, 768)):
        for head, records in enumerate(retriever.select(1, view, query, limit, 4, k, [0, 1])):
            tokens = view.tokens_of(1, head)[records]
            assert ((tokens >= 4) & (tokens < limit)).all()
            assert len(records) == min(k, limit - 4)
            assert (np.diff(records) > 0).all()
    padded = retriever.select_padded(1, view, query, 10, 4, 9)
    assert (padded[:, :6] >= 0).all()
    assert (padded[:, 6:] == -1).all()


def test_exact_finds_the_tokens_with_the_most_attention(rng):
    retriever = ExactRetriever(8**-0.5)
    view, keys = make_view(rng, retriever)
    query = rng.standard_normal((2, 2, 8), dtype=np.float32)
    (records,) = retriever.select(2, view, query, 700, 4, 20, [1])
    s = (query[1] @ keys[2, 4:700, 1].T).astype(np.float64) * 8**-0.5
    weight = np.exp(s) / np.exp(s).sum(axis=1, keepdims=True)
    best = np.argsort(-weight.sum(axis=0))[:20] + 4
    assert sorted(view.tokens_of(2, 1)[records].tolist()) == sorted(best.tolist())


def test_hash_equals_its_reference(rng):
    retriever = make_retriever("hash", SHAPE, Profile.default(SHAPE))
    assert isinstance(retriever, HashRetriever)
    view, _ = make_view(rng, retriever)
    query = rng.standard_normal((2, 2, 8), dtype=np.float32)
    (found,) = retriever.select(0, view, query, 500, 4, 33, [1])
    codes = retriever.query_codes(0, 1, query[1])
    expected = select_reference(codes, *view.column(0, 1), view.firsts, 4, 500, 33)
    np.testing.assert_array_equal(found, expected)


def test_top_k_breaks_ties_to_the_lower_index():
    assert top_k(np.array([1, 3, 3, 2, 3], np.float32), 2).tolist() == [1, 2]
    assert top_k(np.array([1, np.nan, 0], np.float32), 2).tolist() == [0, 2]
    assert top_k(np.array([1, 2], np.float32), 5).tolist() == [0, 1]


def test_view_refuses_a_gap(rng, retriever):
    view, _ = make_view(rng, retriever)
    with pytest.raises(ValueError, match="starts at token"):
        view.extend(view.packs[1])
