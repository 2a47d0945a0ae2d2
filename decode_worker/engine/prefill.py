"""Prefill: computes a prompt layer by layer and stores its KV in packs while computing.

All chunks of a layer run before the next layer, so the worker holds hidden states and the KV of one layer, never the
whole cache. The daemon writes the packs of layer l while layer l+1 computes.

It is work in pieces, of which the largest is a chunk of one layer: decode steps lie between them.

What the store has of a prompt is read, layer by layer, and the rest attends to it. Chunks start at multiples of
CHUNK_TOKENS, attend to K and V as they are stored, and are computed as a whole or not taken from the store: a product
of another shape has other last bits. So the logits behind a stored prefix are bit-equal to those of computing it all.
What is quantised is so once: packs are written from K and V before, and the prompt's rest is kept as it was.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from decode_worker.engine.prefix import exact_candidates, reservations
from decode_worker.model.transformer import Transformer
from decode_worker.pack_writer import PackDraft, PackWriter
from decode_worker.packs import IndexedPack
from decode_worker.records import RecordFormat
from decode_worker.store_calls import StoreCalls
from decode_worker.work import Pieces
from kvstore_service.client import PrefixCandidate

CHUNK_TOKENS = 1024
THREADS = len(os.sched_getaffinity(0))  # its products are large, where those of a decode step are small
IMPORTANCE_QUERIES = 32

Progress = Callable[[int, int], None]


def reusable(ids: Sequence[int], pack_tokens: int) -> list[PrefixCandidate]:
    """Packs of whole chunks, which no prompt that ended within a chunk has written, and no session's tail."""
    return exact_candidates(ids, pack_tokens, CHUNK_TOKENS)


@dataclass(frozen=True)
class StoredPrefix:
    """Packs of whole chunks that a prompt starts with. `read(layer)`: their K, V [tokens, H, d] in token order,
    `tokens` in all."""

    parent: bytes  # the last pack's id
    tokens: int
    read: Callable[[int], Pieces[tuple[torch.Tensor, torch.Tensor]]]


