"""The forward pass of a Llama, Qwen2 or Qwen3 decoder in float32.

Keys (after RoPE) and values are rounded to the storage dtype before anything attends to them, in prefill
and in every decode step, its own token's included. With storage "float32" there is no difference.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .checkpoint import Config, read_config, read_tensors

PREFILL_ROWS = 256  # queries whose scores are held at once


@dataclass(frozen=True)
class Prefill:
    """What a prompt of T tokens leaves behind."""

    keys: list[np.ndarray]  # per layer, rounded, [T, H, d]
    values: list[np.ndarray]  # per layer, rounded, [T, H, d]
    last_inputs: np.ndarray  # input of every layer at the last token, [layers, hidden]
    logits: np.ndarray  # of the last token, [vocabulary]


class Model:
    """Stateless pieces of the forward pass; x is always [T, hidden], positions [T]."""

    def __init__(self, checkpoint_dir: str | Path, storage: str = "float32") -> None:
        self.storage = storage
        self.config: Config = read_config(Path(checkpoint_dir))
        self.scale = np.float32(self.config.head_dim**-0.5)
        self._tensors = read_tensors(Path(checkpoint_dir))
        self._inverse_frequencies = inverse_frequencies(self.config)

    def embed(self, ids: np.ndarray) -> np.ndarray:
        """Token ids [T] to [T, hidden]."""
        return self._tensors["model.embed_tokens.weight"][ids]

    def query(self, layer: int, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Queries [T, H, g, d] of a layer: its input norm, W_Q, bias, QK norm, RoPE."""
        c = self.config
        queries = self._project(layer, "q", x).reshape(len(x), c.query_heads, c.head_dim)
        queries = self._rotate(self._head_norm(layer, "q", queries), positions)
        return queries.reshape(len(x), c.kv_heads, c.group, c.head_dim)

    def key_value(self, layer: int, x: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keys (after RoPE) and values, each [T, H, d], unrounded."""
        shape = (len(x), self.config.kv_heads, self.config.head_dim)
        keys = self._head_norm(layer, "k", self._project(layer, "k", x).reshape(shape))
        return self._rotate(keys, positions), self._project(layer, "v", x).reshape(shape)

    def finish(self, layer: int, x: np.ndarray, attended: np.ndarray) -> np.ndarray:
        """Output projection of `attended` [T, H, g, d], MLP, and both residuals."""
        x = x + self._linear(f"model.layers.{layer}.self_attn.o_proj", attended.reshape(len(x), -1))
        return x + self._mlp(layer, self._norm(f"{layer}.post_attention_layernorm", x))

    def logits(self, x: np.ndarray) -> np.ndarray:
        """[T, vocabulary]; the embedding serves where there is no lm_head."""
        x = rms_norm(x, self._tensors["model.norm.weight"], self.config.norm_eps)
        head = self._tensors.get("lm_head.weight", self._tensors["model.embed_tokens.weight"])
        return x @ head.T

    def prefill(self, ids: np.ndarray) -> Prefill:
        """Full causal attention over the prompt `ids` [T]."""
        positions = np.arange(len(ids))
        x = self.embed(ids)
        keys, values, last_inputs = [], [], []
        for layer in range(self.config.layers):
            last_inputs.append(x[-1])
            key, value = (round_to(each, self.storage) for each in self.key_value(layer, x, positions))
            query = self.query(layer, x, positions)
            x = self.finish(layer, x, causal_attention(query, key, value, self.scale))
            keys.append(key)
            values.append(value)
        return Prefill(keys, values, np.stack(last_inputs), self.logits(x[-1:])[0])

    def _project(self, layer: int, name: str, x: np.ndarray) -> np.ndarray:
        normed = self._norm(f"{layer}.input_layernorm", x)
        return self._linear(f"model.layers.{layer}.self_attn.{name}_proj", normed)

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        y = x @ self._tensors[f"{name}.weight"].T
        bias = self._tensors.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return rms_norm(x, self._tensors[f"model.layers.{name}.weight"], self.config.norm_eps)

    def _head_norm(self, layer: int, name: str, x: np.ndarray) -> np.ndarray:
        weight = self._tensors.get(f"model.layers.{layer}.self_attn.{name}_norm.weight")
        return x if weight is None else rms_norm(x, weight, self.config.norm_eps)

    def _rotate(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return rotate(x, positions, self._inverse_frequencies)

    def _mlp(self, layer: int, x: np.ndarray) -> np.ndarray:
        prefix = f"model.layers.{layer}.mlp"
        gate = self._linear(f"{prefix}.gate_proj", x)
        silu = gate * np.exp(-np.logaddexp(0, -gate))
        return self._linear(f"{prefix}.down_proj", silu * self._linear(f"{prefix}.up_proj", x))


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Root-mean-square norm over the last axis."""
    mean = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
    return x / np.sqrt(mean + np.float32(eps)) * weight


def inverse_frequencies(config: Config) -> np.ndarray:
    """RoPE's angle per position, float32 [d / 2], with llama3's scaling where configured."""
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    plain = config.rope_theta**-exponents
    if not config.rope_scaling:
        return plain.astype(np.float32)
    scaling = config.rope_scaling
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * plain / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (plain * (smooth + (1 - smooth) / scaling["factor"])).astype(np.float32)


def rotate(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """RoPE on x [T, heads, d] in the half-split layout; angles are float32 products."""
    angles = positions.astype(np.float32)[:, None, None] * frequencies
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def softmax(scores: np.ndarray) -> np.ndarray:
    """Over the last axis, float32, summed in float64."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True, dtype=np.float64)).astype(np.float32)


def attention(query: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: np.float32) -> np.ndarray:
    """One KV head: query [g, d] over keys and values [n, d], giving [g, d]."""
    return softmax(scale * (query @ keys.T)) @ values


def causal_attention(query: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: np.float32) -> np.ndarray:
    """query [T, H, g, d] over keys and values [T, H, d], each token up to itself: [T, H, g, d]."""
    out = np.empty_like(query)
    for start in range(0, len(query), PREFILL_ROWS):
        stop = min(start + PREFILL_ROWS, len(query))
        future = np.arange(stop) > np.arange(start, stop)[:, None]
        for head in range(keys.shape[1]):
            rows = query[start:stop, head].swapaxes(0, 1)
            scores = scale * (rows @ keys[:stop, head].T)
            mixed = softmax(np.where(future, -np.inf, scores)) @ values[:stop, head]
            out[start:stop, head] = mixed.swapaxes(0, 1)
    return out


def round_to(x: np.ndarray, storage: str) -> np.ndarray:
    """x (finite float32) rounded to the storage dtype, to nearest even, and widened again."""
    if storage == "float32":
        return x
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
