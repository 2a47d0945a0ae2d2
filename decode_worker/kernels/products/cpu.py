"""The products in one native call per layer (csrc/cpu/products.h)."""

from __future__ import annotations

from torch import Tensor

from decode_worker import _native
from decode_worker.kernels.products.base import PRODUCTS, Products
from decode_worker.kernels.products.int8 import quantised
from decode_worker.model.checkpoint import LayerWeights
from decode_worker.model.transformer import Transformer


@PRODUCTS.register("cpu")
class CpuProducts(Products):
    """Float32 activations; weights are read where the model has them, or as int8 copies of the layers' matrices.

    A row's results depend neither on the other rows nor on `threads`, bit for bit."""

    def __init__(self, model: Transformer, batch: int, threads: int, weights: str) -> None:
        super().__init__(model, batch)
        config, own = model.config, model.weights
        self._native = _native.Products(
            embedding=_native.Matrix(own.embedding),
            layers=[_layer(layer, weights) for layer in own.layers],
            final_norm=own.final_norm.float(),
            head=_native.Matrix(own.head),
            tokens=self.tokens,
            positions=self.positions,
            query=self.query,
            next_query=self.next_query,
            key=self.key,
            value=self.value,
            attention=self.attention,
            logits=self.logits,
            frequencies=config.rope.inverse_frequencies(model.declared_max),
            rotation_factor=config.rope.attention_factor,
            norm_eps=config.norm_eps,
            positions_max=model.declared_max,
            threads=threads,
        )

    def embed(self, rows: int) -> None:
        self._native.embed(rows)

    def layer(self, layer: int, rows: int, speculate: bool) -> None:
        self._native.layer(layer, rows, speculate)

    def peek(self, layer: int, rows: int) -> None:
        self._native.peek(layer, rows)

    def finish(self, rows: int) -> None:
        self._native.finish(rows)


def _layer(layer: LayerWeights, weights: str) -> _native.ProductsLayer:
    def matrix(values: Tensor, bias: Tensor | None) -> _native.Matrix:
        if weights == "int8":
            values, scales = quantised(values)
            return _native.Matrix(values, scales, _float(bias))
        return _native.Matrix(values, None, _float(bias))

    return _native.ProductsLayer(
        attention_norm=layer.attention_norm.float(),
        qkv=matrix(layer.qkv, layer.qkv_bias),
        q_norm=_float(layer.q_norm),
        k_norm=_float(layer.k_norm),
        output=matrix(layer.output, layer.output_bias),
        mlp_norm=layer.mlp_norm.float(),
        gate_up=matrix(layer.gate_up, layer.gate_up_bias),
        down=matrix(layer.down, layer.down_bias),
    )


def _float(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.float()
