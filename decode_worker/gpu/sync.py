"""How a program meets whoever runs beside it.

Who is not on its device: load-acquire, store-release, and waiting, all at system scope. The ring's rules
(csrc/protocol/README.md) are kept with these three alone. On a device they are PTX, the same for every version of
Triton. The interpreter has no memory orders to keep: there they are plain accesses and Python's clock, and what they
prove is the logic, not the order.

The other programs of its launch: `ends_last`, `wait_for`. What lies between a store of one and a load of another is the
first one's barrier, which puts the stores of all its threads before its counting; the counting, one thread's release,
which carries along what the barrier has shown it, to another's acquire; the second one's barrier. All four are ordered
by PTX's causality, so a release at system scope behind them hands to the host what any program of the launch stored.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import time

import triton
import triton.language as tl
from triton.language.extra import cuda

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# Of several lanes the highest holds for all.
READY = tl.constexpr(0)
WAITING = tl.constexpr(1)
LATE = tl.constexpr(2)
POISONED = tl.constexpr(3)

PAUSE_S = 20e-6


@triton.jit
def load_acquire(words):
    """`words`: a pointer, or a block of pointers, to 32 or 64 bits. Never writes: the mapping may be read-only."""
    if INTERPRETED:
        value = tl.load(words)
    elif words.dtype.scalar.element_ty.primitive_bitwidth == 64:
        value = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b64 $0, [$1];", "=l,l,~{memory}", [words], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        value = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1];", "=r,l,~{memory}", [words], dtype=tl.int32, is_pure=False, pack=1
        )
    return value


@triton.jit
def store_release(word, value):
    """What the program's threads have read and written before is over for whoever acquires `value`, one int64."""
    if INTERPRETED:
        tl.store(word, value)
    else:
        tl.debug_barrier()  # the release is one thread's: those of the others come before it
        tl.inline_asm_elementwise(
            """{
                .reg .pred first;
                mov.u32 $0, %tid.x;
                setp.eq.u32 first, $0, 0;
                @first st.release.sys.global.b64 [$1], $2;
            }""",
            "=&r,l,l,~{memory}", [word, value.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def ends_last(ended, programs, SCOPE: tl.constexpr):
    """Whether the others of so many programs have ended before this one, which then sees all that they have stored.

    `ended` counts them, int32, and is zero again behind the last. SCOPE: "gpu", or "sys" where it is host memory."""
    tl.debug_barrier()  # all threads have stored before one of them says so
    is_last = tl.atomic_add(ended, 1, sem="acq_rel", scope=SCOPE) == programs - 1
    if is_last:
        tl.store(ended, 0)
    tl.debug_barrier()  # and none reads before that one has heard of the others
    return is_last


@triton.jit
def wait_for(ended, programs):
    """Until so many have counted themselves by `ends_last`; then this one sees all that they have stored.

    Only for those that are sure to run already, since one that has not started may need this one's room; and that end
    by a deadline of their own, since this wait has none."""
    seen = tl.atomic_add(ended, 0, sem="acquire", scope="gpu")
    while seen < programs:
        pause()
        seen = tl.atomic_add(ended, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit
def poll(words, expected, own_poison, peer_poison, timeout_ns):
    """Until every one of `words`, a block of pointers, equals `expected`: READY; or LATE, or POISONED.

    Both poison words come before the others each time round: an answer in an abandoned ring is none. Threads may see
    different values of one word, so they branch on nothing but what all of them have made of it together.
    """
    deadline = timeout_ns.to(tl.int64) + clock_ns()
    outcome = tl.full((), WAITING, tl.int32)
    while outcome == WAITING:
        poisoned = (load_acquire(own_poison) | load_acquire(peer_poison)) != 0
        seen = tl.where(load_acquire(words) == expected, READY, tl.where(clock_ns() >= deadline, LATE, WAITING))
        outcome = tl.max(tl.where(poisoned, POISONED, seen), 0)
        if outcome == WAITING:
            pause()
    return outcome


if INTERPRETED.value:

    def clock_ns():
        return time.monotonic_ns()

    def pause():
        time.sleep(PAUSE_S)

else:

    @triton.jit
    def clock_ns():
        return cuda.globaltimer()

    @triton.jit
    def pause():
        """Lets the other warps of the multiprocessor run, and the link rest."""
        tl.inline_asm_elementwise("nanosleep.u32 100; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
