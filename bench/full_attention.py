"""torch's own full attention: what a GPU does with all KV in its memory, without a store."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from decode_worker.model.transformer import Transformer

CHUNK_TOKENS = 16 << 10  # of a prompt, outside attention: an intermediate of all of it would be tens of gigabytes


class FullAttention:
    """One token of each of `batch` rows at position `context` - 1 of a static cache that is full: what StaticCache and
    scaled_dot_product_attention do, over our layers in torch. K, V: bfloat16 [layers, 2, batch, H, context, d]."""

    def __init__(self, model: Transformer, batch: int, context: int) -> None:
        config = model.config
        shape = (config.layers, 2, batch, config.kv_heads, context, config.head_dim)
        self._model, self._last = model, context - 1
        self._kv = torch.empty(shape, dtype=model.dtype, device=model.device).normal_()
        self._tokens = torch.full((batch,), 7, device=model.device)
        self._positions = torch.full((batch,), self._last, device=model.device)

    @torch.inference_mode()
    def step(self) -> torch.Tensor:
        """Logits float32 [batch, vocab]. The same launches each time."""
        model, last = self._model, self._last
        x = model.embed(self._tokens)
        for layer, (keys, values) in enumerate(self._kv):
            q, k, v = model.qkv(layer, x, self._positions)
            keys[:, :, last], values[:, :, last] = k, v
            out = F.scaled_dot_product_attention(q[:, :, None], keys, values, scale=model.scale, enable_gqa=True)
            x = model.finish(layer, x, out[:, :, 0])
        return model.logits(x)


@torch.inference_mode()
def prefill(model: Transformer, ids: torch.Tensor) -> torch.Tensor:
    """A prompt at once, its K and V kept in the device's memory: logits float32 [vocab] behind it."""
    positions = torch.arange(len(ids), device=model.device)
    x, kept = model.embed(ids), []
    for layer in range(model.config.layers):
        parts = [
            model.qkv(layer, *part)
            for part in zip(x.split(CHUNK_TOKENS), positions.split(CHUNK_TOKENS), strict=True)
        ]  # fmt: skip
        q, k, v = (torch.cat(each).transpose(0, 1)[None] for each in zip(*parts, strict=True))
        kept.append((k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=model.scale, enable_gqa=True)
        rows = out[0].transpose(0, 1)
        chunks = zip(x.split(CHUNK_TOKENS), rows.split(CHUNK_TOKENS), strict=True)
        x = torch.cat([model.finish(layer, *chunk) for chunk in chunks])
    return model.logits(x[-1:])[0]
