"""`qsac` (LiteCache §4): a head keeps its set while its query stays similar to the one that selected it.

On a miss only the records that the window does not hold travel (docs/qsac.md, State and steps 1-5).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from decode_worker import _native
from decode_worker.policy.base import Policy
from decode_worker.policy.binding import by_record, sink_pairs
from decode_worker.policy.plan import Delta, Plan, QueryKind, Status, Ticket, gather_runs, split_gather
from decode_worker.policy.settings import PolicySettings
from decode_worker.retrieval.base import Retriever


class QsacPolicy(Policy):
    name: ClassVar[str] = "qsac"

    def __init__(self, settings: PolicySettings, retriever: Retriever) -> None:
        super().__init__(settings, retriever)
        self._open_plans: list[list[Plan]] = [[] for _ in range(settings.layers)]

    def unbind(self, slot: int) -> None:
        super().unbind(slot)
        for plans in self._open_plans:
            for delta in [d for plan in plans for d in plan.deltas if d.slot == slot]:
                delta.open = False
            plans[:] = [plan for plan in plans if any(d.open for d in plan.deltas)]

    def plan(self, layer: int, query: NDArray[np.float32], true_query: bool | None = None) -> Plan | None:
        if self._new_step:
            self.counters.steps += 1
            self._new_step = False
        if not self._has_offloaded[layer]:
            return None
        settings = self.settings
        grouped = np.ascontiguousarray(query, np.float32).reshape(
            len(self._slots), settings.kv_heads, settings.group, settings.head_dim
        )
        kind = self._kind(layer, true_query)
        hit = self._look_up(layer, grouped, kind)
        if hit.all():
            return None
        return self._post(layer, grouped, kind, hit)

    def settle(self, layer: int, statuses: NDArray[np.uint32] | None, plan: Plan | None = None) -> bool:
        plans = self._open_plans[layer]
        settled = plan if plan is not None else plans[-1] if plans else None
        if settled is None:
            return True
        if statuses is not None and len(statuses) != len(settled.deltas):
            raise ValueError(f"{len(statuses)} statuses for {len(settled.deltas)} runs of layer {layer}")
        usable = True
        for i, delta in enumerate(settled.deltas):
            status = None if statuses is None else int(statuses[i, 0])
            usable &= self._settle_head(layer, delta, status)
        if settled in plans and not any(delta.open for delta in settled.deltas):
            plans.remove(settled)
        return usable

    def first_sets(
        self, slot: int, queries: Sequence[NDArray[np.float32]], runs_max: int, pairs_max: int
    ) -> list[Ticket]:
        settings = self.settings
        self.begin_step([slot], [int(self._first_position[slot])])
        tickets: list[Ticket] = []
        for layer, query in enumerate(queries):
            if not self._has_offloaded[layer]:
                continue
            shape = (1, settings.kv_heads, settings.group, settings.head_dim)
            grouped = np.ascontiguousarray(query, np.float32).reshape(shape)
            kind = QueryKind.TRUE if layer == 0 else QueryKind.SPECULATIVE
            plan = self._post(layer, grouped, kind, ~self._offloaded[layer][None])
            if plan is not None:
                tickets += split_gather(layer, plan.runs, plan.pairs, runs_max, pairs_max)
        return tickets

    def commit_first_sets(self, slot: int) -> None:
        for layer, plans in enumerate(self._open_plans):
            for plan in [p for p in plans if p.deltas[0].slot == slot]:
                self.settle(layer, np.full((len(plan.deltas), 2), int(Status.OK), np.uint32), plan)

    # --- steps 3 and 4: hit or miss ---

    def _kind(self, layer: int, true_query: bool | None) -> QueryKind:
        if true_query is None:
            true_query = layer == 0 or not self.settings.speculative
        return QueryKind.TRUE if true_query else QueryKind.SPECULATIVE

    def _similar(self, layer: int, query: NDArray[np.float32], kind: QueryKind) -> NDArray[np.bool_]:
        """bool[B, H]. A head without a label has a zero one, whose similarity is NaN."""
        state, settings = self._state, self.settings
        similarity = _native.similarity(
            query, state.label[layer][self._rows], settings.weights[layer], settings.cos_floor
        )
        comparable = state.label_kind[layer][self._rows] == kind
        return (similarity > settings.tau[layer]) & comparable

    def _look_up(self, layer: int, query: NDArray[np.float32], kind: QueryKind) -> NDArray[np.bool_]:
        similar = self._similar(layer, query, kind)
        forced = self._positions - self._state.cover[layer][self._rows] >= self._state.forced_from[layer]
        hit: NDArray[np.bool_] = similar & ~forced
        offloaded = self._offloaded[layer]
        if self._counted.all():
            hits, forcings, rows = hit, forced, len(hit)
        else:
            hits, forcings, rows = hit[self._counted], forced[self._counted], int(self._counted.sum())
        self.counters.lookups += rows * int(np.count_nonzero(offloaded))
        self.counters.hits += int(np.count_nonzero(hits & offloaded))
        self.counters.forced += int(np.count_nonzero(forcings & offloaded))
        return hit | ~offloaded

    # --- step 5: a miss selects, and what is missing is fetched ---

    def _post(self, layer: int, query: NDArray[np.float32], kind: QueryKind, hit: NDArray[np.bool_]) -> Plan | None:
        deltas: list[Delta] = []
        for row, slot in enumerate(self._slots):
            heads = self._may_fetch(layer, slot, np.flatnonzero(~hit[row]).tolist())
            if heads:
                deltas += self._select(layer, slot, int(self._positions[row, 0]), query[row], kind, heads)
        if not deltas:
            return None
        runs, pairs = gather_runs(
            [d.slot for d in deltas],
            [self._epochs[d.slot] for d in deltas],
            [d.generation for d in deltas],
            [d.head for d in deltas],
            [d.pairs for d in deltas],
        )
        plan = Plan(layer, hit, runs, pairs, deltas)
        self._open_plans[layer].append(plan)
        return plan

    def _may_fetch(self, layer: int, slot: int, heads: list[int]) -> list[int]:
        """A head with an unresolved run posts no other."""
        waiting = [h for h in heads if self._state.open[layer, slot, h]]
        self.counters.stale += len(waiting)
        return [h for h in heads if h not in waiting]

    def _select(
        self, layer: int, slot: int, position: int, query: NDArray[np.float32], kind: QueryKind, heads: list[int]
    ) -> list[Delta]:
        """Selects for the heads of one slot; those that hold all of it already commit at once."""
        settings, view, geometry = self.settings, self._view(slot), self._geometries[slot]
        assert geometry is not None
        limit = settings.limit(view.stored, position)
        k = min(geometry.k, limit - settings.sink)
        if k > 0:
            selected = self.retriever.select(layer, view, query, limit, settings.sink, k, heads)
        else:
            selected = [np.empty(0, np.int32)] * len(heads)
        deltas = []
        for head, records in zip(heads, selected, strict=True):
            delta = self._delta(layer, slot, head, records, query[head], kind, limit)
            if len(delta.pairs):
                self._state.reserve(layer, delta)
                deltas.append(delta)
            else:
                self._state.commit(layer, delta)
        return deltas

    def _delta(
        self,
        layer: int,
        slot: int,
        head: int,
        wanted: NDArray[np.int32],
        label: NDArray[np.float32],
        kind: QueryKind,
        cover: int,
    ) -> Delta:
        state = self._state
        held, held_places = state.held(layer, slot, head)
        has_old_set = state.label_kind[layer, slot, head] != QueryKind.NONE
        free = state.free_places(layer, slot, head)
        places, pairs, used = _native.delta(wanted, held, held_places, free)
        if used < 0:
            # Not enough slack: the old set is given up first, so that a failure cannot leave half of each. Records
            # that both sets share keep their places and need not travel.
            kept = np.isin(held, wanted, kind="table")
            held, held_places, dropped = held[kept], held_places[kept], held_places[~kept]
            state.clear(layer, slot, head)
            has_old_set = False
            self.counters.cleared += 1
            places, pairs, used = _native.delta(wanted, held, held_places, np.concatenate([free, dropped]))
            assert used >= 0, "k places hold any set"
        # A session that was bound with fewer stored tokens than sinks has them only in its tail so far.
        sinks, old_cover = min(self.settings.sink, cover), int(state.cover[layer, slot, head])
        if old_cover < sinks:
            pairs = by_record(np.concatenate([pairs, sink_pairs(self._view(slot), layer, head, sinks)]))
        state.issued[layer, slot, head] += 1
        return Delta(
            slot=slot,
            head=head,
            records=wanted,
            places=places,
            label=label.copy(),
            kind=kind,
            cover=cover,
            generation=int(state.issued[layer, slot, head]),
            pairs=pairs,
            has_old_set=bool(has_old_set),
        )

    # --- commit, or keep what was ---

    def _settle_head(self, layer: int, delta: Delta, status: int | None) -> bool:
        """status None: the run was never posted, so nothing was written."""
        if not delta.open:
            return True
        if status == Status.OK:
            self._state.commit(layer, delta)
            self.counters.records_moved += len(delta.pairs)
            delta.open = False
            return True
        if status != Status.PENDING:
            self._state.release(layer, delta)
            self.counters.errors += status is not None
            delta.open = False
        self.counters.stale += delta.has_old_set
        return delta.has_old_set
