"""A policy between steps: which sessions its slots hold, and what their windows must have before the first step.

What happens in a step is the kernels' (decode_worker/kernels/base.py), over the state that a policy owns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from decode_worker.kernels.state import HeadState
from decode_worker.policy.binding import bind_tickets
from decode_worker.policy.cache.base import CACHES
from decode_worker.policy.counters import Counters
from decode_worker.policy.plan import QueryKind, Ticket
from decode_worker.policy.presets import PRESETS
from decode_worker.policy.reuse.base import REUSES
from decode_worker.policy.settings import SEAL_TOKENS, PolicySettings
from decode_worker.retrieval.base import Retriever
from decode_worker.retrieval.view import StoredPack, View
from decode_worker.window.geometry import WindowGeometry

if TYPE_CHECKING:
    from decode_worker.calibration.profile import Profile
    from decode_worker.config import WorkerConfig
    from decode_worker.kernels.ends import Seen
    from decode_worker.model.config import ModelConfig
    from decode_worker.records import RecordFormat

SPARE_MARGIN = 1.25  # of what a head's misses have fetched on average


class TailFull(RuntimeError):
    """A new token has no place: its tail is full of tokens that no set covers yet. Seal, or wait for a fetch."""


class PackListener(Protocol):
    """Who keeps an index of the slots' packs: the kernels."""

    def extend(self, slot: int, pack: StoredPack) -> None: ...

    def clear(self, slot: int) -> None: ...


