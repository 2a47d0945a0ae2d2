"""A random checkpoint with tokenizer: what a benchmark loads into our model and into transformers alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

# A shape is what transformers' configuration of its `model_type` takes; docs/performance.md names both.
Shape = Mapping[str, float | str]
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
    "rope_theta": 1e6,
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
    "rope_theta": 1e6,
}
WEIGHT_SCALE = 1.3  # attention that is neither flat nor one-hot
BIAS_SCALE = 0.1


def random_checkpoint(directory: Path, shape: Shape, seed: int) -> Path:
    """Writes config.json, model.safetensors (bfloat16) and tokenizer.json (word `w17` is token 17)."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**shape)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                parameter.copy_(noise * WEIGHT_SCALE * parameter.shape[1] ** -0.5)
            elif name.endswith("bias"):
                parameter.copy_(noise * BIAS_SCALE)
    model.to(torch.bfloat16).save_pretrained(directory)
    words = {f"w{token}": token for token in range(int(shape["vocab_size"]))}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory
