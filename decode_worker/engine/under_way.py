"""Prompts that an engine is computing: another one that shares most of itself with one of them waits for it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from decode_worker.engine import prefill
from decode_worker.engine.prefix import pack_bounds


class UnderWay:
    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = ids
        self.ended = False

    def gives(self, ids: Sequence[int], pack_tokens: int) -> int:
        """How many of `ids` its packs hold in whole chunks, as far as these are most of them; else 0."""
        pairs = enumerate(zip(self.ids, ids[:-1], strict=False))
        common = next((i for i, (mine, theirs) in pairs if mine != theirs), min(len(self.ids), len(ids) - 1))
        ends = [first + tokens for first, tokens in pack_bounds(len(self.ids), pack_tokens)]
        shared = max((end for end in ends if end <= common and end % prefill.CHUNK_TOKENS == 0), default=0)
        return shared if 2 * shared >= len(ids) else 0


class End:
    """What who waits for a prompt awaits: its end, or that `timeout_s` are over."""

    def __init__(self, of: UnderWay, timeout_s: float) -> None:
        self._of = of
        self._until_s = time.monotonic() + timeout_s

    def done(self) -> bool:
        return self._of.ended or time.monotonic() >= self._until_s

    def wait(self, timeout_s: float) -> None:
        """The same thread computes that prompt: nothing ends while this one sleeps."""
        time.sleep(max(0.0, min(timeout_s, self._until_s - time.monotonic())))
