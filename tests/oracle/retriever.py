"""Retriever scores of docs/qsac.md and the choice of the best records."""

import numpy as np

HASH_BITS = 256
HASH_SEED = 0x48474154


def exact_scores(query: np.ndarray, keys: np.ndarray, scale: np.float32) -> np.ndarray:
    """Log of the attention mass on each candidate, summed over the group.

    query [g, d], keys [n, d] (the candidates only), result float32 [n].
    """
    scores = scale * (query @ keys.T)
    return log_sum_exp(scores - log_sum_exp(scores, axis=1)[:, None], axis=0)


def log_sum_exp(x: np.ndarray, axis: int) -> np.ndarray:
    """float32, summed in float64."""
    top = x.max(axis=axis, keepdims=True)
    total = np.exp(x - top).sum(axis=axis, dtype=np.float64)
    return (np.log(total) + top.squeeze(axis)).astype(np.float32)


def default_hash_weights(layers: int, kv_heads: int, head_dim: int) -> np.ndarray:
    """The projection used without a profile, float32 [layers, H, d, 256]."""
    rng = np.random.default_rng(seed=HASH_SEED)
    return rng.standard_normal((layers, kv_heads, head_dim, HASH_BITS), dtype=np.float32)


def hash_scores(query: np.ndarray, keys: np.ndarray, weights: np.ndarray, centre: np.ndarray) -> np.ndarray:
    """Minus the Hamming distances of the codes, summed over the group (HATA).

    query [g, d], keys [n, d], weights [d, bits], centre [d], result int64 [n].
    """
    key_codes = (keys - centre) @ weights > 0
    query_codes = query @ weights > 0
    return -sum(np.count_nonzero(key_codes != code, axis=1) for code in query_codes)


def best(scores: np.ndarray, count: int) -> tuple[np.ndarray, float]:
    """Indices of the `count` highest scores, ascending; ties go to the lower index (scores come in order of tokens).

    The second result is the score gap between the last one chosen and the first one rejected
    (infinite if none is rejected): two implementations may differ where it is tiny.
    """
    ranked = np.argsort(-scores, kind="stable")
    gap = np.inf if count >= len(scores) else scores[ranked[count - 1]] - scores[ranked[count]]
    return np.sort(ranked[:count]), float(gap)


def best_units(scores: np.ndarray, units: np.ndarray, count: int) -> tuple[np.ndarray, float]:
    """Ids of the `count` best units, ascending, and the score gap behind them; units [n] names each score's.

    A unit is as good as its best score; ties go to the lower id.
    """
    ids = np.unique(units)
    chosen, gap = best(np.array([scores[units == unit].max() for unit in ids]), count)
    return ids[chosen], gap
