"""Every tensor of a layer lies on one device: with weights that are not the CPU's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from decode_worker.engine.prefill import CHUNK_TOKENS, Prefill, StoredPrefix
from decode_worker.kernels.products.reference import ReferenceProducts
from decode_worker.model.checkpoint import Checkpoint
from decode_worker.model.transformer import Transformer
from decode_worker.pack_writer import PackWriter
from decode_worker.records import RecordFormat
from decode_worker.work import Pieces, finish
from tests.model.tiny_models import save, tiny_model
from tests.support.device_tensor import DEVICE

CONTEXT = 4096
PACK_TOKENS = 512
PROMPT = list(range(100)) * 20
RECORDS = RecordFormat(2, 64, "bfloat16")


@pytest.fixture(params=["llama3", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Transformer:
    directory = save(tiny_model(request.param, max_position_embeddings=CONTEXT), tmp_path / "model")
    return Transformer.load(Checkpoint.open(directory), CONTEXT, torch.bfloat16, DEVICE)


class Store:
    """Whom the prefill calls: everything is answered at once, and nothing is staged."""

    def __init__(self) -> None:
        self.orders: list[tuple[int, ...]] = []
        nobody: Any = None
        retriever: Any = SimpleNamespace(build=self._index)
        self._writer = PackWriter(RECORDS, retriever, *[nobody] * 4, order="pack", importance="head")
        self.importance = self._writer.importance

    def _index(self, layer: int, keys: NDArray[np.float32], order: NDArray[np.uint16]) -> None:
        assert keys.shape == (*order.shape[::-1], RECORDS.head_dim)
        self.orders.append((layer, *order.shape))

    def call(self, function: Any, *arguments: Any, undo: Any) -> Pieces[Any]:
        yield None
        return function(*arguments)

    def reserve(self, session_id: str, wanted: Sequence[Any], compete: bool) -> list[SimpleNamespace]:
        elsewhere = SimpleNamespace(upload_id=None)
        fresh = {"reserved": elsewhere, "known": None, "stored_order": None}
        return [SimpleNamespace(**fresh, orders=[], index_layers=[]) for _ in wanted]

    def store(self, draft: Any, layer: int, *tensors: torch.Tensor, hot: NDArray[np.bool_]) -> Pieces[None]:
        assert {each.device for each in tensors} == {DEVICE}
        assert hot.shape == tensors[2].shape
        yield from self._writer.store(draft, layer, *tensors, hot=hot)

    def commit(self, session_id: str, drafts: Sequence[Any]) -> Pieces[list[Any]]:
        yield None
        return []

    def abort(self, drafts: Sequence[Any], error: BaseException) -> None: ...


def test_a_prompt_behind_a_stored_one(model: Transformer) -> None:
    """What the store has comes from the host; what goes there has been ordered before."""
    store: Any = Store()
    prefill = Prefill(model, RECORDS, store, store, PACK_TOKENS, lambda: None, lambda: None)

    def read(layer: int) -> Pieces[tuple[torch.Tensor, torch.Tensor]]:
        yield None
        keys, values = torch.zeros(2, CHUNK_TOKENS, RECORDS.kv_heads, RECORDS.head_dim).bfloat16().unbind()
        return keys, values

    with torch.inference_mode():
        done = finish(prefill.run("session", PROMPT, prefix=StoredPrefix(bytes(32), CHUNK_TOKENS, read)))
    packs = [PACK_TOKENS, 256]  # packs are whole blocks of 256
    assert store.orders == [(layer, 2, tokens) for layer in range(model.config.layers) for tokens in packs]
    assert done.logits.device.type == "cpu"
    assert {each.device for pair in done.rest for each in pair} == {DEVICE}
    assert {each.device for each in done.last_query} == {DEVICE}


def test_a_step(model: Transformer) -> None:
    products = ReferenceProducts(model, 4, 1, "compute")
    products.place([1, 2], [3, 4])
    products.embed(2)
    for layer in range(model.config.layers):
        products.layer(layer, 2, speculate=True)
    products.finish(2)
    assert products.logits.device == DEVICE


def test_tensors_of_two_devices_are_found_out(model: Transformer) -> None:
    with torch.inference_mode(), pytest.raises(RuntimeError, match="expected all tensors on one device"):
        model.embed(torch.arange(4))