@dataclass
class Prefilled:
    """A computed prompt: the packs behind its stored prefix, the logits after its last token, and what the first
    decode step starts from."""

    packs: list[IndexedPack]
    logits: torch.Tensor  # float32 [vocab]
    rest: list[tuple[torch.Tensor, torch.Tensor]]  # per layer K, V [T - N, H, d] of the tokens behind the last pack
    last_query: list[torch.Tensor]  # per layer q~ [Hq, d] of the last prompt token


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """What every piece of a prefill is computed within."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_num_threads(before)


class Prefill:
    """Runs prompts of one model, every piece of them within `computing`."""

    def __init__(
        self,
        model: Transformer,
        records: RecordFormat,
        writer: PackWriter,
        calls: StoreCalls,
        pack_tokens: int,
        alive: Callable[[], None],
        wait: Callable[[], None],
    ) -> None:
        """`alive` raises when nobody would take what is computed any more; asked in every chunk. `wait` returns when
        the device has done what it was told: a piece that was only begun would be time of the steps behind it."""
        self._model = model
        self._records = records
        self._writer = writer
        self._calls = calls
        self._pack_tokens = pack_tokens
        self._alive = alive
        self._wait = wait

    def run(
        self,
        session_id: str,
        ids: Sequence[int],
        progress: Progress | None = None,
        compete: bool = False,
        prefix: StoredPrefix | None = None,
    ) -> Pieces[Prefilled]:
        """Computes all of `ids` (at least one behind `prefix`) and commits the packs that the store does not have yet.

        What another worker is writing is left to it, unless `compete`; LeftAlone if that worker does not commit it."""
        behind = (prefix.tokens, prefix.parent) if prefix else ()
        wanted = reservations(ids, self._pack_tokens, *behind)
        drafts = yield from self._calls.call(self._writer.reserve, session_id, wanted, compete, undo=self._writer.abort)
        try:
            spans = [slice(r.first_token, r.first_token + r.tokens) for r in wanted]
            prefilled = yield from self._compute(ids, list(zip(drafts, spans, strict=True)), progress, prefix)
            prefilled.packs = yield from self._writer.commit(session_id, drafts)
        except BaseException as error:
            self._writer.abort(drafts, error)
            raise
        return prefilled

    def compute_only(self, ids: Sequence[int]) -> Pieces[torch.Tensor]:
        """The same computation with nothing stored; returns the logits. The rival that a benchmark compares with."""
        return (yield from self._compute(ids, [], None, None, keep_rest=False)).logits

    def _compute(
        self,
        ids: Sequence[int],
        drafts: list[tuple[PackDraft, slice]],
        progress: Progress | None,
        prefix: StoredPrefix | None,
        keep_rest: bool = True,
    ) -> Pieces[Prefilled]:
        model = self._model
        stored = drafts[-1][1].stop if drafts else prefix.tokens if prefix else 0
        positions = torch.arange(len(ids), device=model.device)
        x = model.embed(torch.tensor(ids[prefix.tokens if prefix else 0 :], device=model.device))
        result = Prefilled([], torch.empty(0), [], [])
        before = x[-1:].clone()  # the input of the layer before: what a speculative query is made from
        for layer in range(model.config.layers):
            result.last_query.append(model.query(layer, before, positions[-1:])[0])
            before = x[-1:].clone()
            keys, values, queries, x = yield from self._layer(layer, x, positions, progress, prefix)
            if keep_rest:
                result.rest.append((keys[stored:].clone(), values[stored:].clone()))
            if drafts:
                importance = self._importance(queries, keys)
                hot = self._writer.importance.hot(importance)
                self._wait()
                yield None
                for draft, span in drafts:
                    hot_here = None if hot is None else hot[:, span]
                    yield from self._writer.store(
                        draft, layer, keys[span], values[span], importance[:, span], hot=hot_here
                    )
        result.logits = model.logits(x[-1:])[0].cpu()
        return result

    def _layer(
        self,
        layer: int,
        x: torch.Tensor,
        positions: torch.Tensor,
        progress: Progress | None,
        prefix: StoredPrefix | None,
    ) -> Pieces[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """One layer over the prompt's last len(x) tokens: K, V [T, H, d] of all, the last queries [n, Hq, d], and the
        next layer's x, in this one's memory. Attended to are K and V as they come back from packs.

        Of the last layer only the last token's output is ever used.
        """
        config, tokens, before = self._model.config, len(positions), len(positions) - len(x)
        shape = (tokens, config.kv_heads, config.head_dim)
        keys, values = (torch.empty(shape, dtype=x.dtype, device=x.device) for _ in range(2))
        if prefix is not None:
            keys[:before], values[:before] = yield from prefix.read(layer)
        seen_keys, seen_values = (keys.clone(), values.clone()) if self._records.quantised else (keys, values)
        last_layer = layer == config.layers - 1
        queries = x.new_empty(0, config.q_heads, config.head_dim)
        for offset, chunk in _chunks(x):
            self._alive()
            first, end = before + offset, before + offset + len(chunk)
            q, k, v = self._model.qkv(layer, chunk, positions[first:end])
            keys[first:end], values[first:end] = k.to(self._records.torch_dtype), v.to(self._records.torch_dtype)
            if self._records.quantised:
                seen_keys[first:end], seen_values[first:end] = self._records.rounded(k), self._records.rounded(v)
            queries = torch.cat((queries, q[-IMPORTANCE_QUERIES:]))[-IMPORTANCE_QUERIES:]
            if not last_layer:
                self._model.finish(layer, chunk, self._attention(q, seen_keys[:end], seen_values[:end], first))
            self._wait()
            if progress is not None:
                progress(layer * len(x) + end - before, config.layers * len(x))
            yield None
        if last_layer:
            x = self._model.finish(layer, x[-1:], self._attention(queries[-1:], seen_keys, seen_values, tokens - 1))
        return keys, values, queries, x

    def _attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int) -> torch.Tensor:
        return self._model.operations.attention(q, k, v, first, self._model.scale)

    def _importance(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Attention mass that the last queries give each token, float32 [H, T] (KVDrive §7.1)."""
        n, _, d = queries.shape
        tokens, kv_heads, _ = keys.shape
        grouped = queries.float().view(n, kv_heads, -1, d)
        position = torch.arange(tokens, device=keys.device)
        later = (position > position[-n:, None]).repeat_interleave(grouped.shape[2], 0)
        mass = torch.empty(kv_heads, tokens, device=keys.device)
        for head in range(kv_heads):  # a head at a time bounds the scores' memory
            scores = grouped[:, head].reshape(-1, d) @ keys[:, head].float().T * self._model.scale
            scores.masked_fill_(later, float("-inf"))
            mass[head] = scores.softmax(dim=1).sum(dim=0)
        return mass


def _chunks(x: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    for first in range(0, len(x), CHUNK_TOKENS):
        yield first, x[first : first + CHUNK_TOKENS]
