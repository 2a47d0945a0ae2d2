"""Packs with random K and V that an engine finds as its own prompt's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decode_worker.engine.engine import Engine
from decode_worker.engine.prefix import reservations
from decode_worker.pack_writer import PackWriter

KEY_CLUSTERS = 32
KEY_NOISE = 0.5


def inject_packs(engine: Engine, ids: Sequence[int], seed: int) -> None:
    """Stores random K and V as the packs of a prompt, with index sidecars, so that `engine.attach(ids)` finds them.

    Keys lie around KEY_CLUSTERS centres per layer and head, so that selections have some locality, as real keys give.
    """
    writer = PackWriter(
        engine.records, engine.retriever, engine.client, engine.transport, engine.catalogue,
        clustered=engine.config.order == "clustered",
    )  # fmt: skip
    heads, d = engine.records.kv_heads, engine.records.head_dim
    generator = torch.Generator().manual_seed(seed)
    session = engine.client.open_session(engine.layout, engine.config.context)
    try:
        wanted = reservations(ids, engine.transport.pack_tokens)
        drafts = writer.reserve(session, wanted)
        for layer in range(engine.layout.layers):
            centres = torch.randn(KEY_CLUSTERS, heads, d, generator=generator)
            for draft, item in zip(drafts, wanted, strict=True):
                member = torch.randint(KEY_CLUSTERS, (item.tokens,), generator=generator)
                noise, values = torch.randn(2, item.tokens, heads, d, generator=generator)
                importance = torch.rand(heads, item.tokens, generator=generator)
                writer.store(draft, layer, centres[member] + KEY_NOISE * noise, values, importance)
        writer.flush()
        writer.commit(session, drafts)
    finally:
        engine.client.close_session(session)
