"""Prompts that an engine is computing: another one that shares most of itself with one of them waits for it."""

from __future__ import annotations

from collections.abc import Sequence

from decode_worker.engine import prefill
from decode_worker.engine.prefix import pack_bounds
from decode_worker.work import Pause


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


class End(Pause):
    """What who waits for a prompt awaits: its end, or that `timeout_s` are over.

    The thread that waits is the one that computes that prompt: nothing ends while it sleeps."""

    def __init__(self, of: UnderWay, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._of = of

    def done(self) -> bool:
        return self._of.ended or super().done()
