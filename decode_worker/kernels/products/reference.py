"""The products in plain torch: what the other sets are compared with."""

from __future__ import annotations

import torch

from decode_worker.kernels.products.base import PRODUCTS, Products
from decode_worker.kernels.products.int8 import rounded
from decode_worker.model.transformer import Transformer


@PRODUCTS.register("triton")  # beside those kernels: on their device torch has the products
@PRODUCTS.register("reference")
class ReferenceProducts(Products):
    """Calls the model's own methods, in its dtype."""

    def __init__(self, model: Transformer, batch: int, threads: int, weights: str) -> None:
        """`threads` is torch's own business here."""
        super().__init__(model, batch)
        if weights == "int8":
            model = Transformer(model.config, rounded(model.weights), model.declared_max, model.operations)
        self._model = model
        # Fixed, since parts of a step may be replayed and others not.
        self._x = torch.empty(batch, model.config.hidden, dtype=model.dtype, device=model.device)

    @torch.inference_mode()
    def embed(self, rows: int) -> None:
        self._x[:rows] = self._model.embed(self.tokens[:rows])

    @torch.inference_mode()
    def layer(self, layer: int, rows: int, speculate: bool) -> None:
        if layer > 0:
            self._end(layer - 1, rows)
        x, at = self._x[:rows], self.positions[:rows]
        for target, made in zip((self.query, self.key, self.value), self._model.qkv(layer, x, at), strict=True):
            target[:rows] = made
        if speculate and layer + 1 < self._model.config.layers:
            self.next_query[:rows] = self._model.query(layer + 1, x, at)

    @torch.inference_mode()
    def peek(self, layer: int, rows: int) -> None:
        self.next_query[:rows] = self._model.query(layer, self._x[:rows], self.positions[:rows])

    @torch.inference_mode()
    def finish(self, rows: int) -> None:
        self._end(self._model.config.layers - 1, rows)
        self.logits[:rows] = self._model.logits(self._x[:rows])

    def _end(self, layer: int, rows: int) -> None:
        self._model.finish(layer, self._x[:rows], self.attention[:rows].to(self._model.dtype))
