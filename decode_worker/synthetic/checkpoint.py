"""A random Llama checkpoint with tokenizer, which our model and transformers load alike."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

# Shape B8 of docs/performance.md.
B8: dict[str, int] = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 1 << 20,
    "rope_theta": 1_000_000,
}
WEIGHT_SCALE = 1.3  # attention that is neither flat nor one-hot
FIXED = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def random_checkpoint(directory: Path, shape: Mapping[str, int], seed: int) -> Path:
    """Writes config.json, model.safetensors (bfloat16) and tokenizer.json (word `w17` is token 17); `shape`: as B8."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _weight(size, generator) for name, size in _sizes(shape)}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps({**FIXED, **shape}))
    words = {f"w{token}": token for token in range(shape["vocab_size"])}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


def _weight(size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    return (torch.randn(size, generator=generator) * WEIGHT_SCALE * size[1] ** -0.5).to(torch.bfloat16)


def _sizes(shape: Mapping[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, ffn, d = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    query, kv = shape["num_attention_heads"] * d, shape["num_key_value_heads"] * d
    yield "model.embed_tokens.weight", (shape["vocab_size"], hidden)
    yield "lm_head.weight", (shape["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    for layer in range(shape["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", (hidden,)
        yield f"{name}.post_attention_layernorm.weight", (hidden,)
        yield f"{name}.self_attn.q_proj.weight", (query, hidden)
        yield f"{name}.self_attn.k_proj.weight", (kv, hidden)
        yield f"{name}.self_attn.v_proj.weight", (kv, hidden)
        yield f"{name}.self_attn.o_proj.weight", (hidden, query)
        yield f"{name}.mlp.gate_proj.weight", (ffn, hidden)
        yield f"{name}.mlp.up_proj.weight", (ffn, hidden)
        yield f"{name}.mlp.down_proj.weight", (hidden, ffn)
