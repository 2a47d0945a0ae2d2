"""A Hugging Face checkpoint directory: its tensors, their digest, the fingerprint of their KV."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from decode_worker.model.config import ModelConfig
from decode_worker.model.errors import CheckpointError
from decode_worker.model.json_object import JsonObject, canonical_json

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_STORED_DTYPES = ("F32", "F16", "BF16")
_HASH_THREADS = 4

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer in the compute dtype; matrices are [out, in], as checkpoints have them.

    ``qkv`` is [(q_heads + 2 * kv_heads) * head_dim, hidden] with the rows of q, k and v in this
    order, ``gate_up`` is [2 * ffn, hidden] with gate first; their parts are row slices.
    """

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True)
class Weights:
    """All weights: embedding and head [vocab, hidden], one tensor where they are tied; final_norm [hidden]."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor


@dataclass(frozen=True)
class Checkpoint:
    """A checked directory: every tensor of ``config`` is present once, with its shape and a dtype.

    ``files`` maps each tensor name to the safetensors file that holds it.
    """

    config: ModelConfig
    config_digest: str
    files: dict[str, Path]

    @classmethod
    def open(cls, directory: Path) -> "Checkpoint":
        """Reads config.json and the headers of the safetensors files, but no tensor data.

        Raises CheckpointError for a missing or truncated file, an architecture that is not
        supported, and missing, unexpected, misshapen or quantised tensors.
        """
        raw = JsonObject.read(directory / "config.json")
        config = ModelConfig.parse(raw)
        files = _locate_tensors(directory)
        _check_tensors(config, files)
        # The path that a checkpoint was saved under is a name, and a name is never identity.
        values = {key: value for key, value in raw.values.items() if key != "_name_or_path"}
        return cls(config, hashlib.sha256(canonical_json(values)).hexdigest(), files)

    @cached_property
    def weights_digest(self) -> str:
        """SHA-256 (hex) over the SHA-256 of every safetensors file, in the order of the digests.

        Reads every byte once per Checkpoint; file names do not take part.
        """
        paths = sorted(set(self.files.values()))
        with ThreadPoolExecutor(_HASH_THREADS) as pool:
            digests = sorted(pool.map(_file_digest, paths))
        return hashlib.sha256(b"".join(digests)).hexdigest()

    def fingerprint(
        self, declared_max: int, compute_dtype: torch.dtype, storage_dtype: str, layout_version: int
    ) -> bytes:
        """The 32 bytes that decide whether stored KV belongs to this model, never its name.

        ``declared_max`` counts only through the RoPE factor that it selects; ``storage_dtype``
        names the element type of stored records and ``layout_version`` their layout.
        """
        identity = {
            "weights": self.weights_digest,
            "config": self.config_digest,
            "compute_dtype": str(compute_dtype).removeprefix("torch."),
            "storage_dtype": storage_dtype,
            "rope": self.config.rope.choice(declared_max),
            "layout": layout_version,
        }
        return hashlib.sha256(canonical_json(identity)).digest()

    def weights(self, dtype: torch.dtype, device: torch.device) -> Weights:
        """Copies all tensors to ``device`` as ``dtype``, with q, k, v and gate, up side by side.

        Nothing keeps a map of the files: a file that changes later cannot change the model.
        """
        config, parts = self.config, _layer_parts(self.config)
        with _open_files(self.files) as handles:

            def read(names: list[str]) -> Tensor:
                return _copy(names, handles, dtype, device)

            def layer(index: int) -> LayerWeights:
                def field(name: str) -> Tensor:
                    return read([_layer_tensor(index, part) for part in parts[name]])

                def optional(name: str) -> Tensor | None:
                    return field(name) if name in parts else None

                return LayerWeights(
                    attention_norm=field("attention_norm"),
                    qkv=field("qkv"),
                    qkv_bias=optional("qkv_bias"),
                    q_norm=optional("q_norm"),
                    k_norm=optional("k_norm"),
                    output=field("output"),
                    output_bias=optional("output_bias"),
                    mlp_norm=field("mlp_norm"),
                    gate_up=field("gate_up"),
                    gate_up_bias=optional("gate_up_bias"),
                    down=field("down"),
                    down_bias=optional("down_bias"),
                )

            embedding = handles["model.embed_tokens.weight"].get_tensor("model.embed_tokens.weight")
            embedding = embedding.to(device, dtype, copy=True)
            return Weights(
                embedding=embedding,
                layers=tuple(layer(index) for index in range(config.layers)),
                final_norm=read(["model.norm.weight"]),
                head=embedding if config.tie_embeddings else read(["lm_head.weight"]),
            )


def _layer_tensor(layer: int, part: str) -> str:
    return f"model.layers.{layer}.{part}"


def _layer_parts(config: ModelConfig) -> dict[str, dict[str, Shape]]:
    """Field of LayerWeights -> the checkpoint's tensors that form it and their [out, in] shapes."""
    hidden, ffn, d = config.hidden, config.ffn, config.head_dim
    q, kv = config.q_heads * d, config.kv_heads * d
    if config.fused:
        qkv = {"self_attn.qkv_proj": q + 2 * kv}
        gate_up = {"mlp.gate_up_proj": 2 * ffn}
    else:
        qkv = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
        gate_up = {"mlp.gate_proj": ffn, "mlp.up_proj": ffn}
    output, down = {"self_attn.o_proj": hidden}, {"mlp.down_proj": hidden}

    def matrices(rows: dict[str, int], columns: int) -> dict[str, Shape]:
        return {f"{name}.weight": (count, columns) for name, count in rows.items()}

    def biases(rows: dict[str, int]) -> dict[str, Shape]:
        return {f"{name}.bias": (count,) for name, count in rows.items()}

    parts: dict[str, dict[str, Shape]] = {
        "attention_norm": {"input_layernorm.weight": (hidden,)},
        "qkv": matrices(qkv, hidden),
        "output": matrices(output, q),
        "mlp_norm": {"post_attention_layernorm.weight": (hidden,)},
        "gate_up": matrices(gate_up, hidden),
        "down": matrices(down, ffn),
    }
    if config.qkv_bias:
        parts["qkv_bias"] = biases(qkv)
    if config.output_bias:
        parts["output_bias"] = biases(output)
    if config.mlp_bias:
        parts["gate_up_bias"] = biases(gate_up)
        parts["down_bias"] = biases(down)
    if config.qk_norm:
        parts["q_norm"] = {"self_attn.q_norm.weight": (d,)}
        parts["k_norm"] = {"self_attn.k_norm.weight": (d,)}
    return parts


