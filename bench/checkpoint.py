"""A random Llama checkpoint with tokenizer: what a benchmark loads into our model and into transformers alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

# Shape B8 of docs/performance.md.
B8 = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 1 << 20,
    "rope_theta": 1e6,
}
WEIGHT_SCALE = 1.3  # attention that is neither flat nor one-hot


def random_checkpoint(directory: Path, shape: Mapping[str, float], seed: int) -> Path:
    """Writes config.json, model.safetensors and tokenizer.json (word `w17` is token 17)."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * WEIGHT_SCALE * parameter.shape[1] ** -0.5)
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
