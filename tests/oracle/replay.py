"""The decisions of docs/qsac.md on hand-written keys and queries of one layer, without a model."""

from collections.abc import Sequence

import numpy as np

from .heads import Heads, HeadTrace, Profile, Settings, Shape


class Replay:
    """One offloaded layer of H heads.

    keys [tokens, H, d] hold every token that may ever be stored; N = `stored` need not be a
    multiple of 256. `last_query` [H, g, d] seeds the heads as a prefill would; without it every
    head starts missing. `number` is the layer's, for the stagger of forced misses.
    """

    def __init__(
        self,
        keys: np.ndarray,
        stored: int,
        position: int,
        settings: Settings,
        group: int = 1,
        last_query: np.ndarray | None = None,
        maps: np.ndarray | None = None,
        tau: np.ndarray | float | None = None,
        profile: Profile | None = None,
        number: int = 0,
        scale: float | None = None,
    ) -> None:
        _, kv_heads, head_dim = keys.shape
        shape = Shape(number + 1, kv_heads, group, head_dim)
        scale = head_dim**-0.5 if scale is None else scale
        self.keys, self.number = np.asarray(keys, np.float32), number
        self.heads = Heads(shape, scale, settings, set(), tau, profile or Profile())
        self.heads.bind(position, stored, maps)
        if last_query is not None:
            self.heads.seed(number, np.asarray(last_query, np.float32), self.keys)

    def step(self, position: int, query: np.ndarray) -> list[HeadTrace]:
        """Decide on query [H, g, d], check the token sets, seal if due; a trace per head."""
        query = np.asarray(query, np.float32)
        traces = self.heads.lookup(self.number, query, self.keys, position)
        for head in range(len(query)):
            self.heads.tokens(self.number, head, position)
        if self.heads.seal_due(position):
            self.heads.seal()
        return [traces[self.number, head] for head in range(len(query))]

    def run(self, trace: Sequence[tuple[int, np.ndarray]]) -> list[list[HeadTrace]]:
        """All steps of a trace of (position, query [H, g, d])."""
        return [self.step(position, query) for position, query in trace]
