"""The oracle: one session decoded exactly as docs/qsac.md says, with a trace of every decision.

oracle = Oracle("models/retriever", policy="qsac", budget=64, storage="bfloat16")
ids = oracle.generate(prompt_ids, 32)
oracle.traces[0].heads[1, 0].records      # first decode step, layer 1, KV head 0
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .heads import BLOCK_TOKENS, Heads, HeadTrace, Profile, Settings, Shape
from .model import Model, attention, round_to


@dataclass(frozen=True)
class StepTrace:
    """What one decode step decided."""

    position: int
    token: int
    stored: int  # N during the step
    heads: dict[tuple[int, int], HeadTrace]  # offloaded heads only, by (layer, head)
    logits: np.ndarray  # [vocabulary]


class Layer:
    """Stored keys and values of one layer: rounded once, appended only."""

    def __init__(self, keys: np.ndarray, values: np.ndarray, storage: str) -> None:
        self._storage = storage
        self._pairs = round_to(np.stack([keys, values]), storage)  # [2, capacity, H, d]
        self._count = len(keys)

    def append(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Store one more token; both [1, H, d]."""
        if self._count == self._pairs.shape[1]:
            room = np.empty_like(self._pairs[:, : max(BLOCK_TOKENS, self._count)])
            self._pairs = np.concatenate([self._pairs, room], axis=1)
        self._pairs[:, self._count] = round_to(np.concatenate([keys, values]), self._storage)
        self._count += 1

    @property
    def keys(self) -> np.ndarray:
        """[tokens, H, d]."""
        return self._pairs[0, : self._count]

    @property
    def values(self) -> np.ndarray:
        """[tokens, H, d]."""
        return self._pairs[1, : self._count]


class Oracle:
    """Decodes one session of one checkpoint. `settings` are the fields of `heads.Settings`.

    storage: "float32" or "bfloat16", the dtype of stored keys and values.
    resident: (layer, head) pairs that hold every token; None is all of layer 0.
    tau: thresholds that replace those from importances, broadcast to [layers, H].
    auto_seal: seal at the end of the step that makes it due; False leaves it to `seal()`.
    """

    def __init__(
        self,
        checkpoint_dir: str | Path,
        storage: str = "float32",
        resident: Iterable[tuple[int, int]] | None = None,
        tau: np.ndarray | float | None = None,
        profile: Profile | None = None,
        auto_seal: bool = True,
        **settings: Any,
    ) -> None:
        if storage not in ("float32", "bfloat16"):
            raise ValueError(f"storage {storage!r}: use float32 or bfloat16")
        self.model = Model(checkpoint_dir, storage)
        config = self.model.config
        shape = Shape(config.layers, config.kv_heads, config.group, config.head_dim)
        if resident is None:
            resident = {(0, head) for head in range(config.kv_heads)}
        self.heads = Heads(shape, self.model.scale, Settings(**settings), set(resident), tau, profile or Profile())
        self.storage, self.auto_seal = storage, auto_seal
        self.position = 0
        self.traces: list[StepTrace] = []

    @property
    def stored(self) -> int:
        """N."""
        return self.heads.stored

    def prefill(self, ids: Sequence[int], maps: np.ndarray | None = None) -> np.ndarray:
        """Begin a session with a prompt [T] and give its last logits [vocabulary].

        Packs hold the largest multiple of 256 tokens, the tail holds the rest, and the last
        token's q~ seeds every offloaded head. maps: see `Heads.bind`.
        """
        logits, inputs = self._load(ids, maps)
        for layer in range(len(self.layers)):
            before = inputs[max(layer - 1, 0)][None]
            query = self.model.query(layer, before, np.array([self.position - 1]))[0]
            self.heads.seed(layer, query, self.layers[layer].keys)
        return logits

    def attach(self, ids: Sequence[int], question_ids: Sequence[int], maps: np.ndarray | None = None) -> np.ndarray:
        """Begin a session with a stored document [T], every head missing, and decode a question.

        Gives the logits [vocabulary] after the last token of the question (or of the document,
        if the question is empty).
        """
        logits, _ = self._load(ids, maps)
        for token in question_ids:
            logits = self.step(token)
        return logits

    def step(self, token: int) -> np.ndarray:
        """Process one token at the next position; gives its logits [vocabulary]."""
        position, stored = self.position, self.stored
        decisions: dict[tuple[int, int], HeadTrace] = {}
        x = before = self.model.embed(np.array([token]))
        for layer, kept in enumerate(self.layers):
            speculative = self.model.query(layer, before, np.array([position]))[0]
            decisions |= self.heads.lookup(layer, speculative, kept.keys, position)
            before, x = x, self._block(layer, x)
        logits = self.model.logits(x)[0]
        self.traces.append(StepTrace(position, int(token), stored, decisions, logits))
        if self.auto_seal and self.heads.seal_due(position):
            self.seal()
        self.position += 1
        return logits

    def seal(self, maps: np.ndarray | None = None) -> None:
        """Move tokens [N, N + 256) into a pack; maps: their order, broadcast to [layers, H, 256]."""
        self.heads.seal(maps)

    def greedy(self, logits: np.ndarray, count: int) -> list[int]:
        """`count` greedy tokens, the first of them from `logits`; ties go to the lower id."""
        ids = []
        for _ in range(count):
            if ids:
                logits = self.step(ids[-1])
            ids.append(int(np.argmax(logits)))
        return ids

    def generate(self, ids: Sequence[int], count: int) -> list[int]:
        """Prefill and `count` greedy tokens; the first comes from the prompt's last logits."""
        return self.greedy(self.prefill(ids), count)

    def _load(self, ids: Sequence[int], maps: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Fill a new session; gives the last logits and the last token's layer inputs."""
        done = self.model.prefill(np.asarray(ids))
        pairs = zip(done.keys, done.values, strict=True)
        self.layers = [Layer(keys, values, self.storage) for keys, values in pairs]
        self.position = len(ids)
        self.traces = []
        self.heads.bind(self.position, len(ids) // BLOCK_TOKENS * BLOCK_TOKENS, maps)
        return done.logits, done.last_inputs

    def _block(self, layer: int, x: np.ndarray) -> np.ndarray:
        """Step 6 and the rest of a layer for one token; x [1, hidden]."""
        here, kept = np.array([self.position]), self.layers[layer]
        kept.append(*self.model.key_value(layer, x, here))
        query = self.model.query(layer, x, here)[0]
        attended = np.empty_like(query)
        for head in range(len(query)):
            tokens = self.heads.tokens(layer, head, self.position)
            keys, values = kept.keys[tokens, head], kept.values[tokens, head]
            attended[head] = attention(query[head], keys, values, self.model.scale)
        return self.model.finish(layer, x, attended[None])
