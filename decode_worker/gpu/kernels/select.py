"""The best k units of each head that misses, ids ascending: a counting select over distances (docs/qsac.md, step 5).

An item is a unit; its key decides ties: the token of its only record, or of larger units the id.

    score    a distance per key, and a histogram of them
    ties     how many keys of each block lie at the threshold, which the histogram gives
    count    the key below which a tie is taken, and how many items of each block are
    emit     their ids
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from decode_worker.gpu.kernels.encode import WORDS, distances, planes
from decode_worker.gpu.launch import launch
from decode_worker.kernels.state import HeadState
from decode_worker.retrieval.hash import BITS, HashRetriever
from decode_worker.retrieval.view import StoredPack

BLOCK = 1024  # records that a program looks at
GROUP_MAX = 32
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
        for number, (layer, head) in enumerate(self._lanes):
            codes = torch.from_numpy(pack.index.data[layer, head].view("int32").copy())
            tokens = torch.from_numpy(pack.order[layer, head].astype("int32")) + first
            self.codes[number, slot, :, first:end] = codes.T.to(self.codes.device)
            self.tokens[number, slot, first:end] = tokens.to(self.tokens.device)
            sinks = self.sink_records[number, slot]
            record = (tokens < len(sinks)).nonzero().flatten()
            sinks[tokens[record].to(sinks.device).long()] = (record + first).to(sinks.device, torch.int32)

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
    shape, s = state.shape, selection
    where = (s.misses, slots, state.stored, index.head, index.tokens)
    sizes = {
        "SLOTS": shape.slots, "HEADS": shape.heads, "CAPACITY": index.capacity, "UNIT": shape.unit,
        "ITEMS": BLOCK // shape.unit, "BINS": s.histogram.shape[-1], "BLOCKS": s.blocks,
        "BLOCKS_BLOCK": triton.next_power_of_2(s.blocks),
    }  # fmt: skip
    grid = (rows * shape.heads, s.blocks)
    launch(
        _score, grid, *where, positions, index.codes, s.codes, s.score, s.histogram, layer,
        SINK=shape.sink, RECENT=shape.recent, PLANES=planes(shape.group), **sizes,
    )  # fmt: skip
    launch(_ties, grid, *where, state.selected, s.score, s.histogram, s.ties, layer, **sizes)
    launch(
        _count, grid, *where, state.selected, s.score, s.histogram, s.ties, s.taken, s.bound, layer, **sizes
    )  # fmt: skip
    launch(
        _emit, grid, *where, state.selected, s.score, s.histogram, s.taken, s.bound, s.wanted, s.wanted_count, layer,
        WANTED=s.wanted.shape[-1], **sizes,
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer"])
def _score(
    misses, slots, stored, head_of, tokens, positions, codes, query_codes, score, histogram, layer,
    SLOTS: tl.constexpr, HEADS: tl.constexpr, CAPACITY: tl.constexpr, UNIT: tl.constexpr, ITEMS: tl.constexpr,
    BINS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_BLOCK: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr,
    PLANES: tl.constexpr,
):  # fmt: skip
    lane, block = tl.program_id(0), tl.program_id(1)
    if tl.load(misses + lane) == 0:
        return
    slot = tl.load(slots + lane // HEADS)
    count = tl.load(stored + slot)
    if block * ITEMS * UNIT >= count:
        return
    below = limit(count, tl.load(positions + lane // HEADS), SINK, RECENT)
    index = indexed(head_of, layer, lane, slot, SLOTS, HEADS)
    item = block * ITEMS + tl.arange(0, ITEMS)
    best = tl.full((ITEMS,), _EXCLUDED, tl.int32)
    key = item
    for r in tl.static_range(UNIT):
        record = item * UNIT + r
        token = tl.load(tokens + index * CAPACITY + record, mask=record < count, other=-1)
        competes = (token >= SINK) & (token < below)
        distance = _distance(
            codes + index * (_WORDS * CAPACITY) + record, competes, query_codes + lane * ((1 + PLANES) * _WORDS),
            CAPACITY, PLANES,
        )  # fmt: skip
        best = tl.minimum(best, tl.where(competes, distance, _EXCLUDED))
        if UNIT == 1:
            key = token
    tl.store(score + lane.to(tl.int64) * CAPACITY + key, best.to(tl.int16), mask=item * UNIT < count)
    counts = tl.histogram(best, BINS, mask=best != _EXCLUDED)
    bins = tl.arange(0, BINS)
    tl.atomic_add(histogram + lane * BINS + bins, counts, mask=counts > 0)


@triton.jit
def _distance(codes, competes, query, CAPACITY: tl.constexpr, PLANES: tl.constexpr):
    word = tl.arange(0, _WORDS)[:, None]
    code = tl.load(codes[None, :] + word * CAPACITY, mask=competes[None, :], other=0)
    differing = code ^ tl.load(query + word)
    distance = tl.sum(population(differing & tl.load(query + _WORDS + word)), 0)
    for b in tl.static_range(1, PLANES):
        distance += tl.sum(population(differing & tl.load(query + (1 + b) * _WORDS + word)), 0) << b
    return distance


@triton.jit(do_not_specialize=["layer"])
def _ties(
    misses, slots, stored, head_of, tokens, selected, score, histogram, ties, layer,
    SLOTS: tl.constexpr, HEADS: tl.constexpr, CAPACITY: tl.constexpr, UNIT: tl.constexpr, ITEMS: tl.constexpr,
    BINS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_BLOCK: tl.constexpr,
):  # fmt: skip
    lane, block = tl.program_id(0), tl.program_id(1)
    if tl.load(misses + lane) == 0:
        return
    slot = tl.load(slots + lane // HEADS)
    items = tl.cdiv(tl.load(stored + slot), UNIT)
    if block * ITEMS >= items:
        return
    k = tl.load(selected + (layer * SLOTS + slot) * HEADS + lane % HEADS)
    threshold, _ = _threshold(histogram + lane * BINS, k, BINS)
    key = block * ITEMS + tl.arange(0, ITEMS)
    distance = tl.load(score + lane.to(tl.int64) * CAPACITY + key, mask=key < items, other=_EXCLUDED)
    tl.store(ties + lane * BLOCKS + block, tl.sum((distance == threshold).to(tl.int32), 0))


@triton.jit(do_not_specialize=["layer"])
def _count(
    misses, slots, stored, head_of, tokens, selected, score, histogram, ties, taken, bound, layer,
    SLOTS: tl.constexpr, HEADS: tl.constexpr, CAPACITY: tl.constexpr, UNIT: tl.constexpr, ITEMS: tl.constexpr,
    BINS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_BLOCK: tl.constexpr,
):  # fmt: skip
    lane, block = tl.program_id(0), tl.program_id(1)
    if tl.load(misses + lane) == 0:
        return
    slot = tl.load(slots + lane // HEADS)
    items = tl.cdiv(tl.load(stored + slot), UNIT)
    if block * ITEMS >= items:
        return
    k = tl.load(selected + (layer * SLOTS + slot) * HEADS + lane % HEADS)
    threshold, wanted = _threshold(histogram + lane * BINS, k, BINS)
    scores = score + lane.to(tl.int64) * CAPACITY

    blocks = tl.arange(0, BLOCKS_BLOCK)
    in_block = tl.load(ties + lane * BLOCKS + blocks, mask=blocks < tl.cdiv(items, ITEMS), other=0)
    last = tl.sum((tl.cumsum(in_block, 0) < wanted).to(tl.int32), 0)  # the block of the last tie that is taken
    left = wanted - tl.sum(tl.where(blocks < last, in_block, 0), 0)
    offset = tl.arange(0, ITEMS)
    key = last * ITEMS + offset
    tied = tl.load(scores + key, mask=key < items, other=_EXCLUDED) == threshold
    inside = tl.sum((tl.cumsum(tied.to(tl.int32), 0) < left).to(tl.int32), 0)
    end = tl.where(wanted > 0, last * ITEMS + inside + 1, 0)
    if block == 0:
        tl.store(bound + lane, end)

    index = indexed(head_of, layer, lane, slot, SLOTS, HEADS)
    item = block * ITEMS + offset
    takes = _taken(scores, tokens + index * CAPACITY, item, items, threshold, end, UNIT)
    tl.store(taken + lane * BLOCKS + block, tl.sum(takes, 0))


@triton.jit(do_not_specialize=["layer"])
def _emit(
    misses, slots, stored, head_of, tokens, selected, score, histogram, taken, bound, wanted, wanted_count, layer,
    SLOTS: tl.constexpr, HEADS: tl.constexpr, CAPACITY: tl.constexpr, UNIT: tl.constexpr, ITEMS: tl.constexpr,
    BINS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_BLOCK: tl.constexpr, WANTED: tl.constexpr,
):  # fmt: skip
    lane, block = tl.program_id(0), tl.program_id(1)
    if tl.load(misses + lane) == 0:
        return
    slot = tl.load(slots + lane // HEADS)
    items = tl.cdiv(tl.load(stored + slot), UNIT)
    blocks = tl.arange(0, BLOCKS_BLOCK)
    in_block = tl.load(taken + lane * BLOCKS + blocks, mask=blocks < tl.cdiv(items, ITEMS), other=0)
    if block == 0:
        tl.store(wanted_count + lane, tl.sum(in_block, 0))
    if block * ITEMS >= items:
        return
    k = tl.load(selected + (layer * SLOTS + slot) * HEADS + lane % HEADS)
    threshold, _ = _threshold(histogram + lane * BINS, k, BINS)
    index = indexed(head_of, layer, lane, slot, SLOTS, HEADS)
    item = block * ITEMS + tl.arange(0, ITEMS)
    takes = _taken(
        score + lane.to(tl.int64) * CAPACITY, tokens + index * CAPACITY, item, items, threshold, tl.load(bound + lane),
        UNIT,
    )  # fmt: skip
    before = tl.sum(tl.where(blocks < block, in_block, 0), 0)
    tl.store(wanted + lane * WANTED + before + tl.cumsum(takes, 0) - 1, item, mask=takes != 0)


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
