"""Similarity and hash kernels against NumPy."""

import numpy as np
import pytest

from decode_worker import _native
from decode_worker.retrieval.hash import encode_reference

FLOOR = 1e-3


def with_cosines(cosines, d=8):
    """A label of unit vectors and queries that have these cosines with it."""
    c = np.asarray(cosines, np.float64)
    label = np.zeros((len(c), d), np.float32)
    label[:, 0] = 1
    query = np.zeros_like(label)
    query[:, 0], query[:, 1] = c, np.sqrt(1 - c**2)
    return query[None, None] * 3, label[None, None] * 0.5


def similarity(cosines, weights=None):
    query, label = with_cosines(cosines)
    weights = np.ones((1, len(cosines)), np.float32) if weights is None else np.asarray([weights], np.float32)
    return float(_native.similarity(query, label, weights, FLOOR)[0, 0])


def test_harmonic_mean_with_a_negative_cosine_is_no_hit():
    cosines = (0.9, 0.9, 0.9, -0.31)
    naive = 4 / sum(1 / c for c in cosines)
    assert naive > 30  # what the plain formula says
    assert similarity(cosines) == pytest.approx(-0.31)


def test_similarity_is_the_weighted_harmonic_mean():
    assert similarity((0.9, 0.5, 0.7, 0.8), (1, 2, 0.5, 0)) == pytest.approx(3.5 / (1 / 0.9 + 2 / 0.5 + 0.5 / 0.7))
    assert similarity((0.9, 0.8), (0, 0)) == pytest.approx(0.8)
    assert similarity((0.9, FLOOR / 2), (1, 0)) == pytest.approx(FLOOR / 2)  # the floor looks at every head


def test_zero_norm_is_never_above_a_threshold():
    query, label = with_cosines((0.9, 0.9))
    ones = np.ones((1, 2), np.float32)
    label[0, 0, 1] = 0
    assert not _native.similarity(query, label, ones, FLOOR)[0, 0] > -2
    assert not _native.similarity(label, query, ones, FLOOR)[0, 0] > -2


def test_similarity_of_random_batches(rng):
    query, noise = rng.standard_normal((2, 3, 4, 5, 80), dtype=np.float32)
    label = query + 0.3 * noise
    weights = rng.random((4, 5), dtype=np.float32)
    norms = np.linalg.norm(query, axis=-1) * np.linalg.norm(label, axis=-1)
    cosine = (query.astype(np.float64) * label).sum(-1) / norms
    expected = weights.sum(-1) / (weights / cosine).sum(-1)
    np.testing.assert_allclose(_native.similarity(query, label, weights, FLOOR), expected, rtol=1e-5)


def test_hash_encode_equals_numpy_where_rounding_cannot_decide(level, rng):
    for n, d in ((1, 64), (7, 80), (64, 96), (33, 128)):
        x = rng.standard_normal((n, d), dtype=np.float32)
        projection = rng.standard_normal((d, 256), dtype=np.float32)
        centre = rng.standard_normal(d, dtype=np.float32)
        codes = _native.hash_encode(x, projection, centre)
        differ = codes ^ encode_reference(x, projection, centre)
        bits = (differ[:, :, None] >> np.arange(64, dtype=np.uint64) & np.uint64(1)).reshape(n, 256).astype(bool)
        exact = (x - centre).astype(np.float64) @ projection.astype(np.float64)
        assert (np.abs(exact[bits]) < 1e-3).all()


def select_reference(query, codes, maps, low, high, k, unit=1):
    """`hash_select` by a full sort: the nearest, then the lower tokens; of larger units the lower ids."""
    sizes = [len(m) for m in maps]
    firsts = np.repeat(np.cumsum([0, *sizes])[:-1], sizes)
    tokens = np.concatenate(maps).astype(np.int64) + firsts
    distance = np.bitwise_count(np.concatenate(codes)[:, None] ^ query[None]).sum(axis=(1, 2), dtype=np.int64)
    outside = 1 << 20
    distance[(tokens < low) | (tokens >= high)] = outside
    nearest = distance.reshape(-1, unit).min(axis=1)
    ranked = np.lexsort((tokens if unit == 1 else np.arange(len(nearest)), nearest))
    return np.sort([unit for unit in ranked[:k].tolist() if nearest[unit] < outside])


