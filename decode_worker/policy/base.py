"""Policies: which heads reuse their set at a step and what must be fetched for the others. Decisions only, no I/O.

One step of the caller (`begin_step` once, then for each layer):

    plan = policy.plan(layer, query)                      # None: nothing to fetch
    statuses = ring.wait(ring.post(..., plan.runs, plan.pairs))
    policy.settle(layer, statuses)                        # commits, or leaves the old sets in use
    store_token(window, policy.base(layer), policy.write_places(layer), ...)
    attend(query, window, policy.base(layer), *policy.segments(layer), ...)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from decode_worker.policy.binding import bind_tickets
from decode_worker.policy.counters import Counters
from decode_worker.policy.plan import NO_PAIRS, RUN_DTYPE, Delta, Plan, QueryKind, Ticket
from decode_worker.policy.settings import SEAL_TOKENS, PolicySettings
from decode_worker.policy.state import HeadState
from decode_worker.retrieval.base import Retriever
from decode_worker.retrieval.view import StoredPack, View
from decode_worker.window.geometry import WindowGeometry

if TYPE_CHECKING:
    from decode_worker.calibration.profile import Profile
    from decode_worker.config import WorkerConfig
    from decode_worker.model.config import ModelConfig
    from decode_worker.records import RecordFormat

__all__ = ["NO_PAIRS", "RUN_DTYPE", "Delta", "Plan", "Policy", "QueryKind", "TailFull", "Ticket", "make_policy"]

Rows = slice | NDArray[np.intp]


class TailFull(RuntimeError):
    """A new token has no place: its tail is full of tokens that no set covers yet. Seal, or wait for a fetch."""


class Policy(ABC):
    """Bound slots and their windows; subclasses decide what misses.

    Arrays of `segments`, `write_places` and `base` are valid until the next call of the same method or the next step.
    Rows follow the slots given to `begin_step`. Not thread-safe.
    """

    name: ClassVar[str]

    def __init__(self, settings: PolicySettings, retriever: Retriever) -> None:
        self.settings = settings
        self.retriever = retriever
        self.counters = Counters()
        self._state = HeadState(settings)
        self._views: list[View | None] = [None] * settings.slots
        self._geometries: list[WindowGeometry | None] = [None] * settings.slots
        self._offsets = [0] * settings.slots
        self._epochs = [0] * settings.slots
        self._first_position = np.full(settings.slots, -1, np.int32)
        self._offloaded = ~settings.resident
        self._has_offloaded = [bool(row.any()) for row in self._offloaded]
        self._has_resident = [bool(row.any()) for row in settings.resident]
        self._ranges = np.zeros((settings.slots, settings.kv_heads, 3, 2), np.int32)
        self._write = np.zeros((settings.slots, settings.kv_heads), np.int32)
        self._set_rows(np.arange(settings.slots), np.zeros(settings.slots, np.int32))

    # --- binding ---

    def geometry(self, context: int, stored: int | None = None) -> WindowGeometry:
        """A session's window when `stored` tokens lie in packs at bind (default: the largest that can be)."""
        return self.settings.geometry(context if stored is None else stored, context)

    def bind(
        self, slot: int, geometry: WindowGeometry, offset: int, packs: Sequence[StoredPack], position: int
    ) -> None:
        """Gives a free slot to a session. offset: byte offset of its part of the window; position: its next token's."""
        if self._views[slot] is not None:
            raise ValueError(f"slot {slot} is bound")
        view = View(packs)
        if not view.stored <= position <= geometry.resident_places:
            raise ValueError(
                f"position {position} lies outside [{view.stored} stored, {geometry.resident_places} declared]"
            )
        self._state.bind(slot, geometry, offset, self.settings.limit(view.stored, position))
        self._views[slot] = view
        self._geometries[slot] = geometry
        self._offsets[slot] = offset
        self._first_position[slot] = position

    def set_epoch(self, slot: int, epoch: int) -> None:
        """The epoch that BindSlot returned; every run of the slot carries it."""
        self._epochs[slot] = epoch

    def windows(self, slot: int) -> NDArray[np.uint64]:
        """What BindSlot takes: uint64[layers, H, 2]."""
        geometry = self._geometries[slot]
        if geometry is None:
            raise ValueError(f"slot {slot} is not bound")
        return geometry.windows(self._offsets[slot])

    def bind_tickets(self, slot: int, runs_max: int, pairs_max: int) -> Iterator[Ticket]:
        """What must be in the window before the first step."""
        cover = self.settings.limit(self._view(slot).stored, int(self._first_position[slot]))
        first_tail = int(self._state.first_tail[slot])
        return bind_tickets(
            self.settings, self._view(slot), slot, self._epochs[slot], cover, first_tail, runs_max, pairs_max
        )

    def unbind(self, slot: int) -> None:
        """Forgets everything of the slot. Call it before UnbindSlot returns the slot to others; idempotent."""
        self._views[slot] = None
        self._geometries[slot] = None
        self._epochs[slot] = 0
        self._first_position[slot] = -1
        self._state.reset(slot)

    def extend(self, slot: int, pack: StoredPack) -> None:
        """A sealed tail became a pack: N grows. Sets, labels and covers stay."""
        self._view(slot).extend(pack)

    def wants_seal(self, slot: int, position: int) -> bool:
        """True when the oldest 256 tail tokens should become a pack."""
        return position - self._view(slot).stored >= SEAL_TOKENS + self.settings.recent

    def room(self, slot: int, position: int) -> int:
        """How many tokens from `position` on can be written before a tail is full; at most 0: none."""
        if not self._offloaded.any():
            return self.settings.context - position
        cover = int(self._state.cover[:, slot][self._offloaded].min())
        return min(cover, self._view(slot).stored) + self.settings.tail - position

    def selects(self, layer: int) -> bool:
        """Whether any head of the layer needs a query to select with; False: all of them hold every token."""
        return self._has_offloaded[layer]

    # --- a step ---

    def begin_step(
        self, slots: Sequence[int] | NDArray[np.int32], positions: Sequence[int] | NDArray[np.int32]
    ) -> None:
        """The slots of this step's rows and the position that each processes."""
        self._set_rows(np.asarray(slots, np.intp), np.asarray(positions, np.int32))

    @abstractmethod
    def plan(self, layer: int, query: NDArray[np.float32], true_query: bool | None = None) -> Plan | None:
        """Looks up every offloaded head. query: [B, Hq, d]. None if nothing has to be fetched.

        true_query: whether this is the layer's own query (default: as configured, and always at layer 0).
        """

    @abstractmethod
    def settle(self, layer: int, statuses: NDArray[np.uint32] | None, plan: Plan | None = None) -> bool:
        """Commits what arrived. statuses: uint32[runs, 2] of the plan's ticket (default: the layer's latest plan).

        A run without a result (status 0) stays open and is settled by a later call; None: the ticket was not posted.
        Returns whether every head has a coherent set to attend to, the new one or the old one (counted `stale`).
        """

    @abstractmethod
    def first_sets(
        self, slot: int, queries: Sequence[NDArray[np.float32]], runs_max: int, pairs_max: int
    ) -> list[Ticket]:
        """Tickets of what the last prompt token's queries (per layer [Hq, d]) select.

        When all have arrived: `commit_first_sets`."""

    @abstractmethod
    def commit_first_sets(self, slot: int) -> None: ...

    def base(self, layer: int) -> NDArray[np.uint64]:
        """Byte offset of place 0, uint64[B, H]."""
        return self._state.base[layer][self._rows]

    def write_places(self, layer: int) -> NDArray[np.int32]:
        """Where this step's token goes, int32[B, H]. Raises TailFull if it would overwrite a token still needed."""
        out = self._write[: len(self._slots)]
        np.add(self._position_in_tail, self._first_tail, out=out)
        if self._has_offloaded[layer]:
            full = self._positions - self._state.cover[layer][self._rows] >= self.settings.tail
            if (full & self._offloaded[layer]).any():
                raise TailFull(
                    f"layer {layer}: a tail of {self.settings.tail} tokens is full at {self._positions.ravel()}"
                )
        if self._has_resident[layer]:
            np.copyto(out, self._positions, where=self.settings.resident[layer])
        return out

    def segments(self, layer: int) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """ranges int32[B, H, 3, 2], places int32[B, H, K] and counts int32[B, H], as `attend` takes them."""
        state, rows, tail = self._state, self._rows, self.settings.tail
        out = self._ranges[: len(self._slots)]
        cover = state.cover[layer][rows]
        if self._has_offloaded[layer]:
            start = cover % tail
            count = self._positions + 1 - cover
            np.minimum(cover, self.settings.sink, out=out[..., 0, 1])
            np.add(start, self._first_tail, out=out[..., 1, 0])
            np.minimum(count, tail - start, out=out[..., 1, 1])
            out[..., 2, 0] = self._first_tail
            np.subtract(count, out[..., 1, 1], out=out[..., 2, 1])
        if self._has_resident[layer]:
            resident = self.settings.resident[layer]
            np.copyto(out[..., 0, 1], self._positions + 1, where=resident)
            np.copyto(out[..., 1:, 1], 0, where=resident[:, None])
        return out, state.places[layer][rows], state.counts[layer][rows]

    def _set_rows(self, slots: NDArray[np.intp], positions: NDArray[np.int32]) -> None:
        first = int(slots[0]) if len(slots) else 0
        consecutive = bool((slots == np.arange(first, first + len(slots))).all())
        self._rows: Rows = slice(first, first + len(slots)) if consecutive else slots
        self._slots = slots.tolist()
        self._positions = positions[:, None]
        self._first_tail = self._state.first_tail[self._rows][:, None]
        self._position_in_tail = self._positions % self.settings.tail
        self._counted = positions != self._first_position[self._rows]
        self._new_step = True

    def _view(self, slot: int) -> View:
        view = self._views[slot]
        if view is None:
            raise ValueError(f"slot {slot} is not bound")
        return view


