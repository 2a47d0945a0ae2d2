"""The best k units of each head that misses, ids ascending: a counting select over distances (docs/qsac.md, step 5).

An item is a unit; its key decides ties: the token of its only record, or of larger units the id.

    score         a distance per key, and a histogram of them
    count_ties    how many keys of each block lie at the threshold, which the histogram gives
    count_taken   the key below which a tie is taken, and how many items of each block are
    emit          their ids

One launch does all four. Its programs, a fixed number, claim blocks one after the other: those of all lanes for the
first phase, then for the second, and so on. A block waits until its lane's blocks of the phase before have ended. All
of them were claimed before it, each by a program that runs, and the earliest block under way waits for nobody: so none
waits for one that has no room to start, whatever the order in which a device starts programs.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from decode_worker.gpu.kernels.encode import WORDS, distances, planes
from decode_worker.gpu.launch import launch, multiprocessors
from decode_worker.gpu.sync import ends_last, wait_for
from decode_worker.kernels.state import HeadState
from decode_worker.retrieval.hash import BITS, HashRetriever
from decode_worker.retrieval.view import StoredPack

BLOCK = 1024  # records that a program looks at
PROGRAMS = 4  # that share a multiprocessor
GROUP_MAX = 32
_PHASES = tl.constexpr(4)
_EXCLUDED = tl.constexpr(0x7FFF)  # the distance of what may not be selected
_WORDS = tl.constexpr(WORDS)
assert GROUP_MAX * BITS < 0x4000  # histograms are powers of two, and end below _EXCLUDED


class SlotIndex:
    """Codes and record maps of the heads that select, in device memory that packs are appended to between steps.

    Nothing moves: it has a place for every token that a session may declare, and a step reads `state.stored` of them.

    head          int32[layers, H]: a head's number among those that select, -1 for a resident one
    codes         int32[heads, slots, 8, capacity]: 32 bits of each record's code
    tokens        int32[heads, slots, capacity]: record -> token
    sink_records  int32[heads, slots, sink]: token -> record
    """

    def __init__(self, state: HeadState, context: int, device: torch.device) -> None:
        shape = state.shape
        selects = (state.resident == 0).cpu()
        number = torch.where(selects.flatten(), selects.flatten().cumsum(0) - 1, -1).reshape(selects.shape)
        heads = max(1, int(selects.sum()))
        self.capacity = -(-context // BLOCK) * BLOCK if selects.any() else BLOCK
        self._lanes = selects.nonzero().tolist()
        self.head = number.to(torch.int32).to(device)
        self.codes = torch.zeros((heads, shape.slots, WORDS, self.capacity), dtype=torch.int32, device=device)
        self.tokens = torch.zeros((heads, shape.slots, self.capacity), dtype=torch.int32, device=device)
        self.sink_records = torch.full((heads, shape.slots, max(1, shape.sink)), -1, dtype=torch.int32, device=device)

    def extend(self, slot: int, pack: StoredPack) -> None:
        """A slot's next pack."""
        first, end = pack.first_token, pack.first_token + pack.tokens
        if end > self.capacity:
            raise ValueError(f"slot {slot}: {end} stored tokens, `context` declares room for {self.capacity}")
        if not self._lanes:
            return
        layers, heads = np.array(self._lanes).T
        order = pack.order[layers, heads].astype(np.int32) + first
        codes = pack.index.data[layers, heads].view(np.int32).swapaxes(1, 2)
        self.codes[:, slot, :, first:end] = torch.from_numpy(codes.copy()).to(self.codes.device)
        self.tokens[:, slot, first:end] = torch.from_numpy(order).to(self.tokens.device)
        sinks = self.sink_records.shape[-1]
        if first < sinks:
            among = slice(first, min(end, sinks))
            records = np.argsort(order)[:, : among.stop - first].astype(np.int32) + first
            self.sink_records[:, slot, among] = torch.from_numpy(records).to(self.sink_records.device)

    def clear(self, slot: int) -> None:
        self.sink_records[:, slot] = -1


