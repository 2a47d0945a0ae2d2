"""A store that is a few arrays: it copies records by pairs, as told, and may fail, dawdle and reorder.

A record is 64 bytes: (layer, head, token) and padding, so that a test can read off a window which token lies where.
"""

from dataclasses import dataclass

import numpy as np

from decode_worker.policy.base import Policy
from decode_worker.policy.plan import Op, Plan, Ticket
from decode_worker.policy.settings import SEAL_TOKENS, PolicySettings
from decode_worker.retrieval.base import Retriever
from decode_worker.retrieval.index import PackIndex

RECORD_BYTES = 64
OK, ERROR = 1, 3


@dataclass(frozen=True)
class Pack:
    first_token: int
    tokens: int
    order: np.ndarray  # uint16[layers, H, tokens]
    index: PackIndex


class RandomRetriever(Retriever):
    """Selects at random among the tokens it may; everything when k allows."""

    name = "random"
    parameters = bytes(32)

    def __init__(self, rng):
        self._rng = rng

    def build(self, layer, keys, order):
        return np.zeros((keys.shape[1], len(keys), 0), np.float32)

    def select(self, layer, view, query, limit, sink, k, heads):
        found = []
        for head in heads:
            records, _ = view.records_of(layer, head, sink, limit)
            found.append(np.sort(self._rng.permutation(records)[:k]).astype(np.int32))
        return found


def settings(**changes) -> PolicySettings:
    """Three layers (layer 0 resident), two KV heads of two queries, a short tail."""
    layers, heads, group = changes.get("layers", 3), changes.get("kv_heads", 2), changes.get("group", 2)
    resident = np.zeros((layers, heads), bool)
    resident[0] = True
    values = {
        "slots": 2, "layers": layers, "kv_heads": heads, "group": group, "head_dim": 8, "record_bytes": RECORD_BYTES,
        "context": 2048, "tau": np.full((layers, heads), 0.8, np.float32),
        "weights": np.ones((layers, heads, group), np.float32), "resident": resident, "budget": 40, "recent": 16,
        "tail": 16 + SEAL_TOKENS + 32,
    }  # fmt: skip
    return PolicySettings(**{**values, **changes})


