"""Our logits equal those of transformers, for prefill and decode, in every architecture."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    ARCHITECTURES,
    MAX_POSITIONS,
    ORIGINAL_POSITIONS,
    VOCAB,
    CachedModel,
    decode_logits,
    save,
    tiny_model,
)
from torch import Tensor

from decode_worker.model.checkpoint import Checkpoint
from decode_worker.model.config import ModelConfig
from decode_worker.model.json_object import JsonObject
from decode_worker.model.transformer import Transformer

TOLERANCE = 1e-4
DECODE_STEPS = 5
SCALINGS = ("default", "linear", "llama3", "yarn", "longrope")


def cases() -> list[Any]:
    found = []
    for architecture in ARCHITECTURES:
        phi = architecture.startswith("phi")
        for scaling in ("default", "longrope") if phi else SCALINGS:
            for side in ("short", "long") if scaling == "longrope" else ("",):
                for head_dim in (64, 96, 128):
                    name = "-".join(filter(None, (architecture, scaling, side, str(head_dim))))
                    found.append(pytest.param(architecture, scaling, side, head_dim, id=name))
    return found


def load(directory: Path, declared_max: int) -> CachedModel:
    return CachedModel(Transformer.load(Checkpoint.open(directory), declared_max))


def theirs(model: Any, ids: Tensor, prompt: int, base: int = 0) -> Tensor:
    """Logits [T, vocab] of transformers with its own cache: prefill, then token by token."""
    cache: Any = None

    def step(part: Tensor, first: int) -> Tensor:
        nonlocal cache
        positions = torch.arange(base + first, base + first + len(part))[None]
        output = model(input_ids=part[None], position_ids=positions, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        return output.logits[0]

    return decode_logits(step, ids, [prompt])


def random_ids(count: int, seed: int) -> Tensor:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("architecture", "scaling", "side", "head_dim"), cases())
def test_logits_equal_transformers(architecture: str, scaling: str, side: str, head_dim: int, tmp_path: Path) -> None:
    model = tiny_model(architecture, scaling, head_dim)
    directory = save(model, tmp_path)
    prompt, declared_max = ORIGINAL_POSITIONS + 8, MAX_POSITIONS
    if side == "short":
        prompt, declared_max = ORIGINAL_POSITIONS - DECODE_STEPS, ORIGINAL_POSITIONS
    ids = random_ids(prompt + DECODE_STEPS, seed=head_dim)
    expected = theirs(model, ids, prompt)
    assert expected.std() > 0.3, "logits that hardly vary prove nothing"

    chunked = decode_logits(load(directory, declared_max).step, ids, [16, prompt - 16])
    whole = decode_logits(load(directory, declared_max).step, ids, [prompt])
    assert (whole - expected).abs().max() <= TOLERANCE
    assert (chunked - expected).abs().max() <= TOLERANCE

    if scaling != "default":
        drop_scaling(directory)
        wrong = decode_logits(load(directory, declared_max).step, ids, [prompt])
        assert (wrong - expected).abs().max() > 1e-3, "the scaling has no effect on this test"


def drop_scaling(directory: Path) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    rope = config["rope_parameters"]
    kept = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    config["rope_parameters"] = kept | {"rope_type": "default"}
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_logits_equal_transformers_at_far_positions(scaling: str, tmp_path: Path) -> None:
    base = 120_000
    model = tiny_model("llama3", scaling, max_position_embeddings=131_072)
    ids = random_ids(24, seed=7)
    expected = theirs(model, ids, 20, base)
    ours = load(save(model, tmp_path), 131_072)
    found = decode_logits(lambda part, first: ours.step(part, first, base), ids, [20])
    assert (found - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bfloat16_stays_close_to_float32(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    checkpoint = Checkpoint.open(save(model, tmp_path))
    ids = random_ids(40, seed=3)
    expected = theirs(model, ids, 36)
    ours = CachedModel(Transformer.load(checkpoint, MAX_POSITIONS, torch.bfloat16))
    found = decode_logits(ours.step, ids, [36])
    reference = theirs(model.to(torch.bfloat16), ids, 36).float()
    assert found.dtype == torch.float32
    ours_error, theirs_error = (found - expected).norm(), (reference - expected).norm()
    assert ours_error <= 1.25 * theirs_error


@pytest.mark.parametrize(
    ("architecture", "scaling"),
    [
        *(("llama3", scaling) for scaling in SCALINGS),
        ("phi4-mini", "default"),
        ("phi4-mini", "longrope"),
    ],
)
def test_old_style_rope_config_means_the_same(architecture: str, scaling: str, tmp_path: Path) -> None:
    directory = save(tiny_model(architecture, scaling), tmp_path)
    config = JsonObject.read(directory / "config.json")
    old = dict(config.values)
    rope = dict(old.pop("rope_parameters"))
    old["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    rope["type"] = rope.pop("rope_type")
    old["rope_scaling"] = None if scaling == "default" else rope
    assert ModelConfig.parse(JsonObject("config.json", old)) == ModelConfig.parse(config)


@pytest.mark.parametrize("architecture", ["llama3", "qwen2", "qwen3", "phi4-mini"])
def test_query_equals_the_query_of_qkv(architecture: str, tmp_path: Path) -> None:
    model = load(save(tiny_model(architecture), tmp_path), MAX_POSITIONS).model
    x, positions = model.embed(random_ids(6, seed=1)), torch.tensor([0, 9, 3, 200, 255, 3])
    for layer in range(model.config.layers):
        q, k, v = model.qkv(layer, x, positions)
        torch.testing.assert_close(model.query(layer, x, positions), q, atol=1e-5, rtol=1e-5)
        assert q.shape == (6, 4, 64)
        assert k.shape == v.shape == (6, 2, 64)


def test_rows_of_a_batch_are_independent_sequences(tmp_path: Path) -> None:
    model = load(save(tiny_model("qwen3"), tmp_path), MAX_POSITIONS).model
    x, positions = model.embed(random_ids(5, seed=2)), torch.tensor([250, 0, 17, 16, 99])
    batch = model.qkv(0, x, positions)
    for row in range(5):
        alone = model.qkv(0, x[row : row + 1], positions[row : row + 1])
        for together, single in zip(batch, alone, strict=True):
            torch.testing.assert_close(together[row : row + 1], single, atol=1e-5, rtol=1e-5)


def test_position_beyond_the_declared_maximum_is_an_error(tmp_path: Path) -> None:
    model = load(save(tiny_model("llama2"), tmp_path), 16).model
    with pytest.raises(IndexError):
        model.qkv(0, model.embed(torch.tensor([1])), torch.tensor([16]))


@pytest.mark.parametrize("architecture", ["phi3", "phi4-mini", "llama3"])
def test_longrope_follows_transformers_or_refuses(architecture: str, tmp_path: Path) -> None:
    """Every prompt length around the switch, declared on either side of it."""
    model = tiny_model(architecture, "longrope")
    directory = save(model, tmp_path)
    config = ModelConfig.parse(JsonObject.read(directory / "config.json"))
    for prompt in (1, ORIGINAL_POSITIONS - 1, ORIGINAL_POSITIONS, ORIGINAL_POSITIONS + 1, MAX_POSITIONS):
        ids = random_ids(prompt, seed=prompt)
        expected = theirs(model, ids, prompt)
        for declared_max in (ORIGINAL_POSITIONS, ORIGINAL_POSITIONS + 1, MAX_POSITIONS):
            if prompt > declared_max:
                continue
            difference = (load(directory, declared_max).step(ids, 0) - expected).abs().max()
            if prompt <= ORIGINAL_POSITIONS < declared_max:
                with pytest.raises(ValueError, match=f"--context {ORIGINAL_POSITIONS} or less"):
                    config.check_prompt(prompt, declared_max)
                assert prompt == 1 or difference > 0.1, "what is refused would have been wrong"
            else:
                config.check_prompt(prompt, declared_max)
                assert difference <= TOLERANCE
