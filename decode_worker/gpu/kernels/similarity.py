"""Which heads of a layer miss, and what those ask for: docs/qsac.md steps 3 and 4, a program per row and KV head.

Cosines are computed in float64, as the reference does: a layer has a few thousand products, and a decision that
differed from the other sets' would not be the same step.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from decode_worker.gpu.kernels.encode import ROWS_OF_DOT, WORDS, encode, planes, shift
from decode_worker.gpu.kernels.select import Selection, limit
from decode_worker.gpu.launch import launch
from decode_worker.kernels.state import HeadState
from decode_worker.policy.counters import Counters
from decode_worker.retrieval.hash import BITS

_BITS, _WORDS = tl.constexpr(BITS), tl.constexpr(WORDS)
_LOOKUPS, _HITS, _FORCED = (tl.constexpr(Counters.NAMES.index(n)) for n in ("lookups", "hits", "forced"))


def find_misses(
    state: HeadState,
    slots: torch.Tensor,
    positions: torch.Tensor,
    rows: int,
    layer: int,
    query: torch.Tensor,
    kind: int,
    cos_floor: float,
    by_label: bool,
    projection: torch.Tensor,
    selection: Selection,
) -> None:
    """query: float32[rows, H * g, d]; projection: float32[layers, H, d, 256]. Writes the selection's misses, and of
    those that miss the codes; clears their histograms."""
    shape, s = state.shape, selection
    launch(
        _similarity, (rows, shape.heads), slots, positions, query, state.label, state.label_kind, state.cover,
        state.parity, state.weights, state.tau, state.resident, state.forced_from, state.first_position, state.stored,
        state.fault, state.counters, projection, s.misses, s.codes, s.histogram, layer, kind, cos_floor,
        SIDE=state.parity.numel(), SLOTS=shape.slots, HEADS=shape.heads, GROUP=shape.group,
        GROUP_BLOCK=triton.next_power_of_2(shape.group), D=shape.head_dim,
        D_BLOCK=triton.next_power_of_2(shape.head_dim), BINS=s.histogram.shape[-1], BY_LABEL=by_label,
        ROWS=max(ROWS_OF_DOT, triton.next_power_of_2(shape.group)), SHIFT=shift(shape.group),
        PLANES=planes(shape.group), SINK=shape.sink, RECENT=shape.recent,
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer", "kind", "cos_floor"])
def _similarity(
    slots, positions, query, label, label_kind, cover, parity, weights, tau, resident, forced_from, first_position,
    stored, fault, counters, projection, misses, codes, histogram, layer, kind, cos_floor,
    SIDE: tl.constexpr, SLOTS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    D: tl.constexpr, D_BLOCK: tl.constexpr, BINS: tl.constexpr, BY_LABEL: tl.constexpr,
    ROWS: tl.constexpr, SHIFT: tl.constexpr, PLANES: tl.constexpr,
    SINK: tl.constexpr, RECENT: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    lane, table = row * HEADS + head, layer * HEADS + head
    tl.store(misses + lane, 0)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    if (tl.load(fault + slot) != 0) | (tl.load(resident + table) != 0):
        return
    at = (layer * SLOTS + slot) * HEADS + head
    now = tl.load(parity + at).to(tl.int64) * SIDE + at
    near = tl.full((), 0, tl.int32)
    if BY_LABEL:
        if tl.load(label_kind + now) == kind:
            near = _near(
                query + lane * (GROUP * D), label + now * (GROUP * D), weights + table * GROUP, tl.load(tau + table),
                cos_floor, GROUP, GROUP_BLOCK, D, D_BLOCK,
            )  # fmt: skip
    position = tl.load(positions + row)
    covered = tl.load(cover + now)
    due = (position - covered >= tl.load(forced_from + table)).to(tl.int32)
    forced = due * (limit(tl.load(stored + slot), position, SINK, RECENT) > covered).to(tl.int32)
    hit = near * (1 - forced)
    if position != tl.load(first_position + slot):
        tl.atomic_add(counters + _LOOKUPS, tl.full((), 1, tl.int64))
        if hit != 0:
            tl.atomic_add(counters + _HITS, tl.full((), 1, tl.int64))
        if forced != 0:
            tl.atomic_add(counters + _FORCED, tl.full((), 1, tl.int64))
    if hit != 0:
        return
    tl.store(misses + lane, 1)
    bins = tl.arange(0, BINS)
    tl.store(histogram + lane * BINS + bins, tl.zeros((BINS,), tl.int32))
    encode(
        query + lane * (GROUP * D), projection + table * (D * _BITS), codes + lane * ((1 + PLANES) * _WORDS),
        GROUP, ROWS, D, SHIFT, PLANES,
    )  # fmt: skip


@triton.jit
def _near(
    query, label, weights, tau, cos_floor,
    GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr,
):  # fmt: skip
    """1 where the weighted harmonic mean of the group's cosines exceeds tau; of cosines that are not all above the
    floor, or weights that are all zero, the least counts. A norm of zero, or what is no number, is never near."""
    group, i = tl.arange(0, GROUP_BLOCK), tl.arange(0, D_BLOCK)
    there = group < GROUP
    inside = there[:, None] & (i < D)[None, :]
    q = tl.load(query + group[:, None] * D + i[None, :], mask=inside, other=0.0).to(tl.float64)
    k = tl.load(label + group[:, None] * D + i[None, :], mask=inside, other=0.0).to(tl.float64)
    w = tl.load(weights + group, mask=there, other=0.0).to(tl.float64)
    qq, kk, qk = tl.sum(q * q, 1), tl.sum(k * k, 1), tl.sum(q * k, 1)
    whole = there & (qq > 0) & (kk > 0)
    cosine = tl.where(whole, qk / tl.sqrt(tl.where(whole, qq * kk, 1.0)), 1.0)
    least = tl.min(cosine, 0)
    weight = tl.sum(w, 0)
    safe = (least > cos_floor) & (weight > 0)
    inverse = tl.sum(w / tl.where(cosine > cos_floor, cosine, 1.0), 0)
    mean = tl.where(safe, weight / tl.where(safe, inverse, 1.0), least)
    unknown = tl.sum((there & ((whole == 0) | (cosine != cosine))).to(tl.int32), 0)
    return ((mean > tau) & (unknown == 0)).to(tl.int32)