def _expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    tensors: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab, config.hidden),
        "model.norm.weight": (config.hidden,),
    }
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = (config.vocab, config.hidden)
    parts = _layer_parts(config)
    for layer in range(config.layers):
        for field in parts.values():
            tensors |= {_layer_tensor(layer, part): shape for part, shape in field.items()}
    return tensors


def _locate_tensors(directory: Path) -> dict[str, Path]:
    """Tensor name -> file, from the single file or, without one, from the index of the shards."""
    single = directory / _SINGLE
    if single.exists():
        with _open_file(single) as handle:
            return dict.fromkeys(handle.keys(), single)
    if not (directory / _INDEX).exists():
        raise CheckpointError(f"{directory} holds neither {_SINGLE} nor {_INDEX}; convert the weights to safetensors")
    weight_map = JsonObject.read(directory / _INDEX).child("weight_map")
    files: dict[str, Path] = {}
    for name, shard in weight_map.values.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            weight_map.fail(name, "the name of a file beside the index")
        files[name] = directory / shard
    for path in sorted(set(files.values())):
        with _open_file(path) as handle:
            present = set(handle.keys())
        listed = {name for name, file in files.items() if file == path}
        if present != listed:
            raise CheckpointError(
                f"{path}: its tensors are not those that {_INDEX} lists, for example "
                f"{min(present ^ listed)}; fetch index and shards again from one revision"
            )
    return files


def _check_tensors(config: ModelConfig, files: dict[str, Path]) -> None:
    expected = _expected_tensors(config)
    # Old Llama checkpoints carry frequencies, some tied ones a copy of the embedding.
    ignored = {name for name in files if name.endswith(".rotary_emb.inv_freq")}
    if config.tie_embeddings:
        ignored.add("lm_head.weight")
    missing, unexpected = expected.keys() - files.keys(), files.keys() - expected.keys() - ignored
    if missing:
        raise CheckpointError(
            f"tensor {min(missing)} is missing ({len(missing)} in all); config.json does not "
            "describe these weights, or a shard was left out: fetch the checkpoint again"
        )
    if unexpected:
        raise CheckpointError(
            f"tensor {min(unexpected)} is unexpected ({len(unexpected)} in all) for "
            f"{config.architecture} with {config.layers} layers; correct config.json"
        )
    with _open_files(files) as handles:
        for name, shape in expected.items():
            stored = handles[name].get_slice(name)
            if tuple(stored.get_shape()) != shape:
                raise CheckpointError(
                    f"tensor {name} has shape {stored.get_shape()}, but config.json gives "
                    f"{list(shape)}; correct config.json or the weights"
                )
            if stored.get_dtype() not in _STORED_DTYPES:
                raise CheckpointError(
                    f"tensor {name} has dtype {stored.get_dtype()}; it must be one of "
                    f"{', '.join(_STORED_DTYPES)}: take the checkpoint that is not quantised"
                )


@contextmanager
def _open_file(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as handle:
            yield handle
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}; fetch it again") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a complete safetensors file ({error}); fetch it again") from error


@contextmanager
def _open_files(files: dict[str, Path]) -> Iterator[dict[str, Any]]:
    """Tensor name -> open file; a checkpoint has few shards, so all are mapped at once."""
    with ExitStack() as stack:
        opened = {path: stack.enter_context(_open_file(path)) for path in set(files.values())}
        yield {name: opened[path] for name, path in files.items()}


def _copy(names: list[str], handles: dict[str, Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The named vectors end to end, or the named [out, in] matrices as one [sum(out), in]."""
    stored = [handles[name].get_tensor(name) for name in names]
    fused = torch.empty(sum(map(len, stored)), *stored[0].shape[1:], dtype=dtype, device=device)
    for target, part in zip(fused.split([len(part) for part in stored]), stored, strict=True):
        target.copy_(part)
    return fused


def _file_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