class Bench:
    """A policy, its window and the pretend store behind it."""

    def __init__(self, policy: Policy, rng: np.random.Generator) -> None:
        self.policy, self.rng, self.settings = policy, rng, policy.settings
        context = self.settings.context
        self.slot_bytes = policy.geometry(context).slot_bytes
        self.window = np.full(self.settings.slots * self.slot_bytes, 255, np.uint8)
        self.packs: dict[int, list[Pack]] = {}
        self.positions: dict[int, int] = {}
        self.k: dict[int, int] = {}
        self.late: list[tuple[Plan, np.ndarray, int]] = []  # served but for these runs
        self.fetched: list[list[int]] = []  # records of each run of the latest step

    # --- sessions ---

    def pack(self, first: int, tokens: int, keys: np.ndarray | None = None, order: np.ndarray | None = None) -> Pack:
        """keys: [layers, tokens, H, d]."""
        s = self.settings
        if order is None:
            order = np.array([[self.rng.permutation(tokens) for _ in range(s.kv_heads)] for _ in range(s.layers)])
        order = order.astype(np.uint16)
        if keys is None:
            keys = np.zeros((s.layers, tokens, s.kv_heads, s.head_dim), np.float32)
        retriever = self.policy.retriever
        index = retriever.assemble([retriever.build(layer, keys[layer], order[layer]) for layer in range(s.layers)])
        return Pack(first, tokens, order, index)

    def bind(self, slot: int, stored: int, position: int, packs: list[Pack] | None = None) -> None:
        if packs is None:
            packs = [self.pack(first, SEAL_TOKENS) for first in range(0, stored, SEAL_TOKENS)]
        geometry = self.policy.geometry(self.settings.context, stored)
        self.policy.bind(slot, geometry, slot * self.slot_bytes, packs, position)
        self.policy.set_epoch(slot, 7 + slot)
        self.k[slot] = geometry.k
        self.packs[slot], self.positions[slot] = packs, position
        for ticket in self.policy.bind_tickets(slot, runs_max=3, pairs_max=50):
            assert len(ticket.runs) <= 3
            assert len(ticket.pairs) <= 50
            self.copy(ticket)
        for token in range(stored, position):  # a prompt's rest
            self.policy.begin_step([slot], [token])
            for layer in range(self.settings.layers):
                self.write(layer, [slot], [token])

    def unbind(self, slot: int) -> None:
        self.policy.unbind(slot)
        del self.packs[slot], self.positions[slot]
        self.window[slot * self.slot_bytes : (slot + 1) * self.slot_bytes] = 255

    def seal(self, slot: int) -> None:
        pack = self.pack(sum(p.tokens for p in self.packs[slot]), SEAL_TOKENS)
        self.packs[slot].append(pack)
        self.policy.extend(slot, pack)

    # --- the store ---

    def copy(self, ticket: Plan | Ticket, run: int | None = None, half: bool = False) -> None:
        """Copies the records of one run, or of all; `half` of them if it shall fail midway."""
        op = getattr(ticket, "op", Op.GATHER)
        for r in ticket.runs if run is None else ticket.runs[run : run + 1]:
            slot, head, first, count = (int(r[name]) for name in ("slot", "lane", "first_pair", "pair_count"))
            assert r["slot_epoch"] == 7 + slot
            if op == Op.RANGE:
                pairs = [(first + i, int(r["arg"]) + i) for i in range(count)]
            else:
                pairs = ticket.pairs[first : first + count].tolist()
                assert pairs == sorted(pairs), "pairs are sorted by record"
            for record, place in pairs[: len(pairs) // 2] if half else pairs:
                pack = next(p for p in self.packs[slot] if p.first_token <= record < p.first_token + p.tokens)
                token = pack.first_token + int(pack.order[ticket.layer, head, record - pack.first_token])
                self._lane(ticket.layer, slot, head)[place, :3] = (ticket.layer, head, token)

    def write(self, layer: int, slots: list[int], positions: list[int]) -> None:
        """The new token of each head."""
        places = self.policy.write_places(layer)
        for row, slot in enumerate(slots):
            for head in range(self.settings.kv_heads):
                self._lane(layer, slot, head)[places[row, head], :3] = (layer, head, positions[row])

    def _lane(self, layer: int, slot: int, head: int) -> np.ndarray:
        windows = self.policy.windows(slot)
        offset, places = (int(x) for x in windows[layer, head])
        return self.window[offset : offset + places * RECORD_BYTES].view(np.int64).reshape(places, -1)

    # --- steps ---

    def step(self, query: np.ndarray | None = None, failing: float = 0.0, late: float = 0.0) -> None:
        """One step of every bound slot; shares of the runs fail, or end a step later. query: [layers, B, Hq, d]."""
        self.settle_late_runs()
        slots = sorted(self.positions)
        positions = [self.positions[s] for s in slots]
        self.policy.begin_step(slots, positions)
        self.fetched = []
        for layer in range(self.settings.layers):
            q = self.queries(len(slots)) if query is None else query[layer]
            while (plan := self.policy.plan(layer, q)) is not None:
                self.check_no_live_place_is_named(plan)
                if self.policy.settle(layer, self.serve(plan, failing, late)):
                    break
            self.write(layer, slots, positions)
            for row in range(len(slots)):
                self.check(layer, row, positions[row])
        for slot in slots:
            self.positions[slot] += 1
            if self.policy.wants_seal(slot, self.positions[slot]):
                self.seal(slot)

    def queries(self, batch: int) -> np.ndarray:
        s = self.settings
        return self.rng.standard_normal((batch, s.kv_heads * s.group, s.head_dim), dtype=np.float32)

    def serve(self, plan: Plan, failing: float, late: float) -> np.ndarray:
        """Copies runs in random order; a failing one stops midway, a late one is copied before the next step."""
        statuses = np.zeros((len(plan.runs), 2), np.uint32)
        for run in self.rng.permutation(len(plan.runs)):
            if plan.deltas[run].has_old_set and self.rng.random() < late:
                self.late.append((plan, statuses, run))
                continue
            fails = self.rng.random() < failing
            self.copy(plan, run, half=fails)
            statuses[run, 0] = ERROR if fails else OK
            first, count = int(plan.runs["first_pair"][run]), int(plan.runs["pair_count"][run])
            self.fetched.append(plan.pairs[first : first + count, 0].tolist())
        return statuses

    def settle_late_runs(self) -> None:
        for plan, statuses, run in self.late:
            self.copy(plan, run)
            statuses[run, 0] = OK
            self.policy.settle(plan.layer, statuses, plan)
        self.late = []

    def attended(self, layer: int, row: int, head: int) -> list[int]:
        """Tokens that a head's attention reads, from the window itself; each must be that layer's and head's."""
        ranges, places, counts = self.policy.segments(layer)
        first = int(self.policy.base(layer)[row, head])
        held = [np.arange(at, at + n) for at, n in ranges[row, head]]
        held.append(places[row, head, : counts[row, head]])
        rows = self.window[first : first + (len(self.window) - first) // 64 * 64].view(np.int64).reshape(-1, 8)
        found = rows[np.concatenate(held).astype(np.int64), :3]
        assert (found[:, :2] == (layer, head)).all(), "a place holds another head's record, or nothing"
        return found[:, 2].tolist()

    def check(self, layer: int, row: int, position: int) -> None:
        """No token twice, none from the future; sinks and recent tokens always; everything if k allows."""
        s = self.settings
        slot = sorted(self.positions)[row]
        all_fit = self.k[slot] >= sum(p.tokens for p in self.packs[slot]) - s.sink
        for head in range(s.kv_heads):
            tokens = self.attended(layer, row, head)
            assert len(set(tokens)) == len(tokens), f"token twice in layer {layer} head {head}"
            assert max(tokens) == position
            assert set(range(min(s.sink, position + 1))) <= set(tokens)
            assert set(range(max(0, position - s.recent), position + 1)) <= set(tokens)
            if s.resident[layer, head] or all_fit:
                assert sorted(tokens) == list(range(position + 1)), "token in no set"

    def check_no_live_place_is_named(self, plan: Plan) -> None:
        """A ticket never writes where the set in use lies, nor in the tail."""
        _, places, counts = self.policy.segments(plan.layer)
        ranges = self.policy.segments(plan.layer)[0]
        slots = sorted(self.positions)
        for run in plan.runs:
            row, head = slots.index(int(run["slot"])), int(run["lane"])
            first, count = int(run["first_pair"]), int(run["pair_count"])
            named = set(plan.pairs[first : first + count, 1].tolist())
            live = set(places[row, head, : counts[row, head]].tolist())
            for at, n in ranges[row, head]:
                live |= set(range(at, at + n))
            assert not named & live, "a ticket names a place that is read"
