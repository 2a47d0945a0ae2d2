"""A Llama-like checkpoint on disk: `config.json` and `*.safetensors`, read into float32 arrays."""

import json
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Config:
    """Shape and constants of a Llama, Qwen2 or Qwen3 decoder."""

    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any]  # {} for default RoPE, else the keys of rope_type "llama3"

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query_heads // self.kv_heads


def read_config(directory: Path) -> Config:
    """Read `directory/config.json`; ValueError names a setting that the oracle does not compute."""
    raw = json.loads((directory / "config.json").read_text())
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {raw['hidden_act']!r}: only 'silu' is known")
    if raw.get("use_sliding_window"):
        raise ValueError("use_sliding_window true: only full attention is known")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f"rope_type {kind!r}: only 'default' and 'llama3' are known")
    query_heads = raw["num_attention_heads"]
    return Config(
        layers=raw["num_hidden_layers"],
        hidden=raw["hidden_size"],
        query_heads=query_heads,
        kv_heads=raw.get("num_key_value_heads") or query_heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // query_heads,
        norm_eps=raw["rms_norm_eps"],
        rope_theta=rope.get("rope_theta", raw.get("rope_theta", 10000.0)),
        rope_scaling=rope if kind == "llama3" else {},
    )


def read_tensors(directory: Path) -> dict[str, np.ndarray]:
    """All tensors of all `*.safetensors` in `directory`, widened to float32."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {directory}")
    return {name: array for file in files for name, array in _read_file(file).items()}


def _read_file(file: Path) -> dict[str, np.ndarray]:
    """One safetensors file: u64 header length, JSON header, then the tensors' bytes."""
    with file.open("rb") as stream:
        data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    base = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:base])
    header.pop("__metadata__", None)
    return {name: _widen(data, base, entry) for name, entry in header.items()}


def _widen(data: mmap.mmap, base: int, entry: dict[str, Any]) -> np.ndarray:
    """The tensor that a header entry describes, as a float32 array of its own."""
    begin, end = entry["data_offsets"]
    stored = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}.get(entry["dtype"])
    if stored is None:
        raise ValueError(f"dtype {entry['dtype']}: only F32, F16 and BF16 are known")
    dtype = np.dtype(stored)
    flat = np.frombuffer(data, dtype, (end - begin) // dtype.itemsize, base + begin)
    if entry["dtype"] == "BF16":
        flat = (flat.astype(np.uint32) << 16).view(np.float32)
    return flat.astype(np.float32).reshape(entry["shape"])
