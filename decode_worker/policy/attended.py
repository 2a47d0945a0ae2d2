"""Which places a head's attention reads (docs/qsac.md, step 6), and where a new token goes."""

from __future__ import annotations

import torch

from decode_worker.kernels.state import HeadState


def place_of_token(state: HeadState, layer: int, slot: int, head: int, position: int) -> int:
    """A token that the worker writes: at its position in a resident head, else in the tail."""
    if state.resident[layer, head]:
        return position
    first_tail = state.shape.sink + int(state.capacity[layer, slot, head]) * state.shape.unit
    return first_tail + position % state.shape.tail


def attended_places(state: HeadState, layer: int, slot: int, head: int, position: int) -> torch.Tensor:
    """int64[n]: everything in a resident head; else sinks, then the tail from the oldest token on, then the set."""
    if state.resident[layer, head]:
        return torch.arange(position + 1)
    at = state.side(layer, slot, head)
    cover = int(state.cover[at])
    tail = [place_of_token(state, layer, slot, head, token) for token in range(cover, position + 1)]
    return torch.cat([
        torch.arange(min(cover, state.shape.sink)),
        torch.tensor(tail, dtype=torch.int64),
        state.places[at][: int(state.count[at])].long(),
    ])  # fmt: skip