class Selection:
    """Scratch of a layer's selections, and their result: wanted, int32[rows * H, k], of which wanted_count count."""

    def __init__(self, state: HeadState, index: SlotIndex, device: torch.device) -> None:
        shape = state.shape
        lanes = shape.slots * shape.heads

        def zeros(*sizes: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros((lanes, *sizes), dtype=dtype, device=device)

        self.misses = zeros()
        self.codes = zeros(1 + planes(shape.group), WORDS)
        self.histogram = zeros(triton.next_power_of_2(distances(shape.group)))
        self.score = zeros(index.capacity, dtype=torch.int16)  # by key
        self.blocks = -(-index.capacity // BLOCK)
        self.ties, self.taken = zeros(self.blocks), zeros(self.blocks)
        self.bound = zeros()
        self.wanted, self.wanted_count = zeros(max(1, shape.places // shape.unit)), zeros()
        self.claimed = torch.zeros(1, dtype=torch.int32, device=device)  # blocks; zero between launches
        self.ended = zeros()  # of each lane's blocks, those of all phases; zero between launches
        self.programs = min(PROGRAMS * multiprocessors(device), lanes * self.blocks)


def refuse_unknown(retriever: object, state: HeadState) -> None:
    """ValueError for what these kernels cannot select with."""
    if state.resident.all():
        return
    if not isinstance(retriever, HashRetriever):
        name = getattr(retriever, "name", type(retriever).__name__)
        raise ValueError(f"kernels='triton' select by hash codes, not with retriever={name!r}: set retriever=hash")
    if state.shape.group > GROUP_MAX:
        raise ValueError(f"kernels='triton': {state.shape.group} query heads per KV head, at most {GROUP_MAX}")


def select(
    state: HeadState,
    slots: torch.Tensor,
    positions: torch.Tensor,
    rows: int,
    layer: int,
    index: SlotIndex,
    selection: Selection,
) -> None:
    """For each of `selection.misses`, by `selection.codes`."""
    shape, s, lanes = state.shape, selection, rows * state.shape.heads
    launch(
        _select, (s.programs,), s.misses, slots, positions, state.stored, state.selected, index.head, index.tokens,
        index.codes, s.codes, s.score, s.histogram, s.ties, s.taken, s.bound, s.wanted, s.wanted_count, s.claimed,
        s.ended, layer, lanes,
        LANES_BLOCK=triton.next_power_of_2(lanes), SLOTS=shape.slots, HEADS=shape.heads, CAPACITY=index.capacity,
        UNIT=shape.unit, ITEMS=BLOCK // shape.unit, BINS=s.histogram.shape[-1], BLOCKS=s.blocks,
        BLOCKS_BLOCK=triton.next_power_of_2(s.blocks), SINK=shape.sink, RECENT=shape.recent,
        PLANES=planes(shape.group), WANTED=s.wanted.shape[-1],
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer", "lanes"])
def _select(
    misses, slots, positions, stored, selected, head_of, tokens_of, codes, query_codes, scores_of, histograms, ties_of,
    taken_of, bounds, wanted_of, wanted_count, claimed, ended, layer, lanes,
    LANES_BLOCK: tl.constexpr, SLOTS: tl.constexpr, HEADS: tl.constexpr, CAPACITY: tl.constexpr, UNIT: tl.constexpr,
    ITEMS: tl.constexpr, BINS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_BLOCK: tl.constexpr, SINK: tl.constexpr,
    RECENT: tl.constexpr, PLANES: tl.constexpr, WANTED: tl.constexpr,
):  # fmt: skip
    every = tl.arange(0, LANES_BLOCK)
    missed = tl.load(misses + every, mask=every < lanes, other=0) != 0
    counts = tl.load(stored + tl.load(slots + every // HEADS, mask=missed, other=0), mask=missed, other=0)
    block_counts = tl.where(missed, tl.maximum(tl.cdiv(counts, ITEMS * UNIT), 1), 0)
    ends = tl.cumsum(block_counts, 0)
    total = tl.max(ends, 0)
    if total == 0:
        return
    mine = tl.atomic_add(claimed, 1, sem="relaxed")
    while mine < _PHASES * total:
        phase = mine // total
        lane = tl.sum((ends <= mine % total).to(tl.int32), 0)
        block_count = tl.sum(tl.where(every == lane, block_counts, 0), 0)
        block = mine % total - tl.sum(tl.where(every == lane, ends - block_counts, 0), 0)
        slot = tl.load(slots + lane // HEADS)
        count = tl.load(stored + slot)
        items = tl.cdiv(count, UNIT)
        index = indexed(head_of, layer, lane, slot, SLOTS, HEADS)
        tokens, scores = tokens_of + index * CAPACITY, scores_of + lane.to(tl.int64) * CAPACITY
        histogram, ties, taken = histograms + lane * BINS, ties_of + lane * BLOCKS, taken_of + lane * BLOCKS
        if phase == 0:
            _score(
                codes + index * (_WORDS * CAPACITY), tokens, query_codes + lane * ((1 + PLANES) * _WORDS), scores,
                histogram, block, count, limit(count, tl.load(positions + lane // HEADS), SINK, RECENT),
                CAPACITY, UNIT, ITEMS, BINS, SINK, PLANES,
            )  # fmt: skip
        else:
            wait_for(ended + lane, phase * block_count)
            k = tl.load(selected + (layer * SLOTS + slot) * HEADS + lane % HEADS)
            threshold, tied = _threshold(histogram, k, BINS)
            if phase == 1:
                _count_ties(scores, ties, block, items, threshold, ITEMS)
            elif phase == 2:
                _count_taken(
                    tokens, scores, ties, taken, bounds + lane, block, items, threshold, tied,
                    UNIT, ITEMS, BLOCKS_BLOCK,
                )  # fmt: skip
            else:
                _emit(
                    tokens, scores, taken, wanted_of + lane * WANTED, wanted_count + lane, block, items, threshold,
                    tl.load(bounds + lane), UNIT, ITEMS, BLOCKS_BLOCK,
                )  # fmt: skip
        ends_last(ended + lane, _PHASES * block_count, "gpu")
        mine = tl.atomic_add(claimed, 1, sem="relaxed")
    if mine == _PHASES * total + tl.num_programs(0) - 1:  # the last that any of them claims
        tl.store(claimed, 0)


@triton.jit
def _score(
    codes, tokens, query, scores, histogram, block, count, below,
    CAPACITY: tl.constexpr, UNIT: tl.constexpr, ITEMS: tl.constexpr, BINS: tl.constexpr, SINK: tl.constexpr,
    PLANES: tl.constexpr,
):  # fmt: skip
    item = block * ITEMS + tl.arange(0, ITEMS)
    best = tl.full((ITEMS,), _EXCLUDED, tl.int32)
    key = item
    for r in tl.static_range(UNIT):
        record = item * UNIT + r
        token = tl.load(tokens + record, mask=record < count, other=-1)
        competes = (token >= SINK) & (token < below)
        distance = _distance(codes + record, competes, query, CAPACITY, PLANES)
        best = tl.minimum(best, tl.where(competes, distance, _EXCLUDED))
        if UNIT == 1:
            key = token
    tl.store(scores + key, best.to(tl.int16), mask=item * UNIT < count)
    counts = tl.histogram(best, BINS, mask=best != _EXCLUDED)
    bins = tl.arange(0, BINS)
    tl.atomic_add(histogram + bins, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _distance(codes, competes, query, CAPACITY: tl.constexpr, PLANES: tl.constexpr):
    word = tl.arange(0, _WORDS)[:, None]
    code = tl.load(codes[None, :] + word * CAPACITY, mask=competes[None, :], other=0)
    differing = code ^ tl.load(query + word)
    distance = tl.sum(population(differing & tl.load(query + _WORDS + word)), 0)
    for b in tl.static_range(1, PLANES):
        distance += tl.sum(population(differing & tl.load(query + (1 + b) * _WORDS + word)), 0) << b
    return distance


@triton.jit
def _count_ties(scores, ties, block, items, threshold, ITEMS: tl.constexpr):
    key = block * ITEMS + tl.arange(0, ITEMS)
    distance = tl.load(scores + key, mask=key < items, other=_EXCLUDED)
    tl.store(ties + block, tl.sum((distance == threshold).to(tl.int32), 0))


@triton.jit
def _count_taken(
    tokens, scores, ties, taken, bound, block, items, threshold, tied,
    UNIT: tl.constexpr, ITEMS: tl.constexpr, BLOCKS_BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.arange(0, BLOCKS_BLOCK)
    in_block = tl.load(ties + blocks, mask=blocks < tl.cdiv(items, ITEMS), other=0)
    last = tl.sum((tl.cumsum(in_block, 0) < tied).to(tl.int32), 0)  # the block of the last tie that is taken
    left = tied - tl.sum(tl.where(blocks < last, in_block, 0), 0)
    offset = tl.arange(0, ITEMS)
    key = last * ITEMS + offset
    is_tie = tl.load(scores + key, mask=key < items, other=_EXCLUDED) == threshold
    inside = tl.sum((tl.cumsum(is_tie.to(tl.int32), 0) < left).to(tl.int32), 0)
    end = tl.where(tied > 0, last * ITEMS + inside + 1, 0)
    if block == 0:
        tl.store(bound, end)
    takes = _taken(scores, tokens, block * ITEMS + offset, items, threshold, end, UNIT)
    tl.store(taken + block, tl.sum(takes, 0))


@triton.jit
def _emit(
    tokens, scores, taken, wanted, wanted_count, block, items, threshold, bound,
    UNIT: tl.constexpr, ITEMS: tl.constexpr, BLOCKS_BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.arange(0, BLOCKS_BLOCK)
    in_block = tl.load(taken + blocks, mask=blocks < tl.cdiv(items, ITEMS), other=0)
    if block == 0:
        tl.store(wanted_count, tl.sum(in_block, 0))
    item = block * ITEMS + tl.arange(0, ITEMS)
    takes = _taken(scores, tokens, item, items, threshold, bound, UNIT)
    before = tl.sum(tl.where(blocks < block, in_block, 0), 0)
    tl.store(wanted + before + tl.cumsum(takes, 0) - 1, item, mask=takes != 0)


@triton.jit
def _threshold(histogram, k, BINS: tl.constexpr):
    """The distance of the k-th best, and how many of it are taken; of fewer than k, a distance that none has."""
    bins = tl.arange(0, BINS)
    counts = tl.load(histogram + bins)
    short = (tl.cumsum(counts, 0) < k).to(tl.int32)
    threshold = tl.sum(short, 0)
    nearer = tl.sum(tl.where(bins < threshold, counts, 0), 0)
    return threshold, k - nearer


@triton.jit
def _taken(scores, tokens, item, items, threshold, bound, UNIT: tl.constexpr):
    """1 for items that are selected."""
    key = item
    if UNIT == 1:
        key = tl.load(tokens + item, mask=item < items, other=0)
    distance = tl.load(scores + key, mask=item < items, other=_EXCLUDED)
    return ((distance < threshold) | ((distance == threshold) & (key < bound))).to(tl.int32)


@triton.jit
def indexed(head_of, layer, lane, slot, SLOTS: tl.constexpr, HEADS: tl.constexpr):
    """A head's and slot's place in a SlotIndex."""
    return tl.load(head_of + layer * HEADS + lane % HEADS).to(tl.int64) * SLOTS + slot


@triton.jit
def limit(stored, position, SINK: tl.constexpr, RECENT: tl.constexpr):
    """HeadState.limit."""
    return tl.maximum(tl.minimum(stored, SINK), tl.minimum(stored, position - RECENT))


@triton.jit
def population(word):
    """Bits set in each int32. In this form LLVM knows it as one instruction."""
    x = word.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)