def make_policy(
    config: WorkerConfig, model: ModelConfig, records: RecordFormat, profile: Profile, retriever: Retriever
) -> Policy:
    """The policy that `config.policy` names."""
    from decode_worker.policy.full import FullPolicy
    from decode_worker.policy.none import NonePolicy
    from decode_worker.policy.qsac import QsacPolicy

    known: dict[str, Callable[[PolicySettings, Retriever], Policy]] = {
        policy.name: policy for policy in (QsacPolicy, NonePolicy, FullPolicy)
    }
    if config.policy not in known:
        raise KeyError(f"policy={config.policy!r}: known are {', '.join(known)}")
    resident = profile.resident_heads(
        records.record_bytes * config.context, config.resident_bytes, layer0=config.layer0 == "resident"
    )
    settings = PolicySettings(
        slots=config.slots,
        layers=model.layers,
        kv_heads=model.kv_heads,
        group=model.q_heads // model.kv_heads,
        head_dim=model.head_dim,
        record_bytes=records.record_bytes,
        context=config.context,
        tau=profile.thresholds(),
        weights=profile.query_weights(),
        resident=resident,
        budget=config.budget,
        sink=config.sink,
        recent=config.recent,
        tail=config.tail_places,
        slack=config.slack,
        cos_floor=config.cos_floor,
        speculative=config.query == "speculative",
    )
    return known[config.policy](settings, retriever)
