"""The order of records inside a pack's segments: (importance class, semantic cluster), KVDrive's SSD layout (§5).

One selection wants records with similar keys; putting those side by side makes it touch few extents. The important
records come first, so that a single number per segment says what is worth keeping in DRAM.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

HOT_FRACTION = 0.1
RECORDS_PER_CLUSTER = 32
KMEANS_ITERATIONS = 4


def token_order(heads: int, tokens: int) -> NDArray[np.uint16]:
    """The identity: records in token order, uint16[heads, tokens]."""
    return np.tile(np.arange(tokens, dtype=np.uint16), (heads, 1))


def clustered_order(keys: torch.Tensor, importance: torch.Tensor) -> NDArray[np.uint16]:
    """Record -> token, uint16[H, n], for one pack and layer.

    keys: float32 [H, n, d]; importance: float32 [H, n], any scale; both on the device that is to find it.
    The `HOT_FRACTION` most important tokens form class 0.
    """
    heads, tokens, _ = keys.shape
    cluster = _cluster_rank(keys)
    hot = torch.zeros(heads, tokens, dtype=torch.bool, device=keys.device)
    hot.scatter_(1, importance.topk(hot_records(tokens), dim=1).indices, True)
    # One sort key: class, then cluster, then token (a stable sort keeps the token order).
    sort_key = torch.where(hot, cluster, cluster + tokens)
    return sort_key.argsort(dim=1, stable=True).cpu().numpy().astype(np.uint16)


def hot_records(tokens: int) -> int:
    """How many records of a segment are class 0."""
    return max(1, int(tokens * HOT_FRACTION))


def _cluster_rank(keys: torch.Tensor) -> torch.Tensor:
    """k-means cluster of every key, int64 [H, n]; clusters are numbered along their centres' main direction."""
    heads, tokens, d = keys.shape
    clusters = max(1, tokens // RECORDS_PER_CLUSTER)
    centres = keys[:, :: tokens // clusters][:, :clusters].clone()
    for _ in range(KMEANS_ITERATIONS):
        nearest = torch.cdist(keys, centres).argmin(dim=2)
        sums = torch.zeros_like(centres).scatter_add_(1, nearest[..., None].expand(-1, -1, d), keys)
        sizes = keys.new_zeros(heads, centres.shape[1]).scatter_add_(1, nearest, keys.new_ones(heads, tokens))
        centres = torch.where(sizes[..., None] > 0, sums / sizes[..., None].clamp(min=1), centres)
    centred = centres - centres.mean(dim=1, keepdim=True)
    direction = torch.linalg.svd(centred, full_matrices=False).Vh[:, 0]
    rank = torch.einsum("hcd,hd->hc", centred, direction).argsort(dim=1).argsort(dim=1)
    return rank.gather(1, nearest)