class Policy:
    """Slots, the sessions bound to them, and the state of their heads. Not thread-safe."""

    def __init__(self, settings: PolicySettings, retriever: Retriever, device: torch.device | str = "cpu") -> None:
        self.settings = settings
        self.retriever = retriever
        self.state = HeadState(settings, device)
        self._views: list[View | None] = [None] * settings.slots
        self._geometries: list[WindowGeometry | None] = [None] * settings.slots
        self._offsets = [0] * settings.slots
        self._listener: PackListener | None = None
        self.seen: Seen | None = None  # what the latest step has told, as long as nothing has changed it

    def tell(self, listener: PackListener) -> None:
        """From now on `listener` hears of every slot's packs."""
        self._listener = listener

    @property
    def counters(self) -> Counters:
        """As they are now."""
        if self.seen is not None:
            return self.seen.counters
        return Counters.of(self.state.counters.tolist())

    # --- binding ---

    def geometry(self, context: int, stored: int | None = None) -> WindowGeometry:
        """A session's window when `stored` tokens lie in packs at bind (default: the largest that can be)."""
        if stored is None:
            return self.settings.geometry(context, context)
        return self.settings.geometry(stored, context, self._spare(stored))

    def bind(
        self, slot: int, geometry: WindowGeometry, offset: int, packs: Sequence[StoredPack], position: int
    ) -> None:
        """Gives a free slot to a session. offset: byte offset of its part of the window; position: its next token's."""
        if self._views[slot] is not None:
            raise ValueError(f"slot {slot} is bound")
        stored = sum(pack.tokens for pack in packs)
        if not stored <= position <= geometry.resident_places:
            raise ValueError(f"position {position} lies outside [{stored} stored, {geometry.resident_places} declared]")
        self.seen = None
        self.state.bind(slot, geometry, offset, self.settings.limit(stored, position), position)
        self._views[slot] = View()
        self._geometries[slot] = geometry
        self._offsets[slot] = offset
        for pack in packs:
            self.extend(slot, pack)

    def set_epoch(self, slot: int, epoch: int) -> None:
        """The epoch that BindSlot returned; every run of the slot carries it."""
        self.state.epoch[slot] = epoch

    def windows(self, slot: int) -> NDArray[np.uint64]:
        """What BindSlot takes: uint64[layers, H, 2]."""
        return self._geometry(slot).windows(self._offsets[slot])

    def bind_tickets(self, slot: int, runs_max: int, pairs_max: int) -> Iterator[Ticket]:
        """What must be in the window before the first step."""
        cover = self.state.limit(slot, int(self.state.first_position[slot]))
        return bind_tickets(
            self.settings, self.view(slot), slot, int(self.state.epoch[slot]), cover,
            self._geometry(slot).first_tail, runs_max, pairs_max,
        )  # fmt: skip

    def unbind(self, slot: int) -> None:
        """Forgets everything of the slot. Call it before UnbindSlot returns the slot to others; idempotent."""
        self._views[slot] = None
        self._geometries[slot] = None
        self.seen = None
        self.state.reset(slot)
        if self._listener is not None:
            self._listener.clear(slot)

    def extend(self, slot: int, pack: StoredPack) -> None:
        """A pack more, as when a tail is sealed: N grows. Sets, labels and covers stay."""
        view = self.view(slot)
        view.extend(pack)
        self.state.stored[slot] = view.stored
        if self._listener is not None:
            self._listener.extend(slot, pack)

    def view(self, slot: int) -> View:
        """The slot's packs."""
        view = self._views[slot]
        if view is None:
            raise ValueError(f"slot {slot} is not bound")
        return view

    # --- between steps ---

    def wants_seal(self, slot: int, position: int) -> bool:
        """True when the oldest 256 tail tokens should become a pack."""
        return position - self.view(slot).stored >= SEAL_TOKENS + self.settings.recent

    def room(self, slot: int, position: int) -> int:
        """How many tokens from `position` on can be written before a tail is full; at most 0: none."""
        offloaded = torch.from_numpy(~self.settings.resident)
        if not offloaded.any():
            return self.settings.context - position
        cover = self.seen.covers.get(slot) if self.seen is not None else None
        if cover is None:
            cover = int(self.state.current_cover(slot).cpu()[offloaded].min())
        return min(cover, self.view(slot).stored) + self.settings.tail - position

    def selects(self, layer: int) -> bool:
        """Whether any head of the layer needs a query to select with; False: all of them hold every token."""
        return not self.settings.resident[layer].all()

    @property
    def compares_labels(self) -> bool:
        """Whether any head reuses its set as its label says."""
        return self.settings.reuse.by_label and not self.settings.resident.all()

    def labels(self, slot: int) -> torch.Tensor | None:
        """Of the slot's heads, float32[layers, H, g, d] in the host's memory; what resident heads have means nothing.
        None where no labels are compared, and if a head that selects has none that its next query is compared with."""
        if not self.compares_labels:
            return None
        selecting = torch.from_numpy(~self.settings.resident)
        labels, kinds = (each.cpu() for each in self.state.current_labels(slot))
        wanted = torch.tensor([[self.query_kind(layer)] for layer in range(self.settings.layers)])
        return labels if bool((kinds == wanted)[selecting].all()) else None

    def query_kind(self, layer: int) -> QueryKind:
        """Of the query that selects at this layer."""
        return QueryKind.SPECULATIVE if layer and self.settings.speculative else QueryKind.TRUE

    def _geometry(self, slot: int) -> WindowGeometry:
        geometry = self._geometries[slot]
        if geometry is None:
            raise ValueError(f"slot {slot} is not bound")
        return geometry

    def _spare(self, stored: int) -> NDArray[np.int32] | None:
        """Places beside the budget's: to the heads whose misses fetch little, as much as lets them keep their old set
        while the new one arrives. None as long as no head has missed.

        A head that has less must give its old set up first; what it spares, another one can use."""
        chosen, missing = self.state.chosen.sum(1).cpu().numpy(), self.state.missing.sum(1).cpu().numpy()
        offloaded = np.logical_not(self.settings.resident)
        if not chosen[offloaded].any() or self.settings.attended is not None or self.settings.unit > 1:
            return None
        budgeted = self.settings.budgeted(stored)
        pool = self.settings.spare(stored) * int(offloaded.sum())
        share = np.where(chosen > 0, missing / np.maximum(chosen, 1), 1.0)
        wanted = np.ceil(SPARE_MARGIN * share * budgeted).astype(np.int64)
        spare = np.zeros(offloaded.shape, np.int32)
        for at in np.argsort(wanted, axis=None, kind="stable"):
            layer, head = np.unravel_index(at, offloaded.shape)
            if offloaded[layer, head] and wanted[layer, head] <= min(pool, self.settings.spare_max(stored)):
                spare[layer, head] = wanted[layer, head]
                pool -= int(wanted[layer, head])
        return spare


def make_policy(
    config: WorkerConfig,
    model: ModelConfig,
    records: RecordFormat,
    profile: Profile,
    retriever: Retriever,
    device: torch.device | str = "cpu",
) -> Policy:
    """The policy that `config.policy` names, with the parts of it that `config` chooses otherwise."""
    preset = PRESETS[config.policy]
    resident = profile.resident_heads(
        records.own.record_bytes * config.context, config.resident_bytes, layer0=config.layer0 == "resident"
    )
    settings = PolicySettings(
        slots=config.slots,
        layers=model.layers,
        kv_heads=model.kv_heads,
        group=model.q_heads // model.kv_heads,
        head_dim=model.head_dim,
        record_bytes=records.record_bytes,
        own_bytes=records.own.record_bytes,
        context=config.context,
        tau=profile.thresholds(),
        weights=profile.query_weights(),
        resident=np.ones_like(resident) if preset.resident else resident,
        reuse=REUSES[config.reuse or preset.reuse],
        cache=CACHES[config.cache or preset.cache],
        attended=preset.attended,
        unit=preset.unit,
        budget=config.budget,
        sink=config.sink,
        recent=config.recent,
        tail=config.tail_places,
        slack=config.slack,
        cos_floor=config.cos_floor,
        speculative=config.query == "speculative",
    )
    return Policy(settings, retriever, device)
