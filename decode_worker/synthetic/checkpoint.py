"""A random checkpoint with tokenizer, which our model and transformers load alike."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

# A shape is what a config.json of its `model_type` says of sizes; docs/performance.md names both.
Shape = Mapping[str, int | str]
POSITIONS_MAX = 1 << 21
B8: Shape = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": POSITIONS_MAX,
    "rope_theta": 1_000_000,
}
Q05: Shape = {
    "model_type": "qwen2",
    "vocab_size": 4096,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": POSITIONS_MAX,
    "rope_theta": 1_000_000,
}
LLAMA3_8B: Shape = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": POSITIONS_MAX,
    "rope_theta": 500_000,
}
QWEN25_14B: Shape = {
    "model_type": "qwen2",
    "vocab_size": 152_064,
    "hidden_size": 5120,
    "intermediate_size": 13_824,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": POSITIONS_MAX,
    "rope_theta": 1_000_000,
}
WEIGHT_SCALE = 1.3  # attention that is neither flat nor one-hot
BIAS_SCALE = 0.1
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
FIXED = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "dtype": "bfloat16"}


def random_checkpoint(directory: Path, shape: Shape, seed: int) -> Path:
    """Writes config.json, model.safetensors (bfloat16) and tokenizer.json (word `w17` is token 17)."""
    describe(directory, shape)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _tensor(name, size, generator) for name, size in _sizes(shape)}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def describe(directory: Path, shape: Shape) -> None:
    """config.json and tokenizer.json alone."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"architectures": [ARCHITECTURES[str(shape["model_type"])]], **FIXED, **shape}
    (directory / "config.json").write_text(json.dumps(config))
    words = {f"w{token}": token for token in range(int(shape["vocab_size"]))}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))


def _tensor(name: str, size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(size, dtype=torch.bfloat16)
    scale = BIAS_SCALE if name.endswith("bias") else WEIGHT_SCALE * size[1] ** -0.5
    return (torch.randn(size, generator=generator) * scale).to(torch.bfloat16)


def _sizes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, ffn, d, q_heads, kv_heads = (
        int(shape[key])
        for key in ("hidden_size", "intermediate_size", "head_dim", "num_attention_heads", "num_key_value_heads")
    )
    vocab, projections = (
        int(shape["vocab_size"]),
        {"q_proj": q_heads * d, "k_proj": kv_heads * d, "v_proj": kv_heads * d},
    )
    yield "model.embed_tokens.weight", (vocab, hidden)
    yield "lm_head.weight", (vocab, hidden)
    yield "model.norm.weight", (hidden,)
    for layer in range(int(shape["num_hidden_layers"])):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", (hidden,)
        yield f"{name}.post_attention_layernorm.weight", (hidden,)
        for projection, width in projections.items():
            yield f"{name}.self_attn.{projection}.weight", (width, hidden)
            if shape["model_type"] == "qwen2":
                yield f"{name}.self_attn.{projection}.bias", (width,)
        yield f"{name}.self_attn.o_proj.weight", (hidden, q_heads * d)
        yield f"{name}.mlp.gate_proj.weight", (ffn, hidden)
        yield f"{name}.mlp.up_proj.weight", (ffn, hidden)
        yield f"{name}.mlp.down_proj.weight", (hidden, ffn)
