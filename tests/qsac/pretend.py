"""A store that is a few arrays: it copies records by pairs, as told, and may fail and reorder.

Keys and values of a record are (layer, head, token), so that a test reads off a window which token lies where, and off
an attention with a query of zeros which tokens it read: their mean, and how many by the log-sum-exp.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from decode_worker.device import Device, Host
from decode_worker.kernels.base import Rows, StepContext
from decode_worker.kernels.sets import KERNELS
from decode_worker.policy.attended import attended_places
from decode_worker.policy.base import Policy
from decode_worker.policy.cache.base import CACHES
from decode_worker.policy.plan import Op, Ticket
from decode_worker.policy.presets import PRESETS
from decode_worker.policy.reuse.base import REUSES
from decode_worker.policy.settings import SEAL_TOKENS, PolicySettings
from decode_worker.retrieval.base import Retriever
from decode_worker.retrieval.index import PackIndex

HEAD_DIM = 16
RECORD_BYTES = 2 * HEAD_DIM * 4
OK, ERROR = 1, 3
TRIES_MAX = 50  # of a step whose runs fail


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

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def build(self, layer, keys, order):
        return np.zeros((keys.shape[1], len(keys), 0), np.float32)

    def scores(self, layer, head, view, query, records):
        return self._rng.random(len(records), dtype=np.float32)


def settings(preset: str = "qsac", **changes) -> PolicySettings:
    """Three layers (layer 0 resident), two KV heads of two queries, a short tail."""
    layers, heads, group = changes.get("layers", 3), changes.get("kv_heads", 2), changes.get("group", 2)
    chosen = PRESETS[preset]
    resident = np.full((layers, heads), chosen.resident)
    resident[0] = True
    values = {
        "slots": 2, "layers": layers, "kv_heads": heads, "group": group, "head_dim": HEAD_DIM,
        "record_bytes": RECORD_BYTES, "context": 2048, "tau": np.full((layers, heads), 0.8, np.float32),
        "weights": np.ones((layers, heads, group), np.float32), "resident": resident, "budget": 40, "recent": 16,
        "tail": 16 + SEAL_TOKENS + 32, "reuse": REUSES[chosen.reuse], "cache": CACHES[chosen.cache],
        "attended": chosen.attended, "unit": chosen.unit,
    }  # fmt: skip
    return PolicySettings(**{**values, **changes})


class Bench:
    """A policy, one set of kernels, their window and the pretend store behind it."""

    def __init__(
        self,
        kernels: str,
        settings: PolicySettings,
        retriever: Retriever,
        rng: np.random.Generator,
        device: Device | None = None,
        **context,
    ) -> None:
        device = device or Host()
        self._where = device.torch_device
        self.policy, self.rng, self.settings = Policy(settings, retriever, self._where), rng, settings
        self.state = self.policy.state
        self.slot_bytes = self.policy.geometry(settings.context).slot_bytes
        self.window = np.full(settings.slots * self.slot_bytes, 255, np.uint8)
        window = torch.from_numpy(self.window).to(self._where)
        values = {"threads": 2, "stale_fails": False, "wait_us": 1000, **context}
        self.kernels = KERNELS[kernels](
            StepContext(
                settings, self.state, retriever, device, window, window, None, 1, settings.record_bytes, 1.0, **values
            )
        )
        self.policy.tell(self.kernels)
        self.rows = Rows(settings.slots)
        self.packs: dict[int, list[Pack]] = {}
        self.positions: dict[int, int] = {}
        self.selected: dict[int, np.ndarray] = {}  # [layers, H]
        self.steps = 0
        self.fetched: list[list[int]] = []  # records of each run of the latest step
        self.after_commit: Callable[[int], None] = lambda layer: None

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
        self.selected[slot] = geometry.selected
        self.packs[slot], self.positions[slot] = packs, position
        for ticket in self.policy.bind_tickets(slot, runs_max=3, pairs_max=50):
            assert len(ticket.runs) <= 3
            assert len(ticket.pairs) <= 50
            self.copy(ticket)
        for token in range(stored, position):  # a prompt's rest
            self.begin([slot], [token])
            for layer in range(self.settings.layers):
                self.write(layer)

    def unbind(self, slot: int) -> None:
        self.policy.unbind(slot)
        del self.packs[slot], self.positions[slot]
        self.window[slot * self.slot_bytes : (slot + 1) * self.slot_bytes] = 255

    def seal(self, slot: int) -> None:
        pack = self.pack(sum(p.tokens for p in self.packs[slot]), SEAL_TOKENS)
        self.packs[slot].append(pack)
        self.policy.extend(slot, pack)

    # --- the store ---

    def copy(self, ticket: Ticket, run: int | None = None, half: bool = False) -> None:
        """Copies the records of one run, or of all; `half` of them if it shall fail midway."""
        for r in ticket.runs if run is None else ticket.runs[run : run + 1]:
            slot, head, first, count = (int(r[name]) for name in ("slot", "lane", "first_pair", "pair_count"))
            assert r["slot_epoch"] == 7 + slot
            if ticket.op == Op.RANGE:
                pairs = np.stack([np.arange(first, first + count), int(r["arg"]) + np.arange(count)], axis=1)
            else:
                pairs = ticket.pairs[first : first + count].astype(np.int64)
                assert (np.diff(pairs[:, 0]) >= 0).all(), "pairs are sorted by record"
            records, places = (pairs[: count // 2] if half else pairs).T
            tokens = np.concatenate([p.first_token + p.order[ticket.layer, head].astype(int) for p in self.packs[slot]])
            lane = self._lane(ticket.layer, slot, head)
            lane[places] = 0
            lane[places, :, 0], lane[places, :, 1] = ticket.layer, head
            lane[places, :, 2] = tokens[records, None]

    def write(self, layer: int) -> None:
        """The new token of each head."""
        s, rows = self.settings, self.rows
        record = torch.zeros(rows.count, s.kv_heads, s.head_dim, device=self._where)
        record[..., 0] = layer
        record[..., 1] = torch.arange(s.kv_heads, device=self._where)
        record[..., 2] = rows.position[: rows.count, None].to(self._where)
        self.kernels.append(layer, record, record)

    def _lane(self, layer: int, slot: int, head: int) -> np.ndarray:
        """float32[places, 2, d]: key and value of each place."""
        offset, places = (int(x) for x in self.policy.windows(slot)[layer, head])
        lane = self.window[offset : offset + places * RECORD_BYTES]
        return lane.view(np.float32).reshape(places, 2, HEAD_DIM)

    # --- steps ---

    def begin(self, slots: list[int], positions: list[int]) -> None:
        self.rows.set(slots, positions)
        self.kernels.begin(self.rows, self.steps)
        self.steps += 1

    def plan(self, layer: int, query: np.ndarray) -> Ticket | None:
        """query: [B, Hq, d]."""
        kind = self.policy.query_kind(layer)
        on_device = torch.from_numpy(np.ascontiguousarray(query, np.float32)).to(self._where)
        return self.kernels.plan(layer, on_device, kind)

    def faults(self) -> list[int]:
        return self.state.fault[self.rows.slot[: self.rows.count].long()].tolist()

    def step(self, query: np.ndarray | None = None, failing: float = 0.0) -> None:
        """One step of every bound slot; a share of the runs fails. query: [layers, B, Hq, d]."""
        slots = sorted(self.positions)
        self.begin(slots, [self.positions[s] for s in slots])
        self.fetched = []
        for layer in range(self.settings.layers):
            q = self.queries(len(slots)) if query is None else query[layer]
            for _ in range(TRIES_MAX):
                ticket = self.plan(layer, q)
                if ticket is None:
                    break
                self.check_no_live_place_is_named(ticket)
                self.kernels.commit(layer, self.serve(ticket, failing))
                if not any(self.faults()):
                    break
                self.state.fault[:] = 0
            else:
                raise RuntimeError(f"a run has failed {TRIES_MAX} times")
            self.after_commit(layer)
            self.write(layer)
            if any(self.faults()):
                raise RuntimeError(f"faults {self.faults()}")
            self.check(layer)
        for slot in slots:
            self.positions[slot] += 1
            if self.policy.wants_seal(slot, self.positions[slot]):
                self.seal(slot)

    def seed(self, slot: int, queries: np.ndarray) -> None:
        """First sets and labels, as a prompt's last token gives them. queries: [layers, Hq, d]."""
        self.begin([slot], [self.positions[slot]])
        for layer in range(self.settings.layers):
            ticket = self.plan(layer, queries[layer, None])
            if ticket is not None:
                self.kernels.commit(layer, self.serve(ticket, failing=0))

    def queries(self, batch: int) -> np.ndarray:
        s = self.settings
        return self.rng.standard_normal((batch, s.kv_heads * s.group, s.head_dim), dtype=np.float32)

    def serve(self, ticket: Ticket, failing: float) -> np.ndarray:
        """Copies runs in random order; a failing one stops midway."""
        statuses = np.zeros((len(ticket.runs), 2), np.uint32)
        for run in self.rng.permutation(len(ticket.runs)):
            fails = self.rng.random() < failing
            self.copy(ticket, run, half=fails)
            statuses[run, 0] = ERROR if fails else OK
            first, count = int(ticket.runs["first_pair"][run]), int(ticket.runs["pair_count"][run])
            self.fetched.append(ticket.pairs[first : first + count, 0].tolist())
        return statuses

    # --- what attention reads ---

    def attended(self, layer: int, slot: int, head: int, position: int) -> list[int]:
        """Tokens that a head's attention reads, from the window itself; each must be that layer's and head's."""
        places = attended_places(self.state, layer, slot, head, position).numpy()
        found = self._lane(layer, slot, head)[places, 0, :3]
        assert (found[:, :2] == (layer, head)).all(), "a place holds another head's record, or nothing"
        return found[:, 2].astype(int).tolist()

    def attend(self, layer: int, query: torch.Tensor | None = None) -> tuple[np.ndarray, np.ndarray]:
        """out [rows, Hq, d] and lse [rows, Hq]. query: zeros by default, to which every record is the same."""
        s = self.settings
        if query is None:
            query = torch.zeros(self.rows.count, s.kv_heads * s.group, s.head_dim)
        out, lse = torch.empty_like(query), torch.empty(query.shape[:2])
        self.kernels.attend(layer, query, out, lse)
        return out.numpy(), lse.numpy()

    def check(self, layer: int) -> None:
        """No token twice, none from the future; sinks and recent tokens always; everything if k allows. The kernel
        reads just these."""
        s, (out, lse) = self.settings, self.attend(layer)
        rows = zip(self.rows.slot.tolist(), self.rows.position.tolist(), strict=True)
        for row, (slot, position) in list(enumerate(rows))[: self.rows.count]:
            stored = sum(p.tokens for p in self.packs[slot])
            for head in range(s.kv_heads):
                tokens = self.attended(layer, slot, head, position)
                assert len(set(tokens)) == len(tokens), f"token twice in layer {layer} head {head}"
                assert max(tokens) == position
                assert set(range(min(s.sink, position + 1))) <= set(tokens)
                assert set(range(max(0, position - s.recent), position + 1)) <= set(tokens)
                if s.resident[layer, head] or self.selected[slot][layer, head] >= stored - s.sink:
                    assert sorted(tokens) == list(range(position + 1)), "token in no set"
                mine = slice(head * s.group, (head + 1) * s.group)
                read = np.broadcast_to((layer, head, np.mean(tokens)), (s.group, 3))
                np.testing.assert_allclose(out[row, mine, :3], read, rtol=1e-5, atol=1e-5)
                np.testing.assert_allclose(lse[row, mine], np.log(len(tokens)), rtol=1e-5)

    def check_no_live_place_is_named(self, ticket: Ticket) -> None:
        """A ticket never writes where the set in use lies, nor in the tail."""
        for run in ticket.runs:
            slot, head = int(run["slot"]), int(run["lane"])
            first, count = int(run["first_pair"]), int(run["pair_count"])
            named = set(ticket.pairs[first : first + count, 1].tolist())
            live = attended_places(self.state, ticket.layer, slot, head, self.positions[slot] - 1)
            assert not named & set(live.tolist()), "a ticket names a place that is read"


def counted(state, name: str) -> torch.Tensor:
    """A list without what lies behind its count, on the host."""
    values = getattr(state, name).cpu()
    count = {"held": state.held_count, "held_places": state.held_count, "places": state.count}.get(name)
    if count is None:
        return values
    count = count.cpu()
    return torch.where(torch.arange(values.shape[-1]) < count[..., None], values, -1)
