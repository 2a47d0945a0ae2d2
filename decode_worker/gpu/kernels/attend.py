"""Attention over sinks, tail and selected places, or everything: one launch.

A lane (a row's KV head) is cut into parts by its own length alone, so the result depends neither on the batch nor on
how many programs share the parts. Whoever ends a lane's last part joins them, in order.

Products run on tensor cores in the records' dtype; queries and weights, which have more digits, go in as the sum of two
numbers of it. Nothing that the host knows bounds a loop: lengths, covers and positions are read from memory.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from decode_worker.gpu.kernels.append import stored
from decode_worker.gpu.launch import launch, multiprocessors
from decode_worker.gpu.sync import INTERPRETED, ends_last
from decode_worker.kernels.state import HeadState

PARTS = 64  # of a lane, at most
PART = 256  # records of a part, at least
JOINED = 32  # parts that one look of the join takes in
ROWS_OF_DOT = 16  # the fewest that tensor cores take: query heads of a lane, padded

_PARTS, _PART, _JOINED = tl.constexpr(PARTS), tl.constexpr(PART), tl.constexpr(JOINED)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


class AttendScratch:
    """Results of parts until their lane is whole: 64 times `out` and `lse` of a step of `rows` rows."""

    def __init__(self, rows: int, heads: int, group: int, d: int, device: torch.device) -> None:
        lanes = rows * heads
        self.out = torch.zeros((lanes, PARTS, group, d), dtype=torch.float32, device=device)
        self.lse = torch.zeros((lanes, PARTS, group), dtype=torch.float32, device=device)
        self.ended = torch.zeros(lanes, dtype=torch.int32, device=device)  # parts; zero between launches
        self.programs = 3 * multiprocessors(device)


def attend(
    state: HeadState,
    slots: torch.Tensor,
    positions: torch.Tensor,
    layer: int,
    query: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    window: torch.Tensor,
    record_bytes: int,
    scale: float,
    scratch: AttendScratch,
) -> None:
    """query, out: float32 [rows, H * g, d]; lse: float32 [rows, H * g]; window: one dimension, in the storage dtype.

    slots, positions: int32[..]. Rows of slot -1 and heads that hold nothing give zeros, and -inf.
    """
    rows, d, shape = query.shape[0], query.shape[2], state.shape
    lanes = rows * shape.heads
    block, warps, stages = tile(d, window.element_size())
    launch(
        _attend, (scratch.programs,), slots, positions, query, out, lse, window,
        scratch.out, scratch.lse, scratch.ended,
        state.base, state.capacity, state.cover, state.count, state.places, state.parity, state.resident,
        layer, lanes, scale, state.parity.numel(), state.places.shape[-1], shape.slots, shape.heads, shape.group,
        d, triton.next_power_of_2(d), shape.sink, shape.unit, shape.tail,
        record_bytes // window.element_size(), triton.next_power_of_2(lanes), block,
        max(ROWS_OF_DOT, triton.next_power_of_2(shape.group)), num_warps=warps, num_stages=stages,
    )  # fmt: skip


def tile(d: int, element_bytes: int) -> tuple[int, int, int]:
    """Records of one look: 8 KiB of K, as much of V; warps; and stages: while one look is computed, K and V of the next
    are under way, and the names of the two behind it. Three such programs share a multiprocessor."""
    return max(16, min(64, 8192 // (triton.next_power_of_2(d) * element_bytes))), 4, 5


@triton.jit(do_not_specialize=["layer", "lanes"])
def _attend(
    slots, positions, query, out, lse, window, part_out, part_lse, ended,
    base, capacity, cover, count, places, parity, resident,
    layer, lanes, scale, SIDE: tl.constexpr, PLACES: tl.constexpr,
    SLOTS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr,
    SINK: tl.constexpr, UNIT: tl.constexpr, TAIL: tl.constexpr, RECORD: tl.constexpr,
    LANES_BLOCK: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    every = tl.arange(0, LANES_BLOCK)
    _, _, sinks, _, before_wrap, wrapped, listed, _ = _held(
        slots, positions, base, capacity, cover, count, parity, resident, layer, every, lanes,
        SIDE, SLOTS, HEADS, SINK, UNIT, TAIL,
    )  # fmt: skip
    totals = sinks + before_wrap + wrapped + listed
    part_counts = tl.where(every < lanes, tl.maximum(tl.cdiv(totals, _length(totals)), 1), 0)
    ends = tl.cumsum(part_counts, 0)

    for item in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        lane = tl.sum((ends <= item).to(tl.int32), 0)
        part_count = tl.sum(tl.where(every == lane, part_counts, 0), 0)
        part = item - tl.sum(tl.where(every == lane, ends - part_counts, 0), 0)
        top, total, acc = _part(
            slots, positions, query, window, base, capacity, cover, count, places, parity, resident,
            layer, lane, lanes, part, scale, SIDE, PLACES, SLOTS, HEADS, GROUP, D, D_BLOCK, SINK, UNIT, TAIL, RECORD,
            BLOCK, ROWS,
        )  # fmt: skip
        group, i = tl.arange(0, ROWS), tl.arange(0, D_BLOCK)
        head_there = group < GROUP
        there = head_there[:, None] & (i < D)[None, :]
        value = acc / tl.where(total > 0, total, 1.0)[:, None]
        log_sum = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), -float("inf"))
        if part_count == 1:
            first = lane * GROUP + group
            tl.store(out + first[:, None] * D + i[None, :], value, mask=there)
            tl.store(lse + first, log_sum * _LN_2, mask=head_there)
        else:
            first = (lane * _PARTS + part) * GROUP + group
            tl.store(part_out + first[:, None] * D + i[None, :], value, mask=there)
            tl.store(part_lse + first, log_sum, mask=head_there)
            if ends_last(ended + lane, part_count, "gpu"):
                _join(part_out, part_lse, out, lse, lane, part_count, GROUP, D, D_BLOCK)


@triton.jit
def _length(total):
    """Records of each of a lane's parts but the last: whole looks, and no more than 64 parts."""
    return tl.maximum(_PART, tl.cdiv(tl.cdiv(total, _PARTS), _PART) * _PART)


