"""Which places a head's attention reads (docs/qsac.md, step 6)."""

from __future__ import annotations

import torch

from decode_worker.kernels.state import HeadState


def first_tail(state: HeadState, layer: int, slot: int, head: int) -> int:
    """The first tail place of an offloaded head."""
    return state.shape.sink + int(state.capacity[layer, slot, head]) * state.shape.unit


def attended_places(state: HeadState, layer: int, slot: int, head: int, position: int) -> torch.Tensor:
    """int64[n]: everything in a resident head; else sinks, then the tail from the oldest token on, then the set."""
    if state.resident[layer, head]:
        return torch.arange(position + 1)
    at = state.side(layer, slot, head)
    cover = int(state.cover[at])
    return torch.cat([
        torch.arange(min(cover, state.shape.sink)),
        first_tail(state, layer, slot, head) + torch.arange(cover, position + 1) % state.shape.tail,
        state.places[at][: int(state.count[at])].long().cpu(),
    ])  # fmt: skip
