"""The order of records inside a pack's segments, by name: what one selection wants should lie in few extents (KVDrive
§7.2). Names and numbers are `RecordOrder` of proto/kvstore/v1. Whoever reads a pack follows its maps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from decode_worker.importance import hot_records
from decode_worker.kernels.registry import Registry

RECORDS_PER_CLUSTER = 32
CHUNK_TOKENS = 4
KMEANS_ITERATIONS = 4


@dataclass(frozen=True)
class Order:
    """`find(keys, importance)`: record -> token, int64 [H, n], of keys float32 [H, n, d] and importances float32
    [H, n] of any scale, on their device. `hot_first`: a segment begins with its important records, so that one number
    says what is worth keeping in DRAM."""

    find: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    hot_first: bool = False


ORDERS: Registry[Order] = Registry("order")


def record_order(order: Order, keys: torch.Tensor, importance: torch.Tensor) -> NDArray[np.uint16]:
    """Record -> token, uint16[H, n], of one pack and layer, whose keys are [n, H, d]."""
    return order.find(keys.transpose(0, 1), importance).cpu().numpy().astype(np.uint16)


def token_order(heads: int, tokens: int) -> NDArray[np.uint16]:
    """The identity: records in token order, uint16[heads, tokens]."""
    return np.tile(np.arange(tokens, dtype=np.uint16), (heads, 1))


def _token(keys: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    return torch.arange(keys.shape[1], device=keys.device).repeat(len(keys), 1)


def _pack(keys: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    """The important ones and the others, both by cluster, and by token within one."""
    tokens = keys.shape[1]
    hot = torch.zeros(importance.shape, dtype=torch.bool, device=keys.device)
    hot.scatter_(1, importance.topk(hot_records(tokens), dim=1).indices, True)
    cluster = _cluster_rank(keys, RECORDS_PER_CLUSTER)
    return torch.where(hot, cluster, cluster + tokens).argsort(dim=1, stable=True)


def _cluster(keys: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    return _cluster_rank(keys, RECORDS_PER_CLUSTER).argsort(dim=1, stable=True)


def _chunk(keys: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    """Clusters of the chunks' mean keys: KVDrive's, with chunks of four."""
    means = keys.unflatten(1, (-1, CHUNK_TOKENS)).mean(2)
    rank = _cluster_rank(means, RECORDS_PER_CLUSTER // CHUNK_TOKENS)
    return rank.repeat_interleave(CHUNK_TOKENS, dim=1).argsort(dim=1, stable=True)


def _importance(keys: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    return importance.argsort(dim=1, descending=True, stable=True)


ORDERS.register("token")(Order(_token))
ORDERS.register("pack")(Order(_pack, hot_first=True))
ORDERS.register("cluster")(Order(_cluster))
ORDERS.register("chunk")(Order(_chunk))
ORDERS.register("importance")(Order(_importance, hot_first=True))


def _cluster_rank(points: torch.Tensor, per_cluster: int) -> torch.Tensor:
    """k-means cluster of every point, int64 [H, n]; clusters are numbered along their centres' main direction."""
    heads, count, d = points.shape
    clusters = max(1, count // per_cluster)
    centres = points[:, :: count // clusters][:, :clusters].clone()
    for _ in range(KMEANS_ITERATIONS):
        nearest = torch.cdist(points, centres).argmin(dim=2)
        sums = torch.zeros_like(centres).scatter_add_(1, nearest[..., None].expand(-1, -1, d), points)
        sizes = points.new_zeros(heads, centres.shape[1]).scatter_add_(1, nearest, points.new_ones(heads, count))
        centres = torch.where(sizes[..., None] > 0, sums / sizes[..., None].clamp(min=1), centres)
    centred = centres - centres.mean(dim=1, keepdim=True)
    direction = torch.linalg.svd(centred, full_matrices=False).Vh[:, 0]
    rank = torch.einsum("hcd,hd->hc", centred, direction).argsort(dim=1).argsort(dim=1)
    return rank.gather(1, nearest)
