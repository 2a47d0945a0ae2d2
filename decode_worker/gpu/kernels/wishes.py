"""What each layer has asked for: heads that fetch something, in order of (row, head), and the ticket claimed for them.

The number of the next ticket lives in device memory. Without a wish nothing is posted, and no number is used up. A
ticket that cannot be posted leaves its wishes without one: `arrive` settles them, and `error` says why.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from decode_worker.gpu.sync import POISONED, WAITING, clock_ns, load_acquire, pause

# A wished-for change, as int32[FIELDS]: the ticket's run i is that of wish i.
FIELDS = 8
SLOT, HEAD, HAS_OLD_SET, PAIRS, FIRST_PAIR, STATUS, AUX = range(7)

NO_CREDIT, TOO_LARGE = 4, 5  # values of `error`, beside those of gpu/sync.py
_NO_CREDIT, _TOO_LARGE = tl.constexpr(NO_CREDIT), tl.constexpr(TOO_LARGE)
_FIELDS, _SLOT, _HEAD = tl.constexpr(FIELDS), tl.constexpr(SLOT), tl.constexpr(HEAD)
_HAS_OLD_SET, _PAIRS, _FIRST_PAIR = tl.constexpr(HAS_OLD_SET), tl.constexpr(PAIRS), tl.constexpr(FIRST_PAIR)


class Wishes:
    """What each layer has asked for and not committed yet. `look_up` writes it, `arrive` ends it.

    number   int64[layers]: of the ticket that carries a layer's wishes; 0: it was not posted
    count    int32[layers]: wishes; 0: nothing is under way, and nothing is waited for
    wishes   int32[layers, runs, FIELDS], in order of (row, head); STATUS and AUX are `arrive`'s
    landed   int64[layers, 2]: the ticket that `arrive` has just read all cells of, and their number; 0 and 0: none
    begun, ended   int32[1]: programs of `arrive`; zero between launches
    """

    def __init__(self, layers: int, runs: int, device: torch.device) -> None:
        self.number = torch.zeros(layers, dtype=torch.int64, device=device)
        self.count = torch.zeros(layers, dtype=torch.int32, device=device)
        self.wishes = torch.zeros((layers, runs, FIELDS), dtype=torch.int32, device=device)
        self.landed = torch.zeros((layers, 2), dtype=torch.int64, device=device)
        self.begun, self.ended = torch.zeros(2, 1, dtype=torch.int32, device=device)

    @property
    def runs(self) -> int:
        return self.wishes.shape[1]


@triton.jit
def list_wishes(
    misses, slots, pair_count, has_old_set, count, wishes, layer,
    LANES: tl.constexpr, LANES_BLOCK: tl.constexpr, HEADS: tl.constexpr, WISHES: tl.constexpr,
):  # fmt: skip
    """How many there are, and how many pairs they have."""
    lane = tl.arange(0, LANES_BLOCK)
    missed = tl.load(misses + lane, mask=lane < LANES, other=0) != 0
    pairs = tl.load(pair_count + lane, mask=missed, other=0)
    there = pairs > 0
    fetches = there.to(tl.int32)
    wish = wishes + (layer * WISHES + tl.cumsum(fetches, 0) - 1) * _FIELDS
    tl.store(wish + _SLOT, tl.load(slots + lane // HEADS, mask=there, other=0), mask=there)
    tl.store(wish + _HEAD, lane % HEADS, mask=there)
    tl.store(wish + _HAS_OLD_SET, tl.load(has_old_set + lane, mask=there, other=0), mask=there)
    tl.store(wish + _PAIRS, pairs, mask=there)
    tl.store(wish + _FIRST_PAIR, tl.cumsum(pairs, 0) - pairs, mask=there)
    runs = tl.sum(fetches, 0)
    tl.store(count + layer, runs)
    return runs, tl.sum(pairs, 0)


@triton.jit
def claim_ticket(
    runs, pairs, number, layer, timeout_ns, own_poison, peer_poison, consumed, next_number, error,
    LAYERS: tl.constexpr, LAYERS_BLOCK: tl.constexpr,
    RUNS_MAX: tl.constexpr, PAIRS_MAX: tl.constexpr, TICKETS: tl.constexpr,
):  # fmt: skip
    """The number of the layer's ticket, or 0 and the reason.

    Threads may see different values of a word that the daemon changes. What is written is one thread's, so nothing
    branches on it: a program of any number of warps decides once."""
    next_ = tl.load(next_number)
    refusal = tl.full((), _TOO_LARGE, tl.int32)
    if (runs <= RUNS_MAX) & (pairs <= PAIRS_MAX):
        refusal = _refusal(number, next_ - TICKETS, own_poison, peer_poison, consumed, timeout_ns, LAYERS, LAYERS_BLOCK)
    tl.debug_barrier()  # all have read the numbers
    granted = (refusal == 0).to(tl.int64)
    tl.store(number + layer, next_ * granted)
    tl.store(next_number, next_ + granted)
    tl.atomic_cas(error, 0, refusal)


@triton.jit
def _refusal(
    number, before, own_poison, peer_poison, consumed, timeout_ns, LAYERS: tl.constexpr, LAYERS_BLOCK: tl.constexpr
):
    """Why the ticket that takes the area of ticket `before` may not be posted; 0 if it may. That one must have been
    collected here and consumed there, and a cell can be seen before it counts as consumed: that is waited for."""
    layer = tl.arange(0, LAYERS_BLOCK)
    open_ = tl.load(number + layer, mask=layer < LAYERS, other=0)
    refusal = tl.full((), WAITING, tl.int32)
    if tl.max(((open_ > 0) & (open_ <= before)).to(tl.int32), 0) != 0:
        refusal = tl.full((), _NO_CREDIT, tl.int32)
    deadline = timeout_ns.to(tl.int64) + clock_ns()
    while refusal == WAITING:
        if (load_acquire(own_poison) | load_acquire(peer_poison)) != 0:
            refusal = tl.full((), POISONED, tl.int32)
        elif load_acquire(consumed) >= before:
            refusal = tl.full((), 0, tl.int32)
        elif clock_ns() >= deadline:
            refusal = tl.full((), _NO_CREDIT, tl.int32)
        else:
            pause()
    return refusal
