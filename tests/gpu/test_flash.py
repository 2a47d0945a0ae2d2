"""FlashInfer's operations beside torch's, through a double that asserts what the library demands; which are taken."""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from decode_worker.device import Gpu
from decode_worker.gpu import flash_choice
from decode_worker.gpu.flash import NAMES, flash_operations, unsupported
from decode_worker.gpu.flash_choice import MODELS, Comparison, operations
from decode_worker.model.checkpoint import Checkpoint
from decode_worker.model.config import ModelConfig
from decode_worker.model.json_object import JsonObject
from decode_worker.model.operations import Operations, torch_operations
from decode_worker.model.transformer import Transformer
from tests.model.tiny_models import ARCHITECTURES, MAX_POSITIONS, ORIGINAL_POSITIONS, save, tiny_model
from tests.support import flashinfer_double

CPU, BF16 = torch.device("cpu"), torch.bfloat16
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
SCALINGS = ["llama3", "yarn", "linear"]


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The functions of the double as the installed library, to be replaced one by one."""
    made = SimpleNamespace(__version__="0.6.7", **{each.__name__: each for each in flashinfer_double.FUNCTIONS})
    monkeypatch.setitem(sys.modules, "flashinfer", made)  # type: ignore[arg-type]
    flashinfer_double.calls.clear()
    return made


@pytest.fixture(autouse=True)
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    flash_choice._say.cache_clear()
    return lambda: [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def config(model: str = "Qwen3-0.6B", **sizes: object) -> ModelConfig:
    return ModelConfig.parse(JsonObject(model, flash_choice.COMMON | MODELS[model] | SMALL | sizes))


def sources(taken: Operations) -> dict[str, bool]:
    """Name -> whether it is FlashInfer's."""
    return {name: "_Flash" in getattr(getattr(taken, name), "__qualname__", "") for name in NAMES}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_with_them_computes_what_it_computes_with_torch_s(
    architecture: str, double: SimpleNamespace, tmp_path: Path
) -> None:
    phi = architecture.startswith("phi")
    for scaling, declared_max in (
        [("longrope", ORIGINAL_POSITIONS), ("longrope", MAX_POSITIONS)] if phi else [(each, 200) for each in SCALINGS]
    ):
        directory = save(tiny_model(architecture, scaling), tmp_path / f"{scaling}{declared_max}")
        plain = Transformer.load(Checkpoint.open(directory), declared_max, BF16)
        taken = operations(plain.config, declared_max, BF16, CPU)
        assert all(sources(taken).values())
        model = Transformer(plain.config, plain.weights, declared_max, taken)
        made, right = (_layers(each) for each in (model, plain))
        for a, b in zip(made, right, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    assert set(flashinfer_double.calls) == {each.__name__ for each in flashinfer_double.FUNCTIONS}


@torch.inference_mode()
def _layers(model: Transformer) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    positions = torch.randint(model.declared_max, (9,), generator=generator)
    x = model.embed(torch.randint(model.config.vocab, (9,), generator=generator))
    made = []
    for layer in range(model.config.layers):
        q, k, v = model.qkv(layer, x, positions)
        made += [q, k, v, model.query(layer, x, positions)]
        x = model.finish(layer, x, model.operations.attention(q, k, v, 0, model.scale))
    return [*made, model.logits(x)]


def test_a_comparison_finds_no_difference_between_equals() -> None:
    for model in MODELS:
        each = config(model)
        made = (torch_operations(each, 64, BF16, CPU), flash_operations(flashinfer_double, each, 64, CPU))
        assert Comparison(each, 64, BF16, CPU).differences(*made, without={}) == {}


def _refuses(*arguments: object, **options: object) -> None:
    raise RuntimeError("nvcc: not found\nand a page of what it was to compile")


@pytest.mark.parametrize(
    ("function", "broken", "reason"),
    [
        ("rmsnorm", lambda x, weight, eps, out, enable_pdl: out.copy_(x), r"differs from torch by \d"),
        ("fused_add_rmsnorm", lambda x, residual, *_, **__: x.add_(residual), r"differs from torch by \d"),
        ("fused_add_rmsnorm", lambda x, residual, weight, eps, enable_pdl: [
            flashinfer_double.fused_add_rmsnorm(x, residual, weight, eps), residual.fill_(torch.nan)
        ], "differs from torch by nan"),
        ("silu_and_mul", lambda x, out, enable_pdl: out.fill_(torch.nan), "differs from torch by nan"),
        ("apply_rope_with_cos_sin_cache_inplace", _refuses, r"RuntimeError: nvcc: not found\)"),
        ("single_prefill_with_kv_cache", lambda q, *_, **__: q[:, :1], r"ValueError: made torch.bfloat16 \[1, 1, 64\]"),
        ("single_prefill_with_kv_cache", lambda q, k, v, **_: flashinfer_double.causal_attention(
            q, k[: len(q)], v[: len(q)], 0, 0.125), r"differs from torch by \d"),
        ("single_prefill_with_kv_cache", lambda q, k, v, causal, sm_scale: flashinfer_double.causal_attention(
            q, k, v, len(k) - len(q), 0.9 * sm_scale), r"differs from torch by \d"),
    ],
    ids=["norms", "no-sum", "no-sum-left", "nan", "no-compiler", "shape", "mask", "scale"],
)  # fmt: skip
def test_what_is_broken_stays_torch_s_and_is_said_once(
    double: SimpleNamespace, said: Callable[[], list[str]], function: str, broken: object, reason: str
) -> None:
    setattr(double, function, broken)
    names = {
        "rmsnorm": {"norm", "norm_heads"},
        "fused_add_rmsnorm": {"add_norm"},
        "silu_and_mul": {"silu_mul"},
        "apply_rope_with_cos_sin_cache_inplace": {"rotate"},
        "single_prefill_with_kv_cache": {"attention"},
    }[function]
    for _ in range(2):
        taken = operations(config(), 64, BF16, CPU)
        assert {name for name, flash in sources(taken).items() if not flash} == names
    (line,) = said()
    assert re.search(reason, line)
    assert "\n" not in line


@pytest.mark.parametrize(
    ("sizes", "dtype", "lacking"),
    [
        ({}, BF16, set()),
        ({}, torch.float32, set(NAMES)),
        ({"head_dim": 96}, BF16, {"rotate", "attention"}),
        ({"num_attention_heads": 1, "num_key_value_heads": 1}, BF16, {"rotate"}),
        ({"intermediate_size": 100}, BF16, {"silu_mul"}),
        ({"partial_rotary_factor": 0.375}, BF16, {"rotate"}),
    ],
)
def test_what_it_has_not_is_torch_s(
    double: SimpleNamespace, sizes: dict[str, object], dtype: torch.dtype, lacking: set[str]
) -> None:
    model = config("Phi-4-mini", **{"partial_rotary_factor": 1.0} | sizes)
    assert set(unsupported(model, dtype)) == lacking
    taken = operations(model, 64, dtype, CPU)
    assert {name for name, flash in sources(taken).items() if not flash} == lacking


def test_without_the_library_torch_computes_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # type: ignore[arg-type]
    for _ in range(2):
        assert not any(sources(operations(config(), 64, BF16, CPU)).values())
    monkeypatch.delitem(sys.modules, "flashinfer")
    (tmp_path / "flashinfer.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert not any(sources(operations(config(), 64, BF16, CPU)).values())
    assert [line.partition(";")[0] for line in said()] == [
        "FlashInfer is not installed (pip install 'headgate[gpu]')",
        "FlashInfer cannot be imported (OSError: libcudart.so.12: cannot open shared object file)",
    ]


def test_a_gpu_takes_them(double: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gpu, "torch_device", CPU)
    assert all(sources(Gpu().operations(config(), 64, BF16)).values())


@pytest.mark.parametrize("function", flashinfer_double.FUNCTIONS, ids=lambda function: function.__name__)
def test_the_double_is_called_as_the_installed_library_is(function: Callable[..., object]) -> None:
    """A newer library may take more, behind what 0.6.7 takes."""
    library = pytest.importorskip("flashinfer")
    ours = inspect.signature(function).parameters.values()
    theirs = inspect.signature(getattr(library, function.__name__)).parameters.values()
    assert [(each.name, each.default) for each in ours] == [(each.name, each.default) for each in theirs][: len(ours)]
