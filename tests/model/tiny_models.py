"""Tiny random checkpoints in every supported architecture, as transformers saves them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from decode_worker.model.attention import causal_attention
from decode_worker.model.transformer import Transformer

VOCAB = 199
THETA = 10000.0
MAX_POSITIONS = 256
ORIGINAL_POSITIONS = 32

ARCHITECTURES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama2": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"num_key_value_heads": 4},
    ),
    "llama3": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "mistral": (
        transformers.MistralConfig,
        transformers.MistralForCausalLM,
        {"sliding_window": None},
    ),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {}),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM, {}),
    "phi4-mini": (transformers.Phi3Config, transformers.Phi3ForCausalLM, {}),
}


def rope_parameters(scaling: str, rotary_dim: int) -> dict[str, Any]:
    """``rope_parameters`` of transformers 5 for one of our scalings."""
    pairs = torch.arange(rotary_dim // 2)
    scalings: dict[str, dict[str, Any]] = {
        "default": {},
        "linear": {"factor": 4.0},
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL_POSITIONS,
        },
        "yarn": {
            "factor": 8.0,
            "original_max_position_embeddings": ORIGINAL_POSITIONS,
            "beta_fast": 8.0,
        },
        "longrope": {
            "short_factor": (1.0 + pairs / 50).tolist(),
            "long_factor": (1.5 + pairs / 5).tolist(),
            "original_max_position_embeddings": ORIGINAL_POSITIONS,
        },
    }
    return {"rope_type": scaling, "rope_theta": THETA} | scalings[scaling]


def tiny_model(architecture: str, scaling: str = "default", head_dim: int = 64, seed: int = 0, **sizes: Any) -> Any:
    """A transformers model whose random weights leave no term of the arithmetic without effect."""
    config_class, model_class, own = ARCHITECTURES[architecture]
    partial = 0.75 if architecture == "phi4-mini" else 1.0
    rope = rope_parameters(scaling, int(head_dim * partial))
    if architecture in ("phi3", "phi4-mini"):
        rope["partial_rotary_factor"] = partial
        own = own | {"original_max_position_embeddings": ORIGINAL_POSITIONS}
    config = config_class(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 4 * head_dim,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": head_dim,
            "max_position_embeddings": MAX_POSITIONS,
            "rms_norm_eps": 1e-5,
            "rope_parameters": rope,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }
        | own
        | sizes
    )
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                parameter.copy_(noise * parameter.shape[1] ** -0.5 * 1.5)
            else:
                parameter.copy_(noise * 0.3 + (1.0 if name.endswith("norm.weight") else 0.0))
    return model


def save(model: Any, directory: Path, **options: Any) -> Path:
    model.save_pretrained(directory, **options)
    return directory


class CachedModel:
    """A Transformer with the simplest KV cache: a growing list per layer."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.keys: list[list[Tensor]] = [[] for _ in range(model.config.layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(model.config.layers)]

    def step(self, ids: Tensor, first: int, base: int = 0) -> Tensor:
        """Logits of ``ids`` at positions base + first onwards, after ``first`` cached tokens."""
        positions = torch.arange(base + first, base + first + len(ids))
        x = self.model.embed(ids)
        for layer in range(self.model.config.layers):
            q, k, v = self.model.qkv(layer, x, positions)
            self.keys[layer].append(k)
            self.values[layer].append(v)
            attention = causal_attention(
                q, torch.cat(self.keys[layer]), torch.cat(self.values[layer]), first,
                self.model.scale,
            )  # fmt: skip
            x = self.model.finish(layer, x, attention)
        return self.model.logits(x)


def decode_logits(step: Callable[[Tensor, int], Tensor], ids: Tensor, chunks: list[int]) -> Tensor:
    """All logits [len(ids), vocab] when ``ids`` arrive in ``chunks`` and then one by one."""
    sizes = chunks + [1] * (len(ids) - sum(chunks))
    pieces, first = [], 0
    for size in sizes:
        pieces.append(step(ids[first : first + size], first))
        first += size
    return torch.cat(pieces)
