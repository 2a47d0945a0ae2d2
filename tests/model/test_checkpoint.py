"""Loading: every kind of bad checkpoint gets one clear line; the fingerprint follows content."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import MAX_POSITIONS, ORIGINAL_POSITIONS, save, tiny_model

from decode_worker.model.checkpoint import Checkpoint
from decode_worker.model.errors import CheckpointError
from decode_worker.model.transformer import Transformer

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One saved checkpoint per architecture that a test here edits a copy of."""
    root = tmp_path_factory.mktemp("saved")
    return {
        "llama3": save(tiny_model("llama3"), root / "llama3"),
        "mistral": save(tiny_model("mistral"), root / "mistral"),
        "qwen2": save(tiny_model("qwen2"), root / "qwen2"),
        "phi4-mini": save(tiny_model("phi4-mini", "longrope"), root / "phi4-mini"),
    }


@pytest.fixture
def copy(saved: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda architecture: shutil.copytree(saved[architecture], tmp_path / "model")


def edit_config(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def edit_tensors(directory: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(directory / WEIGHTS)
    edit(tensors)
    save_file(tensors, directory / WEIGHTS)


def refusal(directory: Path, declared_max: int = MAX_POSITIONS) -> str:
    with pytest.raises(CheckpointError) as caught:
        Transformer.load(Checkpoint.open(directory), declared_max)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_missing_files(copy: Callable[[str], Path]) -> None:
    directory = copy("qwen2")
    assert "config.json" in refusal(directory / "nowhere")
    (directory / WEIGHTS).unlink()
    assert "convert the weights to safetensors" in refusal(directory)


@pytest.mark.parametrize("kept", [0, 4, 200, -1])
def test_truncated_weights(kept: int, copy: Callable[[str], Path]) -> None:
    path = copy("qwen2") / WEIGHTS
    path.write_bytes(path.read_bytes()[:kept])
    message = refusal(path.parent)
    assert str(path) in message
    assert "not a complete safetensors file" in message


@pytest.mark.parametrize("content", ["{", "[]", '{"vocab_size": NaN}'])
def test_malformed_config(content: str, copy: Callable[[str], Path]) -> None:
    directory = copy("qwen2")
    (directory / "config.json").write_text(content)
    assert "config.json" in refusal(directory)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "gpt2"}, ["model_type is 'gpt2'", "llama"]),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, ["Qwen2ForCausalLM"]),
        ({"hidden_size": ...}, ["hidden_size is missing"]),
        ({"num_hidden_layers": "two"}, ["num_hidden_layers is 'two'", "positive integer"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads is 3", "divisor"]),
        ({"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "silu"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps is 0"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config", "not quantised"]),
        ({"rope_parameters": {"rope_type": "dynamic"}}, ["rope_type is 'dynamic'", "yarn"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["factor is missing"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor", "qwen2"]),
        ({"rope_parameters": {"full_attention": {}}}, ["per layer type"]),
        ({"intermediate_size": 100}, ["mlp.gate_proj.weight has shape [96, 256]"]),
        ({"num_hidden_layers": 3}, ["model.layers.2.", "is missing"]),
        ({"num_hidden_layers": 1}, ["model.layers.1.", "is unexpected"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings is 'yes'", "true or false"]),
    ],
)
def test_bad_config_values(values: dict[str, Any], words: list[str], copy: Callable[[str], Path]) -> None:
    directory = copy("qwen2")
    edit_config(directory, **values)
    message = refusal(directory)
    for word in words:
        assert word in message


def test_longrope_factors_must_cover_the_rotated_pairs(copy: Callable[[str], Path]) -> None:
    directory = copy("phi4-mini")
    rope = json.loads((directory / "config.json").read_text())["rope_parameters"]
    edit_config(directory, rope_parameters=rope | {"long_factor": rope["long_factor"][:-1]})
    assert "long_factor" in refusal(directory)


def test_missing_unexpected_misshapen_and_quantised_tensors(copy: Callable[[str], Path]) -> None:
    directory = copy("qwen2")
    name = "model.layers.1.self_attn.k_proj.bias"
    edit_tensors(directory, lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    assert f"tensor {name} has shape [127], but config.json gives [128]" in refusal(directory)
    edit_tensors(directory, lambda tensors: tensors.update({name: torch.ones(128).char()}))
    assert f"tensor {name} has dtype I8" in refusal(directory)
    edit_tensors(directory, lambda tensors: tensors.pop(name))
    assert f"tensor {name} is missing (1 in all)" in refusal(directory)
    extra = {name: torch.ones(128), "model.extra.weight": torch.ones(1)}
    edit_tensors(directory, lambda tensors: tensors.update(extra))
    assert "tensor model.extra.weight is unexpected (1 in all)" in refusal(directory)


def test_old_frequencies_and_a_tied_head_are_ignored(copy: Callable[[str], Path]) -> None:
    directory = copy("llama3")
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(32),
        "lm_head.weight": torch.ones(1),
    }
    edit_tensors(directory, lambda tensors: tensors.update(extra))
    Transformer.load(Checkpoint.open(directory), MAX_POSITIONS)


@pytest.mark.parametrize(
    ("architecture", "values"),
    [
        ("mistral", {"sliding_window": 64}),
        ("phi4-mini", {"sliding_window": 64}),
        (
            "qwen2",
            {
                "sliding_window": 64,
                "use_sliding_window": True,
                "max_window_layers": 1,
                "layer_types": ["full_attention", "sliding_attention"],
            },
        ),
    ],
)
def test_active_sliding_window_shorter_than_the_context(
    architecture: str, values: dict[str, Any], copy: Callable[[str], Path]
) -> None:
    directory = copy(architecture)
    edit_config(directory, **values)
    message = refusal(directory, 65)
    assert "sliding_window is 64" in message
    assert "65 tokens" in message
    Transformer.load(Checkpoint.open(directory), 64)


def test_inactive_sliding_window_is_no_obstacle(copy: Callable[[str], Path]) -> None:
    directory = copy("qwen2")
    edit_config(directory, sliding_window=64, use_sliding_window=False)
    Transformer.load(Checkpoint.open(directory), MAX_POSITIONS)


def test_context_beyond_the_positions(copy: Callable[[str], Path]) -> None:
    directory = copy("qwen2")
    assert f"covers 1 to {MAX_POSITIONS}" in refusal(directory, MAX_POSITIONS + 1)
    assert "context=0 tokens" in refusal(directory, 0)
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": MAX_POSITIONS}
    edit_config(directory, rope_scaling=scaling)
    Transformer.load(Checkpoint.open(directory), 4 * MAX_POSITIONS)


def test_compute_dtype_must_be_float32_or_bfloat16(saved: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="float16"):
        Transformer.load(Checkpoint.open(saved["qwen2"]), MAX_POSITIONS, torch.float16)


def test_sharded_checkpoint_loads_the_same_weights(saved: dict[str, Path], tmp_path: Path) -> None:
    directory = save(tiny_model("qwen2"), tmp_path, max_shard_size="300KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    ids = torch.arange(9)
    both = [Transformer.load(Checkpoint.open(path), MAX_POSITIONS) for path in (directory, saved["qwen2"])]
    for layer in range(2):
        ours, theirs = (model.qkv(layer, model.embed(ids), ids) for model in both)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_shards_that_do_not_match_their_index(tmp_path: Path) -> None:
    directory = save(tiny_model("qwen2"), tmp_path, max_shard_size="300KB")
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name, shard = next(iter(index["weight_map"].items()))

    def refuse(place: object) -> str:
        weight_map = index["weight_map"] | {name: place}
        path.write_text(json.dumps(index | {"weight_map": weight_map}))
        return refusal(directory)

    assert name in refuse(next(s for s in index["weight_map"].values() if s != shard))
    assert "beside the index" in refuse("../" + shard)
    assert "beside the index" in refuse(7)
    assert "cannot read" in refuse("model-lost.safetensors")


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_stored_dtype_is_converted(stored: torch.dtype, tmp_path: Path) -> None:
    directory = save(tiny_model("phi3").to(stored), tmp_path)
    tensor = load_file(directory / WEIGHTS)["model.layers.1.self_attn.qkv_proj.weight"]
    assert tensor.dtype == stored
    weights = Checkpoint.open(directory).weights(torch.float32, torch.device("cpu"))
    assert torch.equal(weights.layers[1].qkv, tensor.float())


def fingerprint(directory: Path, declared_max: int = MAX_POSITIONS, **changed: Any) -> bytes:
    arguments = {"compute_dtype": torch.float32, "storage_dtype": "bfloat16", "layout_version": 1}
    return Checkpoint.open(directory).fingerprint(declared_max, **(arguments | changed))


def test_fingerprint_is_of_content_not_of_names(saved: dict[str, Path], tmp_path: Path) -> None:
    directory = shutil.copytree(saved["qwen2"], tmp_path / "another name")
    edit_config(directory, _name_or_path="somebody/another-name")
    assert fingerprint(directory) == fingerprint(saved["qwen2"])
    assert len(fingerprint(directory)) == 32


def test_fingerprint_ignores_the_names_of_shards(tmp_path: Path) -> None:
    directory = save(tiny_model("qwen2"), tmp_path, max_shard_size="300KB")
    before = fingerprint(directory)
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shards = sorted(set(index["weight_map"].values()))
    renamed = {shard: f"{len(shards) - number}.safetensors" for number, shard in enumerate(shards)}
    for shard, name in renamed.items():
        (directory / shard).rename(directory / name)
    weight_map = {tensor: renamed[shard] for tensor, shard in index["weight_map"].items()}
    path.write_text(json.dumps(index | {"weight_map": weight_map}))
    assert fingerprint(directory) == before


def test_fingerprint_changes_with_one_byte_of_weights(copy: Callable[[str], Path]) -> None:
    directory = copy("qwen2")
    before = fingerprint(directory)
    path = directory / WEIGHTS
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert fingerprint(directory) != before


def test_fingerprint_changes_with_config_dtypes_and_layout(copy: Callable[[str], Path]) -> None:
    directory = copy("qwen2")
    found = {
        fingerprint(directory),
        fingerprint(directory, compute_dtype=torch.bfloat16),
        fingerprint(directory, storage_dtype="float16"),
        fingerprint(directory, layout_version=2),
    }
    edit_config(directory, rms_norm_eps=2e-5)
    found.add(fingerprint(directory))
    assert len(found) == 5


def test_fingerprint_changes_where_longrope_switches(saved: dict[str, Path]) -> None:
    by_length = [fingerprint(saved["phi4-mini"], ORIGINAL_POSITIONS + more) for more in (-1, 0, 1, 2)]
    assert by_length[0] == by_length[1] != by_length[2] == by_length[3]
    assert fingerprint(saved["qwen2"], 16) == fingerprint(saved["qwen2"], 32)
