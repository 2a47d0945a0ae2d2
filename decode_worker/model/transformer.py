"""The layers of a decoder-only transformer, without its attention: the KV store feeds that."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from decode_worker.model import rope
from decode_worker.model.checkpoint import Checkpoint, LayerWeights, Weights
from decode_worker.model.config import ModelConfig


class _QueryWeights(NamedTuple):
    """The rows of LayerWeights.qkv that make the query, sliced once instead of per step."""

    weight: Tensor
    bias: Tensor | None


class Transformer:
    """The arithmetic of a model, one layer and one phase per call, for T tokens at any positions.

    A step is embed; then for each layer qkv, attention by the caller with ``scale``, and finish;
    then logits. Call it under torch.inference_mode. All activations have ``dtype`` and live on the
    weights' device. No call changes its arguments, and no state is kept between calls.
    """

    def __init__(self, config: ModelConfig, weights: Weights, declared_max: int) -> None:
        """Raises CheckpointError when ``config`` cannot compute ``declared_max`` tokens exactly."""
        config.check_context(declared_max)
        self.config = config
        self.declared_max = declared_max
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self.scale = config.head_dim**-0.5
        self.weights = weights
        self._layers = weights.layers
        self._rotary = rope.RotaryTable(config.rope, declared_max, self.dtype, self.device)
        self._queries = [self._query_weights(layer) for layer in weights.layers]
        self._qk_norms = [self._qk_norm_weights(layer) for layer in weights.layers]

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        declared_max: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "Transformer":
        """Loads the weights as ``dtype`` (float32 or bfloat16) for contexts up to declared_max."""
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"compute dtype is {dtype}; it must be torch.float32 or torch.bfloat16")
        checkpoint.config.check_context(declared_max)
        return cls(checkpoint.config, checkpoint.weights(dtype, torch.device(device)), declared_max)

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids int64 [T] -> x [T, hidden]."""
        return self.weights.embedding.index_select(0, ids)

    def qkv(self, layer: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, hidden], positions int64 [T] -> q [T, q_heads, d], k and v [T, kv_heads, d].

        Input norm, projection, bias, QK norm and RoPE are applied. q, k and v are views of shared
        buffers: each row is contiguous, rows are further apart.
        """
        config, weights = self.config, self._layers[layer]
        rows = F.linear(self._norm(x, weights.attention_norm), weights.qkv, weights.qkv_bias)
        heads = rows.view(len(x), -1, config.head_dim)
        rotated, v = heads.split((config.q_heads + config.kv_heads, config.kv_heads), 1)
        norm = self._qk_norms[layer]
        if norm is not None:
            rotated = self._norm(rotated, None) * norm
        rotated = rope.apply(rotated, *self._rotary.cos_sin(positions))
        q, k = rotated.split((config.q_heads, config.kv_heads), 1)
        return q, k, v

    def query(self, layer: int, x: Tensor, positions: Tensor) -> Tensor:
        """The q [T, q_heads, d] of ``qkv`` alone.

        Given the x of layer - 1, it is the speculative query (InfiniGen): close to the true one,
        because a layer changes x little.
        """
        config, weights = self.config, self._queries[layer]
        rows = F.linear(self._norm(x, self._layers[layer].attention_norm), weights.weight, weights.bias)
        q = rows.view(len(x), config.q_heads, config.head_dim)
        norm = self._qk_norms[layer]
        if norm is not None:
            q = self._norm(q, None) * norm[: config.q_heads]
        return rope.apply(q, *self._rotary.cos_sin(positions))

    def finish(self, layer: int, x: Tensor, attention: Tensor) -> Tensor:
        """The rest of the layer: x [T, hidden], attention [T, q_heads, d] -> next x [T, hidden]."""
        weights = self._layers[layer]
        x = F.linear(attention.reshape(len(x), -1), weights.output, weights.output_bias).add_(x)
        gate, up = F.linear(self._norm(x, weights.mlp_norm), weights.gate_up, weights.gate_up_bias).chunk(2, -1)
        return F.linear(F.silu(gate).mul_(up), weights.down, weights.down_bias).add_(x)

    def logits(self, x: Tensor) -> Tensor:
        """x [T, hidden] after the last layer -> logits float32 [T, vocab]."""
        return F.linear(self._norm(x, self.weights.final_norm), self.weights.head).float()

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, self.config.norm_eps)

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
