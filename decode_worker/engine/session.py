"""A session: one conversation bound to a slot, its stored packs and its mutable tail."""

from __future__ import annotations

from dataclasses import dataclass, field

from decode_worker.pack_writer import PackDraft
from decode_worker.packs import IndexedPack
from decode_worker.window.geometry import WindowGeometry
from decode_worker.work import Work
from kvstore_service.client import PackRef


@dataclass(eq=False)
class Session:
    """`tokens` are all that the model has seen; the first `stored` of them lie in `packs`, the rest in the tail.

    `geometry` and `epoch` (not 0) are there once the slot is bound.
    """

    session_id: str
    slot: int
    growth: int = 0  # tokens expected behind the prompt
    reused: int = 0  # of the prompt's tokens: read from the store, not computed
    tokens: list[int] = field(default_factory=list)
    packs: list[IndexedPack] = field(default_factory=list)
    epoch: int = 0
    sealing: Work[IndexedPack] | None = None  # of the oldest tail tokens
    sealed: PackDraft | None = None  # the store has it as a pack already, `sealing` has not ended well yet
    seal_after_s: float = 0.0  # monotonic: the store has refused its tail before
    geometry: WindowGeometry = field(init=False)

    @property
    def stored(self) -> int:
        """N: tokens in committed packs, whole hash blocks."""
        return sum(pack.tokens for pack in self.packs)

    @property
    def last_pack(self) -> PackRef | None:
        """Of those that the store has of it, one that the session has not gone on with yet included."""
        if self.sealing is not None and self.sealing.ended:
            return self.sealing.result.ref
        return self.packs[-1].ref if self.packs else None

    @property
    def position(self) -> int:
        """The next token's position."""
        return len(self.tokens)
