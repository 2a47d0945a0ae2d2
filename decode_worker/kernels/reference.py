"""`reference`: every kernel in plain torch and Python, one head after the other, as docs/qsac.md reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from decode_worker import _native
from decode_worker.kernels.base import Kernels, RecordKind, Rows, StepContext
from decode_worker.kernels.ends import HostEnds
from decode_worker.kernels.products.base import Products
from decode_worker.policy.attended import attended_places, first_tail
from decode_worker.policy.cache.base import Stamp
from decode_worker.policy.counters import Counters
from decode_worker.policy.plan import QueryKind, Ticket, gather_runs
from decode_worker.quantised import restored
from decode_worker.retrieval.view import StoredPack, View

COUNTER = {name: place for place, name in enumerate(Counters.NAMES)}
STORAGE = {1: torch.float32, 2: torch.bfloat16, 3: torch.float16}
QUANTISED = {_native.DTYPE_INT8: 8, _native.DTYPE_INT4: 4}  # bits


@dataclass(frozen=True)
class Wish:
    """One head's change, waiting for its records."""

    slot: int
    head: int
    has_old_set: bool
    pairs: NDArray[np.uint32]


class ReferenceKernels(Kernels):
    def __init__(self, context: StepContext) -> None:
        super().__init__(context)
        settings = context.settings
        self._views = [View() for _ in range(settings.slots)]
        self._waiting: list[list[Wish]] = [[] for _ in range(settings.layers)]
        self._posted = [0] * settings.layers
        # (layer, slot, head) -> its latest generation, the position that asked for it, and the latest that hinted
        self._marks: dict[tuple[int, int, int], tuple[int, int, int]] = {}

    def close(self) -> None:
        del self.context

    def extend(self, slot: int, pack: StoredPack) -> None:
        self._views[slot].extend(pack)

    def clear(self, slot: int) -> None:
        self._views[slot] = View()

    def ends(self, products: Products) -> HostEnds:
        return HostEnds(self, products)

    def begin(self, rows: Rows, step: int) -> None:
        self._rows = [
            (int(s), int(p)) for s, p in zip(rows.slot[: rows.count], rows.position[: rows.count], strict=True)
        ]
        self._number = step
        self._hints_left = self.context.hinted_records_max
        for slot, _ in self._rows:
            if slot >= 0:
                self.context.state.fault[slot] = 0

    # --- look_up ---

    def look_up(self, layer: int, query: torch.Tensor, kind: QueryKind) -> None:
        ticket = self.plan(layer, query, kind)
        if ticket is None or self.context.ring is None:
            return
        try:
            self._posted[layer] = self.context.ring.post(
                ticket.op, self._number & 0xFFFFFFFF, layer, ticket.runs, ticket.pairs, self.context.wait_us
            )
        except BaseException:
            self.commit(layer, None)
            raise

    def plan(self, layer: int, query: torch.Tensor, kind: QueryKind) -> Ticket | None:
        shape = self.context.state.shape
        grouped = query.reshape(-1, shape.heads, shape.group, shape.head_dim)
        wishes = []
        for row, (slot, position) in enumerate(self._rows):
            for head in range(shape.heads):
                if slot < 0 or self.context.state.fault[slot] or self.context.state.resident[layer, head]:
                    continue
                if self._misses(layer, slot, head, position, grouped[row, head], kind):
                    wishes.append(self._choose(layer, slot, head, position, grouped[row, head], kind))
        self._waiting[layer] = [wish for wish in wishes if len(wish.pairs)]
        for wish in wishes:
            if not len(wish.pairs):
                self._flip(layer, wish)
        if not self._waiting[layer]:
            return None
        waiting, state = self._waiting[layer], self.context.state
        runs, pairs = gather_runs(
            [w.slot for w in waiting],
            [int(state.epoch[w.slot]) for w in waiting],
            [int(state.issued[layer, w.slot, w.head]) for w in waiting],
            [w.head for w in waiting],
            [w.pairs for w in waiting],
        )
        return Ticket(_native.OP_GATHER, layer, runs, pairs)

    # --- look_ahead ---

    def look_ahead(self, layer: int, query: torch.Tensor) -> None:
        ticket, ring = self.plan_ahead(layer, query), self.context.ring
        if ticket is None or ring is None:
            return
        self._count("hinted", len(ticket.pairs))
        if not ring.has_room_for_hint():
            self._count("hints_dropped", len(ticket.pairs))
            return
        ring.post(ticket.op, self._number & 0xFFFFFFFF, layer, ticket.runs, ticket.pairs, 0)

    def plan_ahead(self, layer: int, query: torch.Tensor) -> Ticket | None:
        state, shape = self.context.state, self.context.state.shape
        grouped = query.reshape(-1, shape.heads, shape.group, shape.head_dim)
        found = []
        for row, (slot, position) in enumerate(self._rows):
            limit = state.limit(slot, position) if slot >= 0 else 0
            for head in range(shape.heads):
                if limit <= shape.sink or state.fault[slot] or state.resident[layer, head] or self._hints_left <= 0:
                    continue
                if self._expects_miss(layer, slot, head, position, grouped[row, head]):
                    lacking = self._lacking(layer, slot, head, limit, grouped[row, head])
                    if len(lacking):
                        found.append(
                            (slot, int(state.epoch[slot]), int(state.issued[layer, slot, head]), head, lacking)
                        )
        if not found:
            return None
        slots, epochs, generations, heads, pairs = zip(*found, strict=True)
        return Ticket(_native.OP_PROMOTE, layer, *gather_runs(slots, epochs, generations, heads, pairs))

    def _expects_miss(self, layer: int, slot: int, head: int, position: int, query: torch.Tensor) -> bool:
        state, settings, steps = self.context.state, self.context.settings, self.context.lookahead.steps
        at, lane, issued = state.side(layer, slot, head), (layer, slot, head), int(state.issued[layer, slot, head])
        if self._marks.get(lane, (0,))[0] != issued:
            self._marks[lane] = (issued, position, -1)
        generation, asked, hinted = self._marks.get(lane, (0, 0, -1))
        if state.label_kind[at] == QueryKind.NONE or state.generation[at] != generation:
            return False
        if not settings.reuse.by_label:
            return steps == 0
        if hinted >= 0 and position - hinted < steps:
            return False
        cover, then = int(state.cover[at]), position + steps
        forced = then - cover >= int(state.forced_from[layer, head]) and state.limit(slot, then) > cover
        similar = similarity(query, state.label[at], state.weights[layer, head], settings.cos_floor)
        falling = (1 - similar) * steps / max(1, position - asked)
        if not forced and similar - falling > float(state.tau[layer, head]):
            return False
        self._marks[lane] = (generation, asked, position)
        return True

    def _lacking(self, layer: int, slot: int, head: int, limit: int, query: torch.Tensor) -> NDArray[np.uint32]:
        """Pairs [n, 2] of the records that a miss would fetch, as far as the step's budget goes; all to place 0."""
        state, settings, shape = self.context.state, self.context.settings, self.context.state.shape
        at = state.side(layer, slot, head)
        held = set() if settings.cache.whole else set(state.held[at][: int(state.held_count[at])].tolist())
        units = [unit for unit in self._select(layer, slot, head, limit, query) if unit not in held]
        units = units[: -(-self._hints_left // shape.unit)]
        self._hints_left -= len(units) * shape.unit
        records = [(unit * shape.unit + r, 0) for unit in units for r in range(shape.unit)]
        return np.array(records, np.uint32).reshape(-1, 2)

    def _misses(self, layer: int, slot: int, head: int, position: int, query: torch.Tensor, kind: QueryKind) -> bool:
        state, settings = self.context.state, self.context.settings
        at = state.side(layer, slot, head)
        comparable = settings.reuse.by_label and int(state.label_kind[at]) == kind
        near = comparable and similarity(
            query, state.label[at], state.weights[layer, head], settings.cos_floor
        ) > float(state.tau[layer, head])
        cover = int(state.cover[at])
        forced = position - cover >= int(state.forced_from[layer, head]) and state.limit(slot, position) > cover
        hit = near and not forced
        if position != int(state.first_position[slot]):
            self._count("lookups", 1)
            self._count("hits", hit)
            self._count("forced", forced)
        return not hit

    def _choose(self, layer: int, slot: int, head: int, position: int, query: torch.Tensor, kind: QueryKind) -> Wish:
        state, cache = self.context.state, self.context.settings.cache
        shape, now = state.shape, state.side(layer, slot, head)
        then = (1 - now[0], *now[1:])
        limit = state.limit(slot, position)
        wanted = self._select(layer, slot, head, limit, query)

        n = int(state.held_count[now])
        held = dict(zip(state.held[now][:n].tolist(), state.held_places[now][:n].tolist(), strict=True))
        in_use = {int(p) - (int(p) - shape.sink) % shape.unit for p in state.places[now][: int(state.count[now])]}
        every = [shape.sink + i * shape.unit for i in range(int(state.capacity[layer, slot, head]))]
        kept = {} if cache.whole else {unit: held[unit] for unit in wanted if unit in held}
        missing = [unit for unit in wanted if unit not in kept]
        has_old_set = state.has_label(layer, slot, head)

        free = [p for p in every if p not in held.values()]
        spare = {u: p for u, p in held.items() if p not in in_use and u not in kept} if cache.keeps else {}
        clears = len(missing) > len(free) + len(spare)
        if clears:
            state.count[now] = state.label_kind[now] = 0
            state.label[now] = 0
            has_old_set = False
            self._count("cleared", 1)
            others = {u: p for u, p in held.items() if u not in kept}
            if cache.keeps:
                spare = others
            else:
                held = {}
                state.held_count[now] = 0
                free = [p for p in every if p not in kept.values()]
        if len(missing) > len(free):
            stamp = state.stamp[layer, slot, head]
            by_age = sorted(spare, key=lambda u: (int(stamp[(spare[u] - shape.sink) // shape.unit]), spare[u]))
            for unit in by_age[: len(missing) - len(free)]:
                free.append(held.pop(unit))
            self._write_held(now, held)
        places = {**kept, **dict(zip(missing, sorted(free), strict=False))}

        for unit in wanted if cache.keeps else ():
            self._touch(layer, slot, head, (places[unit] - shape.sink) // shape.unit, unit in missing)
        self._write_held(then, {**(held if cache.keeps else {}), **places})
        tokens = self._views[slot].tokens_of(layer, head)
        attended = [
            places[unit] + r
            for unit in wanted
            for r in range(shape.unit)
            if shape.sink <= tokens[unit * shape.unit + r] < limit
        ]
        state.places[then][: len(attended)] = torch.tensor(attended, dtype=torch.int32)
        state.count[then] = len(attended)
        pairs = [(unit * shape.unit + r, places[unit] + r) for unit in missing for r in range(shape.unit)]
        sinks = min(shape.sink, limit)
        lacking = (tokens >= int(state.cover[now])) & (tokens < sinks)
        pairs += [(int(record), int(tokens[record])) for record in np.flatnonzero(lacking)]
        state.label[then] = query
        state.label_kind[then] = kind
        state.cover[then] = limit
        state.issued[layer, slot, head] += 1
        state.generation[then] = state.issued[layer, slot, head]
        state.chosen[layer, slot, head] += len(wanted)
        state.missing[layer, slot, head] += len(missing)
        return Wish(slot, head, has_old_set, np.array(sorted(pairs), np.uint32).reshape(-1, 2))

    def _select(self, layer: int, slot: int, head: int, limit: int, query: torch.Tensor) -> list[int]:
        shape, k = self.context.state.shape, int(self.context.state.selected[layer, slot, head])
        if limit <= shape.sink:
            return []
        view = self._views[slot]
        return self.context.retriever.select(
            layer, head, view, query.numpy(), shape.sink, limit, k, shape.unit
        ).tolist()

    def _touch(self, layer: int, slot: int, head: int, unit_place: int, arrives: bool) -> None:
        stamp = self.context.state.stamp[layer, slot, head]
        rule = self.context.settings.cache.stamp
        if rule == Stamp.COUNT:
            stamp[unit_place] = 1 if arrives else stamp[unit_place] + 1
        elif arrives or rule == Stamp.STEP:
            stamp[unit_place] = self._number

    def _write_held(self, side: tuple[int, int, int, int], held: dict[int, int]) -> None:
        state = self.context.state
        for i, unit in enumerate(sorted(held)):
            state.held[side][i], state.held_places[side][i] = unit, held[unit]
        state.held_count[side] = len(held)

    # --- arrive ---

    def await_ticket(self, layer: int) -> None:
        if seq := self._posted[layer]:
            assert self.context.ring is not None
            statuses = self.context.ring.wait(seq, self.context.wait_us)
            self._posted[layer] = 0
            self.commit(layer, statuses)

    def commit(self, layer: int, statuses: NDArray[np.uint32] | None) -> None:
        waiting, self._waiting[layer] = self._waiting[layer], []
        for i, wish in enumerate(waiting):
            if statuses is not None and statuses[i, 0] == _native.STATUS_OK:
                self._flip(layer, wish)
                self._count("records_moved", len(wish.pairs))
                continue
            self._count("errors", statuses is not None)
            aux = 0 if statuses is None else int(statuses[i, 1])
            goes_on = wish.has_old_set and not self.context.stale_fails and aux != _native.FAULT_DATA_LOSS
            self._count("stale", goes_on)
            if not goes_on:
                self._fail(wish.slot, _native.FAULT_NOT_POSTED if statuses is None else aux or _unnamed(statuses[i, 0]))

    def arrive(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.await_ticket(layer)
        self.append(layer, key, value)

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        state = self.context.state
        for row, (slot, position) in enumerate(self._rows):
            for head in range(state.shape.heads if slot >= 0 else 0):
                cover = int(state.cover[state.side(layer, slot, head)])
                if not state.resident[layer, head] and position - cover >= state.shape.tail:
                    self._fail(slot, _native.FAULT_TAIL_FULL)
                    break
                place = position if state.resident[layer, head] else position % state.shape.tail
                record = torch.cat((key[row, head], value[row, head])).to(STORAGE[self.context.dtype])
                raw = record.view(torch.uint8).numpy()
                self._own(layer, slot, head)[place, : len(raw)] = raw

    def settle(self, timeout_us: int) -> None:
        for layer, seq in enumerate(self._posted):
            if not seq:
                continue
            assert self.context.ring is not None
            try:
                statuses: NDArray[np.uint32] | None = self.context.ring.wait(seq, timeout_us)
            except _native.RingError:
                statuses = None
            self._posted[layer] = 0
            self.commit(layer, statuses)

    # --- attend ---

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        state = self.context.state
        group = state.shape.group
        for row, (slot, position) in enumerate(self._rows):
            for head in range(state.shape.heads):
                mine = slice(head * group, (head + 1) * group)
                out[row, mine], lse[row, mine] = 0, -torch.inf
                if slot < 0:
                    continue
                keys, values = self._attended(layer, slot, head, position)
                scores = self.context.scale * query[row, mine].double() @ keys.T
                if len(keys):
                    lse[row, mine] = scores.logsumexp(1).float()
                    out[row, mine] = (scores.softmax(1) @ values).float()

    def _attended(self, layer: int, slot: int, head: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K, V float64 [n, d] of `attended_places`: the worker's own records, then those of packs."""
        state, (own, *_, stored) = self.context.state, [*self.context.kinds, self.context.kinds[-1]]
        d, places = state.shape.head_dim, attended_places(state, layer, slot, head, position).numpy()
        if state.resident[layer, head]:
            written, from_packs = places, places[:0]
        else:
            first = first_tail(state, layer, slot, head)
            in_tail = places >= first
            written, from_packs = places[in_tail] - first, places[~in_tail]
        halves = [
            _vectors(self._own(layer, slot, head)[written], own, d),
            _vectors(self._lane(int(state.base[layer, slot, head]), stored)[from_packs], stored, d),
        ]
        keys, values = (torch.cat(each) for each in zip(*halves, strict=True))
        return keys, values

    def _own(self, layer: int, slot: int, head: int) -> NDArray[np.uint8]:
        """From the first record that the worker writes for a head on, uint8[n, record_bytes]."""
        return self._lane(int(self.context.state.own[layer, slot, head]), self.context.kinds[0])

    def _lane(self, first: int, kind: RecordKind) -> NDArray[np.uint8]:
        """The window from byte `first` on as records."""
        size, window = kind.record_bytes, self.context.window.numpy()[first:]
        return window[: len(window) // size * size].reshape(-1, size)

    def _flip(self, layer: int, wish: Wish) -> None:
        self.context.state.parity[layer, wish.slot, wish.head] ^= 1

    def _fail(self, slot: int, fault: int) -> None:
        """The gravest fault of a row is kept: a lost block before any other."""
        if not self.context.state.fault[slot] or fault == _native.FAULT_DATA_LOSS:
            self.context.state.fault[slot] = fault

    def _count(self, name: str, more: int) -> None:
        self.context.state.counters[COUNTER[name]] += int(more)


def _vectors(records: NDArray[np.uint8], kind: RecordKind, d: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K, V float64 [n, d]."""
    if not len(records):
        return torch.zeros(0, d, dtype=torch.float64), torch.zeros(0, d, dtype=torch.float64)
    raw = torch.from_numpy(records.copy())
    if kind.dtype in STORAGE:
        pair = raw.view(STORAGE[kind.dtype]).double()
        return pair[:, :d], pair[:, d : 2 * d]
    bits = QUANTISED[kind.dtype]
    half = d * bits // 8
    return restored(raw[:, :half], bits).double(), restored(raw[:, half : 2 * half], bits).double()


def _unnamed(status: int) -> int:
    return _native.FAULT_ABORTED if status == _native.STATUS_STALE else _native.FAULT_INTERNAL


def similarity(query: torch.Tensor, label: torch.Tensor, weights: torch.Tensor, cos_floor: float) -> float:
    """docs/qsac.md step 3 for one KV head: query, label [g, d], weights [g]; NaN where a norm is zero."""
    q, k, w = query.double(), label.double(), weights.double()
    norms = (q.square().sum(1) * k.square().sum(1)).sqrt()
    if not (norms > 0).all():
        return float("nan")
    cosines = (q * k).sum(1) / norms
    if cosines.min() <= cos_floor or not w.sum() > 0:
        return float(cosines.min())
    return float(w.sum() / (w / cosines).sum())
