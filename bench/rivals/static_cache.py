"""transformers with a StaticCache of as many places as the context has tokens, bfloat16."""

from __future__ import annotations

import torch

from bench.rivals.problem import Problem, Step


def prepare(problem: Problem) -> Step:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(problem.checkpoint, dtype=torch.bfloat16).eval()
    cache = transformers.StaticCache(config=model.config, max_cache_len=problem.context)
    shape = problem.model.config
    cache.early_initialization(1, shape.kv_heads, shape.head_dim, torch.bfloat16, torch.device("cpu"))
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    last = problem.context - 1
    token, position = torch.tensor([[7]]), torch.tensor([[last]])

    @torch.inference_mode()
    def step() -> object:
        for layer in cache.layers:
            layer.cumulative_length.fill_(last)
        return model(input_ids=token, position_ids=position, past_key_values=cache, use_cache=True).logits

    return step
