"""What must be in a slot's window before its first step: sinks, recent tokens, and everything of resident heads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from decode_worker.policy.plan import NO_PAIRS, RUN_DTYPE, Op, Ticket, gather_runs, split_gather
from decode_worker.policy.settings import PolicySettings
from decode_worker.retrieval.view import View


def bind_tickets(
    settings: PolicySettings,
    view: View,
    slot: int,
    epoch: int,
    cover: int,
    first_tail: NDArray[np.int64],
    runs_max: int,
    pairs_max: int,
) -> Iterator[Ticket]:
    """Tickets of all layers, each within the ring's limits. first_tail: int64[layers, H]."""
    if not view.stored:
        return
    for layer in range(settings.layers):
        offloaded = np.flatnonzero(~settings.resident[layer]).tolist()
        pairs = [_always_held(settings, view, layer, head, cover, int(first_tail[layer, head])) for head in offloaded]
        n = len(offloaded)
        runs, joined = gather_runs([slot] * n, [epoch] * n, [0] * n, offloaded, pairs)
        yield from split_gather(layer, runs, joined, runs_max, pairs_max)
        yield from _whole_packs(settings, view, layer, slot, epoch, runs_max)


def _always_held(
    settings: PolicySettings, view: View, layer: int, head: int, cover: int, first_tail: int
) -> NDArray[np.uint32]:
    """Sinks and the stored part of the tail, uint32[n, 2] sorted by record."""
    sinks = np.stack(view.records_of(layer, head, 0, min(settings.sink, cover)), axis=1)
    records, tokens = view.records_of(layer, head, cover, view.stored)
    tail = np.stack([records, first_tail + tokens % settings.tail], axis=1)
    pairs = np.concatenate([sinks, tail]).astype(np.uint32)
    return np.ascontiguousarray(pairs[np.argsort(pairs[:, 0], kind="stable")])


def _whole_packs(
    settings: PolicySettings, view: View, layer: int, slot: int, epoch: int, runs_max: int
) -> Iterator[Ticket]:
    """A RANGE run per pack and resident head: a record's place is its id."""
    resident = np.flatnonzero(settings.resident[layer])
    runs = np.zeros(len(resident) * len(view.packs), RUN_DTYPE)
    runs["slot"], runs["slot_epoch"] = slot, epoch
    runs["lane"] = np.repeat(resident, len(view.packs))
    runs["first_pair"] = np.tile(np.array(view.firsts, np.uint32), len(resident))
    runs["pair_count"] = np.tile(np.array([p.tokens for p in view.packs], np.uint32), len(resident))
    runs["arg"] = runs["first_pair"]
    for first in range(0, len(runs), runs_max):
        yield Ticket(Op.RANGE, layer, runs[first : first + runs_max].copy(), NO_PAIRS)
