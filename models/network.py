"""The retriever's network in plain torch: Llama with grouped queries, transformers' names.

Training, chunked prefill and questions on a shared prefix need control over positions, masks and
the K/V of each layer, which is little code for a network of this size.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """The fields of a Llama configuration that fix the network."""

    vocab_size: int = 4096
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 384
    rope_theta: float = 1e8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-6

    @property
    def group(self) -> int:
        return self.num_attention_heads // self.num_key_value_heads

    @staticmethod
    def of(config: dict) -> Shape:
        """From a parsed config.json."""
        fields = {name: config[name] for name in asdict(Shape()) if name in config}
        fields.setdefault("rope_theta", config.get("rope_parameters", {}).get("rope_theta", 1e8))
        return Shape(**fields)


def frequencies(shape: Shape) -> Tensor:
    """RoPE's angles per position: [head_dim / 2]."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    return shape.rope_theta**-half


def rotation(shape: Shape, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of each position, [..., head_dim]; float64 keeps 131,072 positions exact."""
    angles = positions.double()[..., None] * frequencies(shape)
    angles = torch.cat((angles, angles), -1)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Network(torch.nn.Module):
    """One parameter per tensor of the checkpoint; methods take and give [batch, token, ...]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        hidden, inner = shape.hidden_size, shape.intermediate_size
        query = shape.num_attention_heads * shape.head_dim
        key = shape.num_key_value_heads * shape.head_dim
        sizes = {"embed_tokens.weight": (shape.vocab_size, hidden), "norm.weight": (hidden,)}
        for layer in range(shape.num_hidden_layers):
            sizes |= {
                f"layers.{layer}.{name}.weight": size
                for name, size in {
                    "input_layernorm": (hidden,),
                    "self_attn.q_proj": (query, hidden),
                    "self_attn.k_proj": (key, hidden),
                    "self_attn.v_proj": (key, hidden),
                    "self_attn.o_proj": (hidden, query),
                    "post_attention_layernorm": (hidden,),
                    "mlp.gate_proj": (inner, hidden),
                    "mlp.up_proj": (inner, hidden),
                    "mlp.down_proj": (hidden, inner),
                }.items()
            }
        # Parameter names must not contain dots.
        self.weights = torch.nn.ParameterDict(
            {
                name.replace(".", "/"): torch.nn.Parameter(
                    torch.ones(size) if len(size) == 1 else torch.randn(size) * 0.02
                )
                for name, size in sizes.items()
            }
        )

    def weight(self, layer: int, name: str) -> Tensor:
        return self.weights[f"layers/{layer}/{name.replace('.', '/')}/weight"]

    def tensors(self) -> dict[str, Tensor]:
        """The checkpoint: transformers' names, detached."""
        return {
            "model." + name.replace("/", "."): value.detach().clone().contiguous()
            for name, value in self.weights.items()
        }

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.weights.items():
                parameter.copy_(tensors["model." + name.replace("/", ".")])

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.shape.rms_norm_eps)

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weights["embed_tokens/weight"])

    def logits(self, x: Tensor) -> Tensor:
        return self.norm(x, self.weights["norm/weight"]) @ self.weights["embed_tokens/weight"].T

    def queries(self, layer: int, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotated queries of the layer's input: [batch, heads, token, head_dim]."""
        x = self.norm(x, self.weight(layer, "input_layernorm"))
        q = F.linear(x, self.weight(layer, "self_attn.q_proj"))
        return rotate(q.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2), cos, sin)

    def keys_values(self, layer: int, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, of the layer's input: [batch, kv_heads, token, head_dim]."""
        x = self.norm(x, self.weight(layer, "input_layernorm"))
        k, v = (
            F.linear(x, self.weight(layer, f"self_attn.{name}_proj"))
            .unflatten(-1, (-1, self.shape.head_dim))
            .transpose(1, 2)
            for name in "kv"
        )
        return rotate(k, cos, sin), v

    def finish(self, layer: int, x: Tensor, attended: Tensor) -> Tensor:
        """Output projection and MLP with their residuals; attended [batch, heads, token, dim]."""
        heads = attended.transpose(1, 2).flatten(2)
        x = x + F.linear(heads, self.weight(layer, "self_attn.o_proj"))
        y = self.norm(x, self.weight(layer, "post_attention_layernorm"))
        gate = F.silu(F.linear(y, self.weight(layer, "mlp.gate_proj")))
        up = F.linear(y, self.weight(layer, "mlp.up_proj"))
        return x + F.linear(gate * up, self.weight(layer, "mlp.down_proj"))
