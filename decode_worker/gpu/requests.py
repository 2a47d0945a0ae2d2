"""The memory of a ring, as kernels that post to it find it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from decode_worker import _native
from decode_worker.device import Device


@dataclass(frozen=True, eq=False)
class Requests:
    """A ring's memories, as its producer on a device uses them (csrc/core/ring.h).

    tickets       int32[tickets, 16]    runs       int32[tickets, runs_max, 8]    pairs  int32[tickets, pairs_max, 2]
    own_poison, peer_poison, consumed, released   int64[1], of the requests' and the completions' header
    next_number   int64[1]: of the next ticket
    error         int32[1]: 0, or why a ticket was not posted, the first that happened
    ended         int32[1]: programs that have written their share of a ticket; zero between launches
    """

    tickets: torch.Tensor
    runs: torch.Tensor
    pairs: torch.Tensor
    own_poison: torch.Tensor
    peer_poison: torch.Tensor
    consumed: torch.Tensor
    released: torch.Tensor
    next_number: torch.Tensor
    error: torch.Tensor
    ended: torch.Tensor


def map_ring(ring: _native.RingProducer, device: Device, error: torch.Tensor) -> tuple[Requests, torch.Tensor]:
    """The requests, and the cells: int64[tickets, runs_max, 2]. Valid until the ring or the device is closed.

    Nothing of the ring is under way: the next ticket is the one behind those that are consumed."""
    at, requests = ring.layout, device.share(ring.requests)
    completions = device.share(ring.completions, read_only=True)

    def part(memory: torch.Tensor, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        size = int(np.prod(shape)) * dtype.itemsize
        return memory[at[name] : at[name] + size].view(dtype).view(shape)

    n, runs_max = ring.tickets, ring.runs_max
    consumed = part(completions, "consumed", torch.int64, 1)
    return Requests(
        tickets=part(requests, "tickets", torch.int32, n, 16),
        runs=part(requests, "runs", torch.int32, n, runs_max, 8),
        pairs=part(requests, "pairs", torch.int32, n, ring.pairs_max, 2),
        own_poison=part(requests, "poison", torch.int64, 1),
        peer_poison=part(completions, "daemon_poison", torch.int64, 1),
        consumed=consumed,
        released=part(requests, "released", torch.int64, 1),
        next_number=consumed + 1,
        error=error,
        ended=torch.zeros(1, dtype=torch.int32, device=device.torch_device),
    ), part(completions, "cells", torch.int64, n, runs_max, 2)