@triton.jit
def _held(
    slots, positions, base, capacity, cover, count, parity, resident, layer, lane, lanes,
    SIDE: tl.constexpr, SLOTS: tl.constexpr, HEADS: tl.constexpr, SINK: tl.constexpr, UNIT: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """What a lane, or each of a block of lanes, attends to (decode_worker/policy/attended.py): `sinks` places from 0
    on, `before_wrap` ones from `start`, `wrapped` ones from `first_tail`, then `listed` ones by name."""
    there = lane < lanes
    row, head = lane // HEADS, lane % HEADS
    slot = tl.load(slots + row, mask=there, other=-1)
    bound = there & (slot >= 0)
    at = (layer * SLOTS + tl.maximum(slot, 0)) * HEADS + head
    position = tl.load(positions + row, mask=bound, other=-1)
    whole = tl.load(resident + layer * HEADS + head, mask=bound, other=1) != 0
    set_of = tl.load(parity + at, mask=bound, other=0).to(tl.int64) * SIDE + at
    covered = tl.load(cover + set_of, mask=bound, other=0)
    listed = tl.load(count + set_of, mask=bound, other=0)
    first_tail = SINK + tl.load(capacity + at, mask=bound, other=0) * UNIT

    in_tail = tl.where(whole, 0, tl.minimum(position + 1 - covered, TAIL))
    before_wrap = tl.minimum(in_tail, TAIL - covered % TAIL)
    sinks = tl.where(whole, position + 1, tl.minimum(covered, SINK))
    listed = tl.where(whole, 0, listed)
    return slot, set_of, sinks, first_tail + covered % TAIL, before_wrap, in_tail - before_wrap, listed, first_tail


@triton.jit
def _part(
    slots, positions, query, window, base, capacity, cover, count, places, parity, resident,
    layer, lane, lanes, part, scale, SIDE: tl.constexpr, PLACES: tl.constexpr,
    SLOTS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr,
    SINK: tl.constexpr, UNIT: tl.constexpr, TAIL: tl.constexpr, RECORD: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One part's largest score [ROWS], sum of 2 ** (score - largest) and those weights' sum of values [ROWS, D]."""
    slot, set_of, sinks, start, before_wrap, wrapped, listed, first_tail = _held(
        slots, positions, base, capacity, cover, count, parity, resident, layer, lane, lanes,
        SIDE, SLOTS, HEADS, SINK, UNIT, TAIL,
    )  # fmt: skip
    unlisted = sinks + before_wrap + wrapped
    total = unlisted + listed
    from_, to = part * _length(total), tl.minimum((part + 1) * _length(total), total)
    at = (layer * SLOTS + tl.maximum(slot, 0)) * HEADS + lane % HEADS
    first_byte = tl.load(base + at)
    records = window + tl.multiple_of(first_byte // (window.dtype.element_ty.primitive_bitwidth // 8), 16)
    named = places + set_of * PLACES

    group, i = tl.arange(0, ROWS), tl.arange(0, D_BLOCK)
    asked = query + (lane * GROUP + group)[:, None] * D + i[None, :]
    q = tl.load(asked, mask=(group < GROUP)[:, None] & (i < D)[None, :], other=0.0) * (scale * _LOG2_E)
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    sum_ = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D_BLOCK), tl.float32)
    for first in tl.range(from_, to, BLOCK):
        n = first + tl.arange(0, BLOCK)
        there = n < to
        place = tl.where(n < sinks, n, start + n - sinks)
        place = tl.where(n < sinks + before_wrap, place, first_tail + n - sinks - before_wrap)
        name = tl.load(named + (n - unlisted), mask=there & (n >= unlisted), other=0)
        place = tl.where(n < unlisted, place, name)
        record = place.to(tl.int64) * RECORD
        keys = tl.load(
            records + record[None, :] + i[:, None], mask=there[None, :] & (i < D)[:, None], other=0.0
        )  # [D, BLOCK]
        score = tl.where(there[None, :], _product(q, keys), -float("inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        kept = tl.exp2(top - higher)
        values = tl.load(
            records + D + record[:, None] + i[None, :], mask=there[:, None] & (i < D)[None, :], other=0.0
        )  # [BLOCK, D]
        acc = acc * kept[:, None] + _product(weight, values)
        sum_ = sum_ * kept + tl.sum(weight, 1)
        top = higher
    return top, sum_, acc


@triton.jit
def _product(x, y):
    """float32 x times records y. The interpreter keeps bfloat16 as bits and multiplies those: it gets float32."""
    if y.dtype == tl.float32:
        product = tl.dot(x, y, input_precision="tf32x3")
    elif INTERPRETED:
        high = stored(x, y.dtype).to(tl.float32)
        low = stored(x - high, y.dtype).to(tl.float32)
        product = tl.dot(high, y.to(tl.float32)) + tl.dot(low, y.to(tl.float32))
    else:
        high = x.to(y.dtype)
        low = (x - high.to(tl.float32)).to(y.dtype)
        product = tl.dot(low, y, acc=tl.dot(high, y))
    return product


@triton.jit
def _join(part_out, part_lse, out, lse, lane, part_count, GROUP: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr):
    """A lane's parts, whoever computed them: read past the first-level cache, which knows nothing of other programs."""
    i = tl.arange(0, D_BLOCK)
    for head in range(GROUP):
        all_parts = tl.arange(0, _PARTS)
        first = lane * _PARTS * GROUP + head
        logs = tl.load(
            part_lse + first + all_parts * GROUP, mask=all_parts < part_count, other=-float("inf"), cache_modifier=".cg"
        )
        top = tl.max(logs, 0)
        total = tl.sum(tl.exp2(logs - top), 0)
        acc = tl.zeros((D_BLOCK,), tl.float32)
        for from_ in range(0, part_count, _JOINED):
            part = from_ + tl.arange(0, _JOINED)
            there = part < part_count
            at = first + part * GROUP
            log = tl.load(part_lse + at, mask=there, other=-float("inf"), cache_modifier=".cg")
            values = tl.load(
                part_out + at[:, None] * D + i[None, :], mask=there[:, None] & (i < D)[None, :], other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            acc += tl.sum(tl.exp2(log - top)[:, None] * values, 0)
        tl.store(out + (lane * GROUP + head) * D + i, acc / total, mask=i < D)
        tl.store(lse + lane * GROUP + head, (top + tl.log2(total)) * _LN_2)
