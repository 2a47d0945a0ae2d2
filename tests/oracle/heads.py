"""Every decision of docs/qsac.md about offloaded heads: hit or miss, which records, which tokens.

No model in here: the caller brings keys and queries. `Heads` holds one session.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from .retriever import best, best_units, default_hash_weights, exact_scores, hash_scores

BLOCK_TOKENS = 256  # tokens that one sealing moves into a pack
UNIT = 8  # records that policy lru selects together
STAGGER = 16  # forced misses of neighbouring heads spread over so many steps


@dataclass(frozen=True)
class Shape:
    """Layers, KV heads, query heads per KV head, head dimension."""

    layers: int
    kv_heads: int
    group: int
    head_dim: int


@dataclass(frozen=True)
class Settings:
    """The constants of docs/qsac.md. A float `budget` is a fraction of N, an int a count."""

    policy: str = "qsac"
    retriever: str = "exact"
    budget: float = 0.1
    slack: float = 0.125
    sink: int = 4
    recent: int = 64
    tail: int | None = None  # tail places per head; None: recent + 512
    eta: float = 0.8
    p: float = 3.0
    cos_floor: float = 1e-3

    def __post_init__(self) -> None:
        if self.policy not in ("full", "infinigen", "litecache", "qsac", "lru"):
            raise ValueError(f"policy {self.policy!r}: use full, infinigen, litecache, qsac or lru")
        if self.retriever not in ("exact", "hash"):
            raise ValueError(f"retriever {self.retriever!r}: use exact or hash")
        if not (self.budget >= 1 if isinstance(self.budget, int) else 0 < self.budget <= 1):
            raise ValueError(f"budget {self.budget!r}: use a float in (0, 1] or an int from 1")
        if self.sink < 0 or self.recent < 0:
            raise ValueError("sink and recent must not be negative")

    @property
    def tail_places(self) -> int:
        """T."""
        return self.recent + 512 if self.tail is None else self.tail

    def places(self, stored: int) -> int:
        """Places of the budget for N = `stored` at bind."""
        whole = isinstance(self.budget, int)
        wanted = self.budget if whole else max(1, math.ceil(self.budget * stored))
        return int(min(wanted, max(1, stored - self.sink)))

    def selected(self, stored: int) -> int:
        """What a selection takes for N = `stored` at bind: k records, or under lru units of eight records."""
        k = self.places(stored)
        if self.policy != "lru":
            return k
        held = math.ceil((k + math.ceil(k * self.slack)) / UNIT)
        return math.ceil(held / 2)


@dataclass(frozen=True)
class Profile:
    """Measured constants of a model; whatever is None takes the documented default."""

    importance: np.ndarray | None = None  # of KV heads, for tau, [layers, H]
    weights: np.ndarray | None = None  # importance of query heads, for eq. 2, [layers, H, g]
    hash_weights: np.ndarray | None = None  # [layers, H, d, bits]
    hash_centres: np.ndarray | None = None  # [layers, H, d]


@dataclass(frozen=True)
class HeadTrace:
    """One decision of one head, and the state after it."""

    hit: bool
    forced: bool  # the tail was nearly full: a miss whatever the similarity
    similarity: float  # -inf without a label or with a zero norm
    tau: float
    records: np.ndarray  # the set, record ids, ascending
    fetched: np.ndarray  # what travels, ascending; under lru at most that: what its cache has kept does not
    cover: int
    gap: float  # score gap at the edge of a selection; infinite on a hit
    query: np.ndarray  # the q~ that was looked up, [g, d]


@dataclass
class Head:
    """State of one offloaded head."""

    cover: int
    records: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    label: np.ndarray | None = None


def thresholds(importance: np.ndarray, eta: float, p: float) -> np.ndarray:
    """tau of KV heads with these importances (LiteCache eq. 3-5)."""
    weight = np.asarray(importance, np.float64) ** p
    return np.cos(weight * np.arccos(eta) + (1 - weight) * np.pi)


def similarity(query: np.ndarray, label: np.ndarray | None, weights: np.ndarray, cos_floor: float) -> float:
    """LiteCache eq. 2 in its safe form: query and label [g, d], weights [g]; -inf is a sure miss.

    A weight of zero takes its query head out of the sums, but not out of the floor check.
    """
    if label is None:
        return -math.inf
    norms = np.linalg.norm(query, axis=1) * np.linalg.norm(label, axis=1)
    if (norms == 0).any():
        return -math.inf
    cosines = (query * label).sum(axis=1) / norms
    if (cosines <= cos_floor).any() or not weights.any():
        return float(cosines.min())
    return float(weights.sum() / (weights / cosines).sum())


class Heads:
    """The offloaded heads of one session. Keys passed in are [tokens, H, d] in token order."""

    def __init__(
        self,
        shape: Shape,
        scale: float,
        settings: Settings,
        resident: set[tuple[int, int]],
        tau: np.ndarray | float | None,
        profile: Profile,
    ) -> None:
        self.shape, self.settings, self.scale = shape, settings, np.float32(scale)
        grid = (shape.layers, shape.kv_heads)
        importance = np.ones(grid) if profile.importance is None else profile.importance
        if tau is None:
            tau = thresholds(importance, settings.eta, settings.p)
        self.tau = np.broadcast_to(tau, grid)
        weights = np.ones(1) if profile.weights is None else profile.weights
        self.weights = np.broadcast_to(weights, (*grid, shape.group))
        self._prepare_hash(profile)
        self.offloaded = [
            (layer, head)
            for layer, head in np.ndindex(grid)
            if (layer, head) not in resident and settings.policy != "full"
        ]

    def _prepare_hash(self, profile: Profile) -> None:
        shape = self.shape
        if self.settings.retriever != "hash":
            return
        self.hash_weights = profile.hash_weights
        if self.hash_weights is None:
            self.hash_weights = default_hash_weights(shape.layers, shape.kv_heads, shape.head_dim)
        self.hash_centres = profile.hash_centres
        if self.hash_centres is None:
            self.hash_centres = np.zeros(self.hash_weights.shape[:3], np.float32)

    def bind(self, position: int, stored: int, maps: np.ndarray | None = None) -> None:
        """Begin with N = `stored` and next position `position`, every head without a set.

        maps: token of each record, broadcast to [layers, H, N]; None is token order.
        """
        self.stored = 0
        self.maps = np.empty((self.shape.layers, self.shape.kv_heads, 0), np.int64)
        self._append_records(stored, maps)
        self.selected = self.settings.selected(stored)
        self.state = {key: Head(cover=self.limit(position)) for key in self.offloaded}

    def seed(self, layer: int, query: np.ndarray, keys: np.ndarray) -> None:
        """First sets and labels of a layer, from the last prompt token's q~ [H, g, d]."""
        for head in self._heads_of(layer):
            state = self.state[layer, head]
            self._select((layer, head), query[head], keys, state.cover)

    def limit(self, position: int) -> int:
        """S at a position: sets are chosen below it, tails begin at or below it."""
        floor = min(self.settings.sink, self.stored)
        return max(floor, min(self.stored, position - self.settings.recent))

    def lookup(
        self, layer: int, query: np.ndarray, keys: np.ndarray, position: int
    ) -> dict[tuple[int, int], HeadTrace]:
        """Steps 3 to 5 for the offloaded heads of a layer; query [H, g, d]."""
        return {
            (layer, head): self._lookup_head((layer, head), query[head], keys, position)
            for head in self._heads_of(layer)
        }

    def tokens(self, layer: int, head: int, position: int) -> np.ndarray:
        """What step 6 attends to: sinks, set, tail (or all tokens), disjoint and complete."""
        if (layer, head) not in self.state:
            return np.arange(position + 1)
        state = self.state[layer, head]
        sinks = np.arange(min(self.settings.sink, state.cover))
        chosen = self.maps[layer, head][state.records]
        tokens = np.concatenate([sinks, chosen, np.arange(state.cover, position + 1)])
        self._check(tokens, chosen, state.cover, position)
        return tokens

    def seal_due(self, position: int) -> bool:
        """Whether the step at `position` ends with a sealing."""
        return position - self.stored >= BLOCK_TOKENS + self.settings.recent

    def seal(self, maps: np.ndarray | None = None) -> None:
        """The next 256 tokens become stored records; sets, labels and covers stay."""
        self._append_records(BLOCK_TOKENS, maps)

    def _heads_of(self, layer: int) -> list[int]:
        return [head for owner, head in self.offloaded if owner == layer]

    def _append_records(self, count: int, maps: np.ndarray | None) -> None:
        tokens = np.arange(self.stored, self.stored + count)
        added = np.broadcast_to(tokens if maps is None else maps, (*self.maps.shape[:2], count))
        assert (np.sort(added, axis=-1) == tokens).all(), "a map must permute its own tokens"
        self.maps = np.concatenate([self.maps, added], axis=-1)
        self.stored += count

    def _lookup_head(self, key: tuple[int, int], query: np.ndarray, keys: np.ndarray, position: int) -> HeadTrace:
        layer, head = key
        state, settings, tau = self.state[key], self.settings, float(self.tau[key])
        sim = similarity(query, state.label, self.weights[key], settings.cos_floor)
        early = (layer * self.shape.kv_heads + head) % STAGGER
        due = position - state.cover >= settings.tail_places - 1 - early
        forced = due and self.limit(position) > state.cover
        hit = sim > tau and not forced and settings.policy in ("qsac", "litecache")
        before, gap = state.records, math.inf
        if not hit:
            gap = self._select(key, query, keys, self.limit(position))
        if position - state.cover >= settings.tail_places:
            raise RuntimeError(f"tail of head {key} is full at position {position}")
        fetched = np.setdiff1d(state.records, before)
        if settings.policy == "litecache" and not hit:
            fetched = state.records
        return HeadTrace(hit, forced, sim, tau, state.records, fetched, state.cover, gap, query)

    def _select(self, key: tuple[int, int], query: np.ndarray, keys: np.ndarray, limit: int) -> float:
        """Replace the set of a head by the best records below `limit`; returns the score gap."""
        tokens = self.maps[key]
        candidates = np.flatnonzero((tokens >= self.settings.sink) & (tokens < limit))
        candidates = candidates[np.argsort(tokens[candidates])]
        chosen, gap = candidates, math.inf
        if len(candidates):
            scores = self._scores(key, query, keys[tokens[candidates], key[1]])
            if self.settings.policy == "lru":
                units, gap = best_units(scores, candidates // UNIT, self.selected)
                chosen = candidates[np.isin(candidates // UNIT, units)]
            else:
                ranks, gap = best(scores, self.selected)
                chosen = candidates[ranks]
        self.state[key].records = np.sort(chosen)
        self.state[key].label = query.copy()
        self.state[key].cover = limit
        return gap

    def _scores(self, key: tuple[int, int], query: np.ndarray, keys: np.ndarray) -> np.ndarray:
        if self.settings.retriever == "exact":
            return exact_scores(query, keys, self.scale)
        return hash_scores(query, keys, self.hash_weights[key], self.hash_centres[key])

    def _check(self, tokens: np.ndarray, chosen: np.ndarray, cover: int, position: int) -> None:
        sink = self.settings.sink
        below = max(0, cover - sink)
        assert min(sink, self.stored) <= cover <= min(self.stored, position + 1)
        assert ((chosen >= sink) & (chosen < cover)).all(), "a selected token is out of range"
        if self.settings.policy != "lru":
            assert len(chosen) == min(self.selected, below), "a set is smaller than it could be"
        assert len(np.unique(tokens)) == len(tokens), "a token is in two sets"
        if len(chosen) == below:
            assert np.array_equal(np.sort(tokens), np.arange(position + 1)), "a token is in none"
