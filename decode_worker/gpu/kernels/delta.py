"""What a head that misses must fetch, where it goes, and the head's next side: docs/qsac.md, step 5 and "Old sets".

A program per head; who ends last lists the layer's wishes and claims their ticket. A program walks its lists in blocks,
a phase after the other; between two phases that read each other's stores its threads meet. A unit place is counted from
0 behind the sinks.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from decode_worker.gpu.kernels.select import Selection, SlotIndex, indexed, limit
from decode_worker.gpu.kernels.wishes import Wishes, claim_ticket, list_wishes
from decode_worker.gpu.launch import launch
from decode_worker.gpu.requests import Requests
from decode_worker.gpu.sync import ends_last
from decode_worker.kernels.state import HeadState
from decode_worker.policy.cache.base import Cache, Stamp
from decode_worker.policy.counters import Counters

CHUNK = 1024
_CLEARED = tl.constexpr(Counters.NAMES.index("cleared"))
_FREE, _HELD, _ATTENDED, _WANTED = (tl.constexpr(x) for x in range(4))  # what a unit place is to a head that misses
_STEP, _COUNT = tl.constexpr(int(Stamp.STEP)), tl.constexpr(int(Stamp.COUNT))
_NEVER = tl.constexpr(0x7FFFFFFF)


class Delta:
    """Scratch of a layer's changes, and their result.

    pairs        int32[slots * H, pairs_max, 2]: (record, place) of what a slot's head must fetch, by record
    pair_count   int32[slots * H], by row: how many of them, of a head that misses
    has_old_set  int32[slots * H], by row: whether the head has something coherent without them
    ended        int32[1]: heads that are done; zero between launches
    """

    def __init__(self, state: HeadState, device: torch.device) -> None:
        shape = state.shape
        lanes = shape.slots * shape.heads

        def zeros(*sizes: int) -> torch.Tensor:
            return torch.zeros((lanes, *sizes), dtype=torch.int32, device=device)

        self.use, self.free = zeros(shape.units), zeros(shape.units)
        self.place_of = zeros(max(1, shape.places // shape.unit))  # of the wanted units
        self.pairs = zeros(shape.places + shape.sink, 2)
        self.pair_count, self.has_old_set = zeros(), zeros()
        self.ended = torch.zeros(1, dtype=torch.int32, device=device)


def find_delta(
    state: HeadState,
    slots: torch.Tensor,
    positions: torch.Tensor,
    rows: int,
    step: torch.Tensor,
    layer: int,
    query: torch.Tensor,
    kind: int,
    cache: Cache,
    index: SlotIndex,
    selection: Selection,
    delta: Delta,
    wishes: Wishes,
    requests: Requests | None,
    timeout_ns: int,
) -> None:
    """step: int32[1]. Writes the other side of each head that misses; one that has nothing to fetch goes over to it.

    Fills the layer's wishes, and claims a ticket for them where there is a ring. timeout_ns: of its credit."""
    shape, lanes, r = state.shape, rows * state.shape.heads, requests
    ring, area = (wishes.number,) * 4 + (wishes.count,), (0, 0, 0)
    if r is not None:
        ring = r.own_poison, r.peer_poison, r.consumed, r.next_number, r.error
        area = r.runs.shape[1], r.pairs.shape[1], r.tickets.shape[0]
    launch(
        _delta, (lanes,),
        selection.misses, slots, positions, step, selection.wanted, selection.wanted_count,
        index.head, index.tokens, index.sink_records, query,
        state.held, state.held_places, state.held_count, state.places, state.count, state.label, state.label_kind,
        state.cover, state.generation, state.parity, state.issued, state.stamp, state.capacity, state.chosen,
        state.missing, state.stored, state.counters,
        delta.use, delta.free, delta.place_of, delta.pairs, delta.pair_count, delta.has_old_set,
        delta.ended, wishes.count, wishes.number, wishes.wishes, *ring,
        layer, kind, timeout_ns,
        SIDE=state.parity.numel(), SLOTS=shape.slots, HEADS=shape.heads, UNITS=shape.units, PLACES=shape.places,
        UNIT=shape.unit, SINK=shape.sink, SINK_BLOCK=triton.next_power_of_2(max(1, shape.sink)), RECENT=shape.recent,
        LABEL=shape.group * shape.head_dim, CAPACITY=index.capacity, WANTED=selection.wanted.shape[-1],
        PAIRS=delta.pairs.shape[1], STEPS=max(shape.units, selection.wanted.shape[-1]).bit_length(),
        KEEPS=cache.keeps, WHOLE=cache.whole, STAMP=int(cache.stamp), CHUNK=CHUNK,
        LAYERS=shape.layers, LAYERS_BLOCK=triton.next_power_of_2(shape.layers), LANES=lanes,
        LANES_BLOCK=triton.next_power_of_2(lanes), WISHES=wishes.runs,
        RUNS_MAX=area[0], PAIRS_MAX=area[1], TICKETS=area[2],
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer", "kind", "timeout_ns"])
def _delta(
    misses, slots, positions, step, wanted_of, wanted_count, head_of, tokens, sink_records, query,
    held, held_places, held_count, places, count, label, label_kind, cover, generation, parity, issued, stamp_of,
    capacity, chosen, missing_of, stored, counters,
    use_of, free_of, place_of, pairs_of, pair_count, has_old_set,
    ended, wish_count, number, wishes, own_poison, peer_poison, consumed, next_number, error,
    layer, kind, timeout_ns,
    SIDE: tl.constexpr, SLOTS: tl.constexpr, HEADS: tl.constexpr, UNITS: tl.constexpr, PLACES: tl.constexpr,
    UNIT: tl.constexpr, SINK: tl.constexpr, SINK_BLOCK: tl.constexpr, RECENT: tl.constexpr, LABEL: tl.constexpr,
    CAPACITY: tl.constexpr, WANTED: tl.constexpr, PAIRS: tl.constexpr, STEPS: tl.constexpr,
    KEEPS: tl.constexpr, WHOLE: tl.constexpr, STAMP: tl.constexpr, CHUNK: tl.constexpr,
    LAYERS: tl.constexpr, LAYERS_BLOCK: tl.constexpr, LANES: tl.constexpr, LANES_BLOCK: tl.constexpr,
    WISHES: tl.constexpr, RUNS_MAX: tl.constexpr, PAIRS_MAX: tl.constexpr, TICKETS: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0)
    if tl.load(misses + lane) == 0:
        return
    _change(
        slots, positions, step, wanted_of, wanted_count, head_of, tokens, sink_records, query,
        held, held_places, held_count, places, count, label, label_kind, cover, generation, parity, issued, stamp_of,
        capacity, chosen, missing_of, stored, counters,
        use_of, free_of, place_of, pairs_of, pair_count, has_old_set,
        lane, layer, kind,
        SIDE, SLOTS, HEADS, UNITS, PLACES, UNIT, SINK, SINK_BLOCK, RECENT, LABEL, CAPACITY, WANTED, PAIRS, STEPS,
        KEEPS, WHOLE, STAMP, CHUNK,
    )  # fmt: skip
    every = tl.arange(0, LANES_BLOCK)
    missed = tl.sum(tl.load(misses + every, mask=every < LANES, other=0), 0)
    if ends_last(ended, missed, "gpu"):
        runs, pairs = list_wishes(
            misses, slots, pair_count, has_old_set, wish_count, wishes, layer, LANES, LANES_BLOCK, HEADS, WISHES
        )
        if TICKETS > 0:
            if runs != 0:
                claim_ticket(
                    runs, pairs, number, layer, timeout_ns, own_poison, peer_poison, consumed, next_number, error,
                    LAYERS, LAYERS_BLOCK, RUNS_MAX, PAIRS_MAX, TICKETS,
                )  # fmt: skip


@triton.jit
def _change(
    slots, positions, step, wanted_of, wanted_count, head_of, tokens, sink_records, query,
    held, held_places, held_count, places, count, label, label_kind, cover, generation, parity, issued, stamp_of,
    capacity, chosen, missing_of, stored, counters,
    use_of, free_of, place_of, pairs_of, pair_count, has_old_set,
    lane, layer, kind,
    SIDE: tl.constexpr, SLOTS: tl.constexpr, HEADS: tl.constexpr, UNITS: tl.constexpr, PLACES: tl.constexpr,
    UNIT: tl.constexpr, SINK: tl.constexpr, SINK_BLOCK: tl.constexpr, RECENT: tl.constexpr, LABEL: tl.constexpr,
    CAPACITY: tl.constexpr, WANTED: tl.constexpr, PAIRS: tl.constexpr, STEPS: tl.constexpr,
    KEEPS: tl.constexpr, WHOLE: tl.constexpr, STAMP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One head's."""
    slot = tl.load(slots + lane // HEADS)
    at = (layer * SLOTS + slot) * HEADS + lane % HEADS
    now = tl.load(parity + at).to(tl.int64) * SIDE + at
    then = SIDE - now + 2 * at
    units = tl.load(capacity + at)
    wanted, n = wanted_of + lane * WANTED, tl.load(wanted_count + lane)
    use, free = use_of + lane * UNITS, free_of + lane * UNITS
    place, stamp = place_of + lane * WANTED, stamp_of + at.to(tl.int64) * UNITS
    pairs = pairs_of + (slot * HEADS + lane % HEADS).to(tl.int64) * (2 * PAIRS)
    held_now, places_now = held + now * UNITS, held_places + now * UNITS
    held_then, places_then = held + then * UNITS, held_places + then * UNITS
    index = indexed(head_of, layer, lane, slot, SLOTS, HEADS)
    stored_here = tl.load(stored + slot)
    below = limit(stored_here, tl.load(positions + lane // HEADS), SINK, RECENT)
    held_there = tl.load(held_count + now)

    _mark(use, units, places_now, held_there, places + now * PLACES, tl.load(count + now), UNIT, SINK, KEEPS, CHUNK)
    missing = _match(wanted, n, place, held_now, places_now, held_there, use, UNIT, SINK, STEPS, WHOLE, CHUNK)
    vacant = _count_use(use, units, _FREE, CHUNK)
    spare = tl.full((), 0, tl.int32)
    if KEEPS:
        spare = _count_use(use, units, _HELD, CHUNK)
    old = (tl.load(label_kind + now) != 0).to(tl.int32)
    if missing > vacant + spare:
        old = tl.full((), 0, tl.int32)
        tl.atomic_add(counters + _CLEARED, tl.full((), 1, tl.int64))
        tl.store(count + now, 0)
        tl.store(label_kind + now, 0)
        _fill(label + now * LABEL, LABEL, 0.0, CHUNK)
        if KEEPS:
            _turn(use, units, _ATTENDED, _HELD, CHUNK)
        else:
            tl.store(held_count + now, 0)
            _turn(use, units, _HELD, _FREE, CHUNK)
        vacant = _count_use(use, units, _FREE, CHUNK)
    if KEEPS:
        if missing > vacant:
            _evict(use, units, stamp, missing - vacant, CHUNK)
            held_there = _drop_evicted(held_now, places_now, held_there, use, UNIT, SINK, CHUNK)
            tl.store(held_count + now, held_there)
    _list_free(use, units, free, CHUNK)

    covered = tl.load(cover + now)
    sinks = tl.minimum(SINK, below)
    sink = tl.arange(0, SINK_BLOCK)
    lacks_sink = (sink >= covered) & (sink < sinks)
    sink_record = tl.load(sink_records + index * (SINK if SINK > 0 else 1) + sink, mask=lacks_sink, other=_NEVER)
    before_sink = _place(
        wanted, n, place, free, pairs, stamp, tl.load(step), sink_record, covered < sinks,
        UNIT, SINK, SINK_BLOCK, KEEPS, STAMP, CHUNK,
    )  # fmt: skip
    fetched = missing * UNIT
    if covered < sinks:
        other = tl.sum((sink_record[:, None] > sink_record[None, :]).to(tl.int32), 1)
        tl.store(pairs + 2 * (before_sink + other), sink_record, mask=lacks_sink)
        tl.store(pairs + 2 * (before_sink + other) + 1, sink, mask=lacks_sink)
        fetched += tl.sum(lacks_sink.to(tl.int32), 0)

    if KEEPS:
        held_next = _merge(wanted, n, place, held_now, places_now, held_there, held_then, places_then, STEPS, CHUNK)
    else:
        _copy(wanted, held_then, n, CHUNK)
        _copy(place, places_then, n, CHUNK)
        held_next = n
    tl.store(held_count + then, held_next)
    attended = _list_attended(
        wanted, n, place, tokens + index * CAPACITY, stored_here, below, places + then * PLACES, UNIT, SINK, CHUNK
    )
    tl.store(count + then, attended)
    _copy(query + lane * LABEL, label + then * LABEL, LABEL, CHUNK)
    tl.store(label_kind + then, kind)
    tl.store(cover + then, below)
    number = tl.load(issued + at) + 1
    tl.store(generation + then, number)
    tl.debug_barrier()  # of what was read above, a word is about to change
    tl.store(issued + at, number)
    tl.store(chosen + at, tl.load(chosen + at) + n)
    tl.store(missing_of + at, tl.load(missing_of + at) + missing)
    tl.store(pair_count + lane, fetched)
    tl.store(has_old_set + lane, old)
    if fetched == 0:
        tl.store(parity + at, tl.load(parity + at) ^ 1)


@triton.jit
def _mark(
    use, units, held_places, held, places, count,
    UNIT: tl.constexpr, SINK: tl.constexpr, KEEPS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """What each unit place is. Where units stay, those in use are told from the others."""
    _fill(use, units, _FREE, CHUNK)
    tl.debug_barrier()
    for first in range(0, held, CHUNK):
        i = first + tl.arange(0, CHUNK)
        at = tl.load(held_places + i, mask=i < held, other=SINK)
        tl.store(use + (at - SINK) // UNIT, tl.full((CHUNK,), _HELD, tl.int32), mask=i < held)
    tl.debug_barrier()
    if KEEPS:
        for first in range(0, count, CHUNK):
            i = first + tl.arange(0, CHUNK)
            at = tl.load(places + i, mask=i < count, other=SINK)
            tl.store(use + (at - SINK) // UNIT, tl.full((CHUNK,), _ATTENDED, tl.int32), mask=i < count)
        tl.debug_barrier()


@triton.jit
def _match(
    wanted, n, place, held, held_places, held_count, use,
    UNIT: tl.constexpr, SINK: tl.constexpr, STEPS: tl.constexpr, WHOLE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The place of each wanted unit that stays where it is, -1 of the others; how many those are."""
    missing = tl.full((), 0, tl.int32)
    for first in range(0, n, CHUNK):
        i = first + tl.arange(0, CHUNK)
        at = tl.full((CHUNK,), -1, tl.int32)
        if not WHOLE:
            unit = tl.load(wanted + i, mask=i < n, other=_NEVER)
            found = _lower_bound(held, held_count, unit, STEPS, CHUNK)
            same = (found < held_count) & (tl.load(held + found, mask=found < held_count, other=-1) == unit)
            at = tl.load(held_places + found, mask=same, other=-1)
            tl.store(use + (at - SINK) // UNIT, tl.full((CHUNK,), _WANTED, tl.int32), mask=same)
        tl.store(place + i, at, mask=i < n)
        missing += tl.sum(((at < 0) & (i < n)).to(tl.int32), 0)
    tl.debug_barrier()
    return missing


@triton.jit
def _evict(use, units, stamp, needed, CHUNK: tl.constexpr):
    """Frees as many held places, the lowest stamps first, ties to the lower place. Bisects for the last stamp to go."""
    low, high = tl.full((), _NEVER, tl.int32), tl.full((), 0, tl.int32)
    for first in range(0, units, CHUNK):
        i = first + tl.arange(0, CHUNK)
        held = tl.load(use + i, mask=i < units, other=_FREE) == _HELD
        low = tl.minimum(low, tl.min(tl.load(stamp + i, mask=held, other=_NEVER), 0))
        high = tl.maximum(high, tl.max(tl.load(stamp + i, mask=held, other=0), 0))
    while low < high:
        middle = low + (high - low) // 2
        if _up_to(use, units, stamp, middle, CHUNK) >= needed:
            high = middle
        else:
            low = middle + 1
    left = needed - _up_to(use, units, stamp, low - 1, CHUNK)
    seen = tl.full((), 0, tl.int32)
    tl.debug_barrier()
    for first in range(0, units, CHUNK):
        i = first + tl.arange(0, CHUNK)
        held = tl.load(use + i, mask=i < units, other=_FREE) == _HELD
        age = tl.load(stamp + i, mask=held, other=_NEVER)
        tied = (held & (age == low)).to(tl.int32)
        goes = held & ((age < low) | ((tied != 0) & (seen + tl.cumsum(tied, 0) <= left)))
        tl.store(use + i, tl.full((CHUNK,), _FREE, tl.int32), mask=goes)
        seen += tl.sum(tied, 0)
    tl.debug_barrier()


@triton.jit
def _up_to(use, units, stamp, age, CHUNK: tl.constexpr):
    total = tl.full((), 0, tl.int32)
    for first in range(0, units, CHUNK):
        i = first + tl.arange(0, CHUNK)
        held = tl.load(use + i, mask=i < units, other=_FREE) == _HELD
        total += tl.sum((held & (tl.load(stamp + i, mask=held, other=_NEVER) <= age)).to(tl.int32), 0)
    return total


@triton.jit
def _drop_evicted(held, held_places, held_count, use, UNIT: tl.constexpr, SINK: tl.constexpr, CHUNK: tl.constexpr):
    """Closes the gaps in the list of held units. They leave at once: their places are about to be written."""
    left = tl.full((), 0, tl.int32)
    for first in range(0, held_count, CHUNK):
        i = first + tl.arange(0, CHUNK)
        there = i < held_count
        unit, at = tl.load(held + i, mask=there, other=0), tl.load(held_places + i, mask=there, other=SINK)
        stays = (there & (tl.load(use + (at - SINK) // UNIT, mask=there, other=_FREE) != _FREE)).to(tl.int32)
        to = left + tl.cumsum(stays, 0) - 1
        tl.debug_barrier()  # entries move down, over ones that another thread has read
        tl.store(held + to, unit, mask=stays != 0)
        tl.store(held_places + to, at, mask=stays != 0)
        left += tl.sum(stays, 0)
    tl.debug_barrier()
    return left


@triton.jit
def _list_free(use, units, free, CHUNK: tl.constexpr):
    """The free unit places, ascending."""
    listed = tl.full((), 0, tl.int32)
    for first in range(0, units, CHUNK):
        i = first + tl.arange(0, CHUNK)
        vacant = (tl.load(use + i, mask=i < units, other=_WANTED) == _FREE).to(tl.int32)
        tl.store(free + listed + tl.cumsum(vacant, 0) - 1, i, mask=vacant != 0)
        listed += tl.sum(vacant, 0)
    tl.debug_barrier()


@triton.jit
def _place(
    wanted, n, place, free, pairs, stamp, step, sink_record, adds_sinks,
    UNIT: tl.constexpr, SINK: tl.constexpr, SINK_BLOCK: tl.constexpr, KEEPS: tl.constexpr, STAMP: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Missing units, ascending, to free places, ascending.

    Leaves room among the pairs for sinks that must be fetched too; int32[SINK_BLOCK]: how many pairs precede each."""
    before_sink = tl.zeros((SINK_BLOCK,), tl.int32)
    missing = tl.full((), 0, tl.int32)
    for first in range(0, n, CHUNK):
        i = first + tl.arange(0, CHUNK)
        there = i < n
        unit, at = tl.load(wanted + i, mask=there, other=0), tl.load(place + i, mask=there, other=0)
        lacks = (at < 0) & there
        rank = missing + tl.cumsum(lacks.to(tl.int32), 0) - 1
        at = tl.where(lacks, SINK + tl.load(free + rank, mask=lacks, other=0) * UNIT, at)
        tl.store(place + i, at, mask=there)
        for r in tl.static_range(UNIT):
            record = unit * UNIT + r
            to = rank * UNIT + r
            if adds_sinks:
                after = lacks[:, None] & (sink_record[None, :] <= record[:, None])
                to += tl.sum(after.to(tl.int32), 1)
                before_sink += tl.sum((lacks[:, None] & (record[:, None] < sink_record[None, :])).to(tl.int32), 0)
            tl.store(pairs + 2 * to, record, mask=lacks)
            tl.store(pairs + 2 * to + 1, at + r, mask=lacks)
        if KEEPS:
            _touch(stamp + (at - SINK) // UNIT, there, lacks, step, STAMP)
        missing += tl.sum(lacks.to(tl.int32), 0)
    tl.debug_barrier()
    return before_sink


@triton.jit
def _touch(stamp, there, arrives, step, STAMP: tl.constexpr):
    if STAMP == _STEP:
        tl.store(stamp, step, mask=there)
    elif STAMP == _COUNT:
        tl.store(stamp, tl.where(arrives, 1, tl.load(stamp, mask=there, other=0) + 1), mask=there)
    else:
        tl.store(stamp, step, mask=arrives)


@triton.jit
def _merge(
    wanted, n, place, held, held_places, held_count, held_then, places_then, STEPS: tl.constexpr, CHUNK: tl.constexpr
):
    """The wanted units and what stays beside them, ascending; how many. Each finds its own place in the list."""
    both = tl.full((), 0, tl.int32)
    for first in range(0, n, CHUNK):
        i = first + tl.arange(0, CHUNK)
        unit = tl.load(wanted + i, mask=i < n, other=_NEVER)
        found = _lower_bound(held, held_count, unit, STEPS, CHUNK)
        same = ((found < held_count) & (tl.load(held + found, mask=found < held_count, other=-1) == unit)).to(tl.int32)
        to = i + found - (both + tl.cumsum(same, 0) - same)
        tl.store(held_then + to, unit, mask=i < n)
        tl.store(places_then + to, tl.load(place + i, mask=i < n, other=0), mask=i < n)
        both += tl.sum(same, 0)
    seen = tl.full((), 0, tl.int32)
    for first in range(0, held_count, CHUNK):
        i = first + tl.arange(0, CHUNK)
        unit = tl.load(held + i, mask=i < held_count, other=_NEVER)
        found = _lower_bound(wanted, n, unit, STEPS, CHUNK)
        same = ((found < n) & (tl.load(wanted + found, mask=found < n, other=-1) == unit)).to(tl.int32)
        to = i + found - (seen + tl.cumsum(same, 0) - same)
        stays = (i < held_count) & (same == 0)
        tl.store(held_then + to, unit, mask=stays)
        tl.store(places_then + to, tl.load(held_places + i, mask=stays, other=0), mask=stays)
        seen += tl.sum(same, 0)
    return n + held_count - both


@triton.jit
def _list_attended(
    wanted, n, place, tokens, stored, below, places, UNIT: tl.constexpr, SINK: tl.constexpr, CHUNK: tl.constexpr
):
    """The places of what is attended to of the wanted units, in order of the records' ids; how many. Of a unit of one
    record that is all of it: it was selected for its token."""
    if UNIT == 1:
        _copy(place, places, n, CHUNK)
        listed = n
    else:
        listed = tl.full((), 0, tl.int32)
        for first in range(0, n, CHUNK // UNIT):
            i = first + tl.arange(0, CHUNK) // UNIT
            r = tl.arange(0, CHUNK) % UNIT
            record = tl.load(wanted + i, mask=i < n, other=0) * UNIT + r
            token = tl.load(tokens + record, mask=(i < n) & (record < stored), other=-1)
            in_set = ((token >= SINK) & (token < below)).to(tl.int32)
            at = tl.load(place + i, mask=i < n, other=0) + r
            tl.store(places + listed + tl.cumsum(in_set, 0) - 1, at, mask=in_set != 0)
            listed += tl.sum(in_set, 0)
    return listed


@triton.jit
def _lower_bound(list_, count, value, STEPS: tl.constexpr, CHUNK: tl.constexpr):
    """How many of an ascending list's first `count` entries are below each value."""
    low, high = tl.zeros((CHUNK,), tl.int32), tl.zeros((CHUNK,), tl.int32) + count
    for _ in range(STEPS):
        middle = (low + high) // 2
        is_below = tl.load(list_ + middle, mask=middle < high, other=_NEVER) < value
        low = tl.where(is_below, middle + 1, low)
        high = tl.where(is_below, high, middle)
    return low


@triton.jit
def _count_use(use, units, what: tl.constexpr, CHUNK: tl.constexpr):
    total = tl.full((), 0, tl.int32)
    for first in range(0, units, CHUNK):
        i = first + tl.arange(0, CHUNK)
        total += tl.sum(((i < units) & (tl.load(use + i, mask=i < units, other=-1) == what)).to(tl.int32), 0)
    return total


@triton.jit
def _turn(use, units, what: tl.constexpr, into: tl.constexpr, CHUNK: tl.constexpr):
    for first in range(0, units, CHUNK):
        i = first + tl.arange(0, CHUNK)
        is_it = tl.load(use + i, mask=i < units, other=-1) == what
        tl.store(use + i, tl.full((CHUNK,), into, tl.int32), mask=is_it)
    tl.debug_barrier()


@triton.jit
def _fill(words, count, value: tl.constexpr, CHUNK: tl.constexpr):
    for first in range(0, count, CHUNK):
        i = first + tl.arange(0, CHUNK)
        tl.store(words + i, value, mask=i < count)


@triton.jit
def _copy(from_, to, count, CHUNK: tl.constexpr):
    for first in range(0, count, CHUNK):
        i = first + tl.arange(0, CHUNK)
        tl.store(to + i, tl.load(from_ + i, mask=i < count), mask=i < count)
