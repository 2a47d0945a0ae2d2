"""A kernel that waits for a word of memory, then takes what was stored before it: what a window is asked to allow."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from decode_worker.gpu.launch import launch
from decode_worker.gpu.sync import READY, poll

WORDS = 1024  # int64 each


@triton.jit
def take(words, flag, calm, out, outcome, expected, timeout_ns, COUNT: tl.constexpr):
    ended = poll(flag + tl.arange(0, 1), expected, calm, calm, timeout_ns)
    at = tl.arange(0, COUNT)
    tl.store(out + at, tl.load(words + at))
    tl.store(outcome, ended)


def start(words, flag, expected, timeout_ns):
    """Launches it on int64 tensors of its device. Returns what says, once it has ended, whether the word came, and what
    `words` [WORDS] held then."""
    out, calm = words.new_empty(WORDS), words.new_zeros(1)
    outcome = words.new_full((1,), -1)
    launch(take, (1,), words, flag, calm, out, outcome, expected, timeout_ns, COUNT=WORDS, num_warps=1)
    return outcome == READY.value, out
