"""The codes of a query group, folded into bit planes (csrc/core/hamming.h).

A key's distance from the g codes is, but for what every key pays, sum_b 2^b popcount((key ^ majority) & plane_b). With
an even g all of that is even, and planes and distances are those of its half.

Products are float32, not rounded to fewer digits: a projection near zero has the sign that the other sets give it but
for the last bits of its sum.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from decode_worker.retrieval.hash import BITS

WORDS = BITS // 32
ROWS_OF_DOT, D_BLOCK = 16, 32  # of a group, padded; elements of a query at a time
_BITS, _WORDS, _D_BLOCK = (tl.constexpr(x) for x in (BITS, WORDS, D_BLOCK))


def shift(group: int) -> int:
    """The power of two that divides every difference of distances."""
    return 1 - group % 2


def planes(group: int) -> int:
    """How many bit planes the codes of a group fold into."""
    return group.bit_length() - shift(group)


def distances(group: int) -> int:
    """How many different distances there are; they count from 0."""
    return (BITS * group >> shift(group)) + 1


@triton.jit
def encode(
    query, projection, codes,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, SHIFT: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """query: float32[GROUP, D]; projection: float32[D, 256]. Writes codes, int32[1 + PLANES, 8]: the majority, the
    planes."""
    head, bit, i = tl.arange(0, ROWS), tl.arange(0, _BITS), tl.arange(0, _D_BLOCK)
    product = tl.zeros((ROWS, _BITS), tl.float32)
    for first in range(0, D, _D_BLOCK):
        e = first + i
        asked = (head < GROUP)[:, None] & (e < D)[None, :]
        q = tl.load(query + head[:, None] * D + e[None, :], mask=asked, other=0.0)
        w = tl.load(projection + e[:, None] * _BITS + bit[None, :], mask=(e < D)[:, None], other=0.0)
        product = tl.dot(q, w, acc=product, input_precision="ieee")
    set_ = tl.sum((product > 0).to(tl.int32), 0)  # rows beyond the group are zero, and add none
    power = tl.full((_BITS,), 1, tl.int32) << (bit % 32)
    word = tl.arange(0, _WORDS)
    out = codes + word
    tl.store(out, _packed(tl.where(2 * set_ > GROUP, power, 0)))
    extra = tl.abs(GROUP - 2 * set_) >> SHIFT
    for b in tl.static_range(PLANES):
        tl.store(out + (1 + b) * _WORDS, _packed(tl.where(((extra >> b) & 1) != 0, power, 0)))


@triton.jit
def _packed(powers):
    return tl.sum(tl.reshape(powers, (_WORDS, 32)), 1)
