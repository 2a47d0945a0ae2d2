"""The layers of a decoder-only transformer, without its attention: the KV store feeds that."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from decode_worker.model.checkpoint import Checkpoint, LayerWeights, Weights
from decode_worker.model.config import ModelConfig
from decode_worker.model.operations import Operations, torch_operations


class _QueryWeights(NamedTuple):
    """The rows of LayerWeights.qkv that make the query, sliced once instead of per step."""

    weight: Tensor
    bias: Tensor | None


class Transformer:
    """The arithmetic of a model, one layer and one phase per call, for T tokens at any positions.

    A step is embed; then for each layer qkv, attention by the caller with ``scale``, and finish;
    then logits. Call it under torch.inference_mode. All activations have ``dtype`` and live on the
    weights' device. No call but finish changes its arguments, and no state is kept between calls.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, declared_max: int, operations: Operations | None = None
    ) -> None:
        """``operations``: made for these arguments and the weights' dtype; default: torch's.

        Raises CheckpointError when ``config`` cannot compute ``declared_max`` tokens exactly."""
        config.check_context(declared_max)
        self.config = config
        self.declared_max = declared_max
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self.scale = config.head_dim**-0.5
        self.operations = operations or torch_operations(config, declared_max, self.dtype, self.device)
        self.weights = weights
        self._layers = weights.layers
        self._queries = [self._query_weights(layer) for layer in weights.layers]
        self._qk_norms = [self._qk_norm_weights(layer) for layer in weights.layers]

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        declared_max: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        operations: Operations | None = None,
    ) -> "Transformer":
        """Loads the weights as ``dtype`` (float32 or bfloat16) for contexts up to declared_max."""
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"compute dtype is {dtype}; it must be torch.float32 or torch.bfloat16")
        checkpoint.config.check_context(declared_max)
        return cls(checkpoint.config, checkpoint.weights(dtype, torch.device(device)), declared_max, operations)

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids int64 [T] -> x [T, hidden]."""
        return self.weights.embedding.index_select(0, ids)

    def qkv(self, layer: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, hidden], positions int64 [T] -> q [T, q_heads, d], k and v [T, kv_heads, d].

        Input norm, projection, bias, QK norm and RoPE are applied. q, k and v are views of shared
        buffers: each row is contiguous, rows are further apart.
        """
        config, weights = self.config, self._layers[layer]
        rows = F.linear(self.operations.norm(x, weights.attention_norm), weights.qkv, weights.qkv_bias)
        heads = rows.view(len(x), -1, config.head_dim)
        rotated, v = heads.split((config.q_heads + config.kv_heads, config.kv_heads), 1)
        q, k = self._rotated(layer, rotated, positions).split((config.q_heads, config.kv_heads), 1)
        return q, k, v

    def query(self, layer: int, x: Tensor, positions: Tensor) -> Tensor:
        """The q [T, q_heads, d] of ``qkv`` alone.

        Given the x of layer - 1, it is the speculative query (InfiniGen): close to the true one,
        because a layer changes x little.
        """
        config, weights = self.config, self._queries[layer]
        rows = F.linear(self.operations.norm(x, self._layers[layer].attention_norm), weights.weight, weights.bias)
        return self._rotated(layer, rows.view(len(x), config.q_heads, config.head_dim), positions)

    def finish(self, layer: int, x: Tensor, attention: Tensor) -> Tensor:
        """The rest of the layer: x [T, hidden], attention [T, q_heads, d] -> next x [T, hidden], in x's memory."""
        weights, operations = self._layers[layer], self.operations
        made = F.linear(attention.reshape(len(x), -1), weights.output, weights.output_bias)
        normed = operations.add_norm(x, made, weights.mlp_norm)
        inner = operations.silu_mul(F.linear(normed, weights.gate_up, weights.gate_up_bias))
        return x.add_(F.linear(inner, weights.down, weights.down_bias))

    def logits(self, x: Tensor) -> Tensor:
        """x [T, hidden] after the last layer -> logits float32 [T, vocab]."""
        return F.linear(self.operations.norm(x, self.weights.final_norm), self.weights.head).float()

    def _rotated(self, layer: int, heads: Tensor, positions: Tensor) -> Tensor:
        """QK norm, if there is one, and RoPE of the query heads, or of these and the key heads; uses ``heads`` up."""
        weight = self._qk_norms[layer]
        if weight is not None:
            heads = self.operations.norm_heads(heads, weight[: heads.shape[1]])
        return self.operations.rotate(heads, positions)

    def _query_weights(self, layer: LayerWeights) -> _QueryWeights:
        rows = self.config.q_heads * self.config.head_dim
        bias = None if layer.qkv_bias is None else layer.qkv_bias[:rows]
        return _QueryWeights(layer.qkv[:rows], bias)

    def _qk_norm_weights(self, layer: LayerWeights) -> Tensor | None:
        """The norm weight of every q and k head [q_heads + kv_heads, d]: one product does both."""
        if layer.q_norm is None or layer.k_norm is None:
            return None
        q = layer.q_norm.expand(self.config.q_heads, -1)
        k = layer.k_norm.expand(self.config.kv_heads, -1)
        return torch.cat((q, k))
