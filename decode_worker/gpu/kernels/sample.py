"""The next token of each row, as decode_worker/model/sampling.py chooses it: the same whole numbers for probabilities,
the same draw, so the same token.

    look    the highest logit and its token, and whether all are numbers; a program per row and part of the vocabulary
    weigh   each token's weight, for rows that are not greedy
    draw    what top_k and top_p keep, and the token that the row's number falls on; a program per row

What is kept is found by counting, not by sorting: logits as whole numbers in the order of floats, four bits after the
other from the highest, of those so far the amount in each of 16 bins: tokens for top_k, weight for top_p. Of equal
logits the lower ids are kept. A row's loads after its first depend on its settings alone.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from decode_worker.gpu.kernels.begin import POSITION, SLOT, STREAM, TEMPERATURE, TOP_K, TOP_P
from decode_worker.gpu.launch import launch
from decode_worker.gpu.sync import ends_last
from decode_worker.model.sampling import FACTORS, GOLDEN, ONE

PART = 4096  # tokens that a program of `look` and `weigh` takes
BLOCK = 4096  # that one of `draw` looks at together
_SLOT, _POSITION, _TEMPERATURE = tl.constexpr(SLOT), tl.constexpr(POSITION), tl.constexpr(TEMPERATURE)
_TOP_P, _TOP_K, _STREAM = tl.constexpr(TOP_P), tl.constexpr(TOP_K), tl.constexpr(STREAM)
_ONE = tl.constexpr(float(ONE))
_GOLDEN, _FIRST, _SECOND = tl.constexpr(GOLDEN), tl.constexpr(FACTORS[0]), tl.constexpr(FACTORS[1])
_BINS = tl.constexpr(16)
_LEVELS = tl.constexpr(8)  # of four bits


class Sampled:
    """Scratch for `rows` rows of a vocabulary, and the result: token, finite, int32[rows]; token 0 if not finite."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self.vocab = vocab
        self.parts = -(-vocab // PART)
        with torch.device(device):
            self.highest_of = torch.zeros((rows, self.parts), dtype=torch.float32)
            self.likeliest_of = torch.zeros((rows, self.parts), dtype=torch.int32)  # -1: some are not numbers
            self.highest = torch.zeros(rows, dtype=torch.float32)
            self.token = torch.zeros(rows, dtype=torch.int32)
            self.finite = torch.zeros(rows, dtype=torch.int32)
            self.weights = torch.zeros((rows, vocab), dtype=torch.int64)
            self.ended = torch.zeros(rows, dtype=torch.int32)  # parts; zero between launches


def sample(held: torch.Tensor, logits: torch.Tensor, rows: int, s: Sampled) -> None:
    """held: int64[fields, slots] (gpu/kernels/begin.py). logits: float32[.., vocab]."""
    slots, of_vocab = held.shape[1], {"VOCAB": s.vocab, "PART": min(PART, triton.next_power_of_2(s.vocab))}
    launch(
        _look, (rows, s.parts), held, logits, s.highest_of, s.likeliest_of, s.highest, s.token, s.finite, s.ended,
        SLOTS=slots, PARTS=s.parts, PARTS_BLOCK=triton.next_power_of_2(s.parts), **of_vocab, num_warps=8,
    )  # fmt: skip
    launch(
        _weigh, (rows, s.parts), held, logits, s.highest, s.finite, s.weights, SLOTS=slots, **of_vocab, num_warps=8
    )  # fmt: skip
    launch(
        _draw, (rows,), held, logits, s.finite, s.weights, s.token,
        SLOTS=slots, VOCAB=s.vocab, BLOCK=min(BLOCK, triton.next_power_of_2(s.vocab)), num_warps=16,
    )  # fmt: skip


@triton.jit
def _look(
    held, logits, highest_of, likeliest_of, highest, likeliest, finite, ended,
    SLOTS: tl.constexpr, VOCAB: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    if tl.load(held + _SLOT * SLOTS + row) < 0:
        return
    token = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row.to(tl.int64) * VOCAB + token, mask=token < VOCAB, other=float("-inf"))
    bad = (x != x) | (x == float("inf"))
    x = tl.where(bad, float("-inf"), x)
    most = tl.max(x, 0)
    first = tl.min(tl.where(x == most, token, VOCAB), 0)
    tl.store(highest_of + row * PARTS + part, most)
    tl.store(likeliest_of + row * PARTS + part, tl.where(tl.sum(bad.to(tl.int32), 0) > 0, -1, first))
    if ends_last(ended + row, PARTS, "gpu"):
        every = tl.arange(0, PARTS_BLOCK)
        at = row * PARTS + every
        each = tl.load(highest_of + at, mask=every < PARTS, other=float("-inf"), cache_modifier=".cg")
        its = tl.load(likeliest_of + at, mask=every < PARTS, other=VOCAB, cache_modifier=".cg")
        most = tl.max(each, 0)
        fine = (tl.min(its, 0) >= 0) & (most > float("-inf"))
        tl.store(highest + row, most)
        tl.store(likeliest + row, tl.where(fine, tl.min(tl.where(each == most, its, VOCAB), 0), 0))
        tl.store(finite + row, fine.to(tl.int32))


@triton.jit
def _weigh(
    held, logits, highest, finite, weights, SLOTS: tl.constexpr, VOCAB: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if _draws(held, finite, row, SLOTS):
        temperature = tl.load(held + _TEMPERATURE * SLOTS + row).to(tl.float64, bitcast=True)
        token = tl.program_id(1) * PART + tl.arange(0, PART)
        at = row.to(tl.int64) * VOCAB + token
        x = tl.load(logits + at, mask=token < VOCAB, other=float("-inf")).to(tl.float64)
        scaled = (x - tl.load(highest + row).to(tl.float64)) / temperature
        tl.store(weights + at, (tl.exp(scaled) * _ONE).to(tl.int64), mask=token < VOCAB)


@triton.jit
def _draw(
    held, logits, finite, weights, tokens, SLOTS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if _draws(held, finite, row, SLOTS):
        x, w = logits + row.to(tl.int64) * VOCAB, weights + row.to(tl.int64) * VOCAB
        top_k = tl.load(held + _TOP_K * SLOTS + row)
        top_p = tl.load(held + _TOP_P * SLOTS + row).to(tl.float64, bitcast=True)
        if (top_k > 0) & (top_k < VOCAB):
            _keep(x, w, top_k, False, VOCAB, BLOCK)
        if top_p < 1:
            total = _total(w, VOCAB, BLOCK)
            reached = tl.ceil(total.to(tl.float64) * top_p).to(tl.int64)
            _keep(x, w, tl.maximum(tl.minimum(reached, total), 1), True, VOCAB, BLOCK)
        total = _total(w, VOCAB, BLOCK)
        position = tl.load(held + _POSITION * SLOTS + row) + 1
        drawn = (uniform(tl.load(held + _STREAM * SLOTS + row), position) * total.to(tl.float64)).to(tl.int64)
        tl.store(tokens + row, _holder(w, tl.minimum(drawn, total - 1), VOCAB, BLOCK))


@triton.jit
def _draws(held, finite, row, SLOTS: tl.constexpr):
    """Whether a row is there, has logits that are numbers, and is not greedy: 0.0 is no bits."""
    is_there = (tl.load(held + _SLOT * SLOTS + row) >= 0) & (tl.load(finite + row) != 0)
    return is_there & (tl.load(held + _TEMPERATURE * SLOTS + row) > 0)


@triton.jit
def _keep(x, w, target, BY_WEIGHT: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """No weight for all but the likeliest tokens whose amount reaches `target`, which all of them together have."""
    bins = tl.arange(0, _BINS)
    least, left = target * 0, target  # the key of the least likely that is kept, as far as it is known
    for level in range(_LEVELS):
        shift = 4 * (_LEVELS - 1 - level)
        amounts = tl.zeros((_BINS,), tl.int64)
        for first in range(0, VOCAB, BLOCK):
            key, amount = _items(x, w, first, BY_WEIGHT, VOCAB, BLOCK)
            amount = tl.where((key >> shift) >> 4 == least, amount, 0)
            if tl.max(amount, 0) > 0:
                digit = (key >> shift) & (_BINS - 1)
                for b in tl.static_range(_BINS):
                    amounts += tl.where(bins == b, tl.sum(tl.where(digit == b, amount, 0), 0), 0)
        onwards = tl.sum(amounts, 0) - tl.cumsum(amounts, 0) + amounts  # of a bin and the likelier ones
        digit = tl.max(tl.where(onwards >= left, bins, 0), 0)
        left -= tl.sum(tl.where(bins > digit, amounts, 0), 0)
        least = least * _BINS + digit
    tl.debug_barrier()
    ties = target * 0
    for first in range(0, VOCAB, BLOCK):
        key, amount = _items(x, w, first, BY_WEIGHT, VOCAB, BLOCK)
        tie = tl.where(key == least, amount, 0)
        before = ties + tl.cumsum(tie, 0) - tie
        dropped = (key < least) | ((key == least) & (before >= left))
        token = first + tl.arange(0, BLOCK)
        tl.store(w + token, tl.zeros((BLOCK,), tl.int64), mask=dropped & (token < VOCAB))
        ties += tl.sum(tie, 0)
    tl.debug_barrier()


@triton.jit
def _items(x, w, first, BY_WEIGHT: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens' logits as whole numbers below 2**32 in the same order, and their amounts."""
    token = first + tl.arange(0, BLOCK)
    logit = tl.load(x + token, mask=token < VOCAB, other=float("-inf"))
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True).to(tl.int64)  # of -0.0 those of 0.0
    key = tl.where(bits >= 0, bits + 0x80000000, -1 - bits)
    inside = token < VOCAB
    amount = tl.load(w + token, mask=inside, other=0) if BY_WEIGHT else inside.to(tl.int64)
    return key, amount


@triton.jit
def _total(w, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    sums = tl.zeros((BLOCK,), tl.int64)
    for first in range(0, VOCAB, BLOCK):
        token = first + tl.arange(0, BLOCK)
        sums += tl.load(w + token, mask=token < VOCAB, other=0)
    return tl.sum(sums, 0)


@triton.jit
def _holder(w, drawn, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The token whose part of the sum of weights holds `drawn`, in the order of ids."""
    holder, before = (drawn * 0).to(tl.int32), drawn * 0
    for first in range(0, VOCAB, BLOCK):
        token = first + tl.arange(0, BLOCK)
        ends = before + tl.cumsum(tl.load(w + token, mask=token < VOCAB, other=0), 0)
        holder += tl.sum(((ends <= drawn) & (token < VOCAB)).to(tl.int32), 0)
        before = tl.max(ends, 0)
    return holder


@triton.jit
def uniform(stream, position):
    """Sampling.uniform."""
    z = stream.to(tl.uint64, bitcast=True) + position.to(tl.uint64, bitcast=True) * _GOLDEN
    return (_mixed(z + _GOLDEN) >> 11).to(tl.float64) * (2.0**-53)


@triton.jit
def _mixed(z):
    z = (z ^ (z >> 30)) * _FIRST
    z = (z ^ (z >> 27)) * _SECOND
    return z ^ (z >> 31)