def random_packs(rng, count, alike):
    sizes = [256 * int(rng.integers(1, 5)) for _ in range(count)]
    maps = [rng.permutation(size).astype(np.uint16) for size in sizes]
    codes = [rng.integers(0, 2**64, (size, 4), dtype=np.uint64) for size in sizes]
    if alike:  # few distinct distances: many ties
        codes = [c & np.uint64(1) for c in codes]
    return codes, maps, sum(sizes)


@pytest.mark.parametrize("unit", [1, 8])
def test_hash_select_does_not_depend_on_threads(rng, unit):
    """Long enough for parts of several threads; few different codes, so that ties cross them."""
    sizes = [1024] * 60 + [256]
    kinds = rng.integers(0, 2**64, (40, 4), dtype=np.uint64)
    codes = [kinds[rng.integers(0, len(kinds), size)] for size in sizes]
    maps = [rng.permutation(size).astype(np.uint16) for size in sizes]
    query = rng.integers(0, 2**64, (4, 4), dtype=np.uint64)
    for high in (sum(sizes), 40_000, 1025):
        for k in (1, 700, 7000):
            alone = _native.hash_select(query, codes, maps, 4, high, k, unit)
            np.testing.assert_array_equal(alone, select_reference(query, codes, maps, 4, high, k, unit))
            for threads in (2, 3, 7):
                np.testing.assert_array_equal(_native.hash_select(query, codes, maps, 4, high, k, unit, threads), alone)


@pytest.mark.parametrize("unit", [1, 8, 32])
@pytest.mark.parametrize("alike", [False, True], ids=["random", "ties"])
def test_hash_select_equals_numpy(level, rng, alike, unit):
    for group in (1, 2, 3, 4, 5, 7, 8, 16):
        codes, maps, total = random_packs(rng, int(rng.integers(1, 6)), alike)
        query = rng.integers(0, 2**64, (group, 4), dtype=np.uint64)
        high = int(rng.integers(0, total + 100))
        for k in (0, 1, 37, total // 10, total, total + 5):
            found = _native.hash_select(query, codes, maps, 4, high, k, unit)
            np.testing.assert_array_equal(found, select_reference(query, codes, maps, 4, high, k, unit))


def test_hash_select_of_nothing_is_empty(level):
    assert _native.hash_select(np.zeros((2, 4), np.uint64), [], [], 4, 100, 5).tolist() == []


def test_hash_select_gives_ties_to_the_lower_token(level):
    """Records in reverse: token 255 - record in the first pack, 256 + 255 - (record - 256) in the second."""
    codes = [np.zeros((256, 4), np.uint64), np.zeros((256, 4), np.uint64)]
    maps = [np.arange(255, -1, -1, dtype=np.uint16)] * 2
    query = np.zeros((4, 4), np.uint64)
    found = _native.hash_select(query, codes, maps, 4, 300, 5)
    assert found.tolist() == [247, 248, 249, 250, 251], "tokens 8 down to 4"
    assert _native.hash_select(query, codes, maps, 4, 300, 254)[-2:].tolist() == [510, 511], "tokens 257 and 256"
    codes[1][17] = 1
    query[:] = 1  # record 273 is the nearest; its token 256 + 255 - 17 lies above the limit of 300
    assert 273 not in _native.hash_select(query, codes, maps, 4, 300, 5)
    assert _native.hash_select(query, codes, maps, 4, 512, 3).tolist() == [250, 251, 273]


def test_hash_select_gives_ties_of_units_to_the_lower_id(level):
    codes, maps = [np.zeros((256, 4), np.uint64)], [np.arange(255, -1, -1, dtype=np.uint16)]
    query = np.zeros((4, 4), np.uint64)
    assert _native.hash_select(query, codes, maps, 4, 250, 3, 8).tolist() == [0, 1, 2], "unit 0: tokens 248 and 249"
    assert _native.hash_select(query, codes, maps, 4, 240, 3, 8).tolist() == [2, 3, 4]
    codes[0][100] = 1
    query[:] = 1
    assert _native.hash_select(query, codes, maps, 4, 250, 2, 8).tolist() == [0, 12]


def test_hash_select_refuses_packs_of_broken_units():
    query, codes, maps = np.zeros((1, 4), np.uint64), [np.zeros((12, 4), np.uint64)], [np.arange(12, dtype=np.uint16)]
    with pytest.raises(ValueError, match="whole units"):
        _native.hash_select(query, codes, maps, 0, 12, 1, 8)
