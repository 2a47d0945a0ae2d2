"""Packs with random K and V that an engine finds as its own prompt's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from decode_worker import packing
from decode_worker.engine.engine import Engine
from decode_worker.engine.prefix import reservations
from decode_worker.importance import hot_records
from decode_worker.pack_writer import PackDraft, PackWriter
from decode_worker.retrieval.base import Retriever
from decode_worker.retrieval.view import View
from decode_worker.store_calls import StoreCalls
from decode_worker.work import finish

KEY_CLUSTERS = 32
KEY_NOISE = 0.5


class _BuiltOnce(Retriever):
    """Every layer of every pack of one length is indexed as the first of them was."""

    name: ClassVar[str] = "built once"

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever
        self._built: dict[int, NDArray[Any]] = {}
        self.parameters = retriever.parameters

    def build(self, layer: int, keys: NDArray[np.float32], order: NDArray[np.uint16]) -> NDArray[Any]:
        if len(keys) not in self._built:
            self._built[len(keys)] = self._retriever.build(layer, keys, order)
        return self._built[len(keys)]

    def scores(
        self, layer: int, head: int, view: View, query: NDArray[np.float32], records: NDArray[np.intp]
    ) -> NDArray[np.float32]:
        return self._retriever.scores(layer, head, view, query, records)


def inject_packs(engine: Engine, ids: Sequence[int], seed: int, *, alike: bool = False) -> None:
    """Stores random K and V as the packs of a prompt, with index sidecars, so that `engine.attach(ids)` finds them.

    Keys lie around KEY_CLUSTERS centres per layer and head, so that selections have some locality, as real keys give.
    Records are ordered by these centres: looking for the clusters anew would take minutes per million tokens.

    alike: all layers of all packs hold the same, and are indexed by what indexes layer 0. What is selected makes no
    sense then, as often as it does not with random keys; a large model's packs are there in a third of the time.
    """
    calls = StoreCalls()
    retriever = _BuiltOnce(engine.retriever) if alike else engine.retriever
    writer = PackWriter(
        engine.records, retriever, engine.client, engine.transport, engine.catalogue, calls,
        order=engine.config.order, importance=engine.config.importance,
    )  # fmt: skip
    session = engine.client.open_session(engine.layout, engine.config.context)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small products: a second thread costs more than it brings
    try:
        wanted = reservations(ids, engine.transport.pack_tokens)
        drafts = writer.reserve(session, wanted)
        try:
            _store(engine, writer, drafts, torch.Generator().manual_seed(seed), alike)
            finish(writer.commit(session, drafts))
        except BaseException as error:
            writer.abort(drafts, error)
            raise
    finally:
        calls.close()
        torch.set_num_threads(threads)
        engine.client.close_session(session)


def _store(
    engine: Engine, writer: PackWriter, drafts: Sequence[PackDraft], generator: torch.Generator, alike: bool
) -> None:
    heads, d, dtype = engine.records.kv_heads, engine.records.head_dim, engine.records.torch_dtype
    values = torch.randn(engine.transport.pack_tokens, heads, d, generator=generator).to(dtype)
    drawn: dict[int, tuple[torch.Tensor, NDArray[np.uint16]]] = {}  # by the number of tokens
    for layer in range(engine.layout.layers):
        centres = torch.randn(KEY_CLUSTERS, heads, d, generator=generator)
        for draft in drafts:
            tokens = draft.reservation.tokens
            if not alike or tokens not in drawn:
                member = torch.randint(KEY_CLUSTERS, (tokens,), generator=generator)
                keys = centres[member] + KEY_NOISE * torch.randn(tokens, heads, d, generator=generator)
                order = np.tile(_order(member, engine.config.order, generator), (heads, 1))
                drawn[tokens] = keys.to(dtype), order
            keys, order = drawn[tokens]
            finish(writer.store(draft, layer, keys, values[:tokens], torch.empty(heads, 0), order))


def _order(member: torch.Tensor, name: str, generator: torch.Generator) -> NDArray[np.uint16]:
    """Record -> token, uint16[n]: what the order would look for, with random importances."""
    tokens = len(member)
    if name == "token":
        return packing.token_order(1, tokens)[0]
    if not packing.ORDERS[name].hot_first:
        return member.argsort(stable=True).numpy().astype(np.uint16)
    hot = torch.zeros(tokens, dtype=torch.bool)
    hot[torch.randperm(tokens, generator=generator)[: hot_records(tokens)]] = True
    return torch.where(hot, member, member + KEY_CLUSTERS).argsort(stable=True).numpy().astype(np.uint16)
