"""Which operations of FlashInfer a worker takes: those that compute what torch computes, on this machine, of its model.

    python -m decode_worker.gpu.flash_choice

compares them for some usual models, where a GPU is; exit status 1 if one differs, or if there is no FlashInfer.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from decode_worker.gpu.flash import NAMES, flash_operations, unsupported
from decode_worker.model.config import ModelConfig
from decode_worker.model.json_object import JsonObject
from decode_worker.model.operations import Operations, torch_operations

TOLERANCE = 2e-2  # some roundings of bfloat16, as a part of a number and of what is usual beside it
ROWS = (1, 300)
BEHIND = 700  # keys before a chunk
DECLARED_MAX = 8192
COMMON = {"num_hidden_layers": 1, "vocab_size": 512, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072}
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3-8B": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "rope_theta": 5e5,
    },
    "Qwen2.5-14B": {
        "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40,
        "num_key_value_heads": 8, "rope_theta": 1e6,
    },
    "Qwen3-0.6B": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e6,
    },
    "Phi-4-mini": {
        "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24,
        "num_key_value_heads": 8, "rope_theta": 1e4, "partial_rotary_factor": 0.75,
    },
    "Qwen2.5-0.5B": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
        "num_key_value_heads": 2, "rope_theta": 1e6,
    },
}  # fmt: skip

_log = logging.getLogger(__name__)


def operations(config: ModelConfig, declared_max: int, dtype: torch.dtype, device: torch.device) -> Operations:
    """FlashInfer's where they are as right as torch's, torch's elsewhere; says once which, and why.

    Compiles what it takes, which can be minutes at a machine's first start."""
    reference = torch_operations(config, declared_max, dtype, device)
    library = _imported()
    if isinstance(library, str):
        _say(f"{library}; torch computes what FlashInfer would")
        return reference
    lacking = unsupported(config, dtype)
    taken: dict[str, Any] = {}
    if len(lacking) < len(NAMES):
        flash = flash_operations(library, config, declared_max, device)
        lacking |= Comparison(config, declared_max, dtype, device).differences(reference, flash, without=lacking)
        taken = {name: getattr(flash, name) for name in NAMES if name not in lacking}
    if lacking:
        _say(f"FlashInfer {library.__version__} leaves to torch: {_listed(lacking)}")
    return replace(reference, **taken)


def _imported() -> Any:
    """The module, or why there is none."""
    try:
        return importlib.import_module("flashinfer")
    except Exception as error:  # a package that compiles and loads libraries may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == "flashinfer":
            return "FlashInfer is not installed (pip install 'headgate[gpu]')"
        return f"FlashInfer cannot be imported ({_line(error)})"


@cache
def _say(text: str) -> None:
    """Once in a process."""
    _log.warning(text)


@dataclass(frozen=True)
class Comparison:
    """Of two sets of operations that were made for the same model, on random numbers of its shapes."""

    config: ModelConfig
    declared_max: int
    dtype: torch.dtype
    device: torch.device

    def differences(self, reference: Operations, made: Operations, without: Mapping[str, str]) -> dict[str, str]:
        """Operations, but those of `without`, that do not compute what the reference computes -> how they fail."""
        failed: dict[str, str] = {}
        unused = set(without) if self.config.qk_norm else {"norm_heads", *without}
        for name, rows, more in itertools.product(NAMES, ROWS, (False, True)):
            if name in failed or name in unused:
                continue
            try:
                results = [self._results(name, each, rows, more) for each in (made, reference)]
                off = [each for each in (_off(*both) for both in zip(*results, strict=True)) if not each <= 1]
            except Exception as error:  # of a compiler, of the driver, of the library
                failed[name] = _line(error)
            else:
                if off:
                    failed[name] = f"differs from torch by {off[0]:.3g} times the tolerance"
        return failed

    @torch.inference_mode()
    def _results(self, name: str, operations: Operations, rows: int, more: bool) -> tuple[Tensor, ...]:
        """What an operation makes, and what it adds to, of arguments as the layers give them: the same at each call.

        more: query and key heads, or keys before the chunk; else query heads alone, or no such keys."""
        generator = torch.Generator().manual_seed(rows)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.device, self.dtype)

        q_heads, kv_heads, d = self.config.q_heads, self.config.kv_heads, self.config.head_dim
        hidden = self.config.hidden
        x, weight = drawn(rows, hidden), 1 + drawn(hidden) / 8
        heads = drawn(rows, q_heads + 2 * kv_heads, d)[:, : q_heads + kv_heads * more]
        if name == "norm":
            return (operations.norm(x, weight),)
        if name == "add_norm":
            return operations.add_norm(x, drawn(rows, hidden), weight), x
        if name == "norm_heads":
            weights = [(1 + drawn(1, d) / 8).expand(count, -1) for count in (q_heads, kv_heads)]
            return (operations.norm_heads(heads, torch.cat(weights)[: heads.shape[1]]),)
        if name == "rotate":
            positions = torch.randint(self.declared_max, (rows,), generator=generator).to(self.device)
            return (operations.rotate(heads, positions),)
        if name == "silu_mul":
            return (operations.silu_mul(drawn(rows, 2 * self.config.ffn)),)
        behind = BEHIND * more
        k, v = (drawn(behind + rows, kv_heads, d) for _ in range(2))
        return (operations.attention(heads[:, :q_heads], k, v, behind, d**-0.5),)


def _off(made: Tensor, right: Tensor) -> float:
    """The largest difference, in tolerances; nan where one is not a number."""
    if made.shape != right.shape or made.dtype != right.dtype:
        raise ValueError(f"made {made.dtype} {list(made.shape)}, not {right.dtype} {list(right.shape)}")
    made, right = made.double(), right.double()
    return float(((made - right).abs() / (TOLERANCE * (right.square().mean().sqrt() + right.abs()))).max())


def _line(error: Exception) -> str:
    """An error of a compiler can be pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _listed(reasons: Mapping[str, str]) -> str:
    """Names that have one reason stand together."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(each)} ({reason})" for reason, each in names.items())


def main() -> int:
    library = _imported()
    if isinstance(library, str) or not torch.cuda.is_available():
        print(f"flash_choice: {library if isinstance(library, str) else 'torch finds no GPU here'}", file=sys.stderr)
        return 1
    status, device, dtype = 0, torch.device("cuda", 0), torch.bfloat16
    for model, shape in MODELS.items():
        config = ModelConfig.parse(JsonObject(model, COMMON | shape))
        lacking = unsupported(config, dtype)
        reference = torch_operations(config, DECLARED_MAX, dtype, device)
        flash = flash_operations(library, config, DECLARED_MAX, device)
        failed = Comparison(config, DECLARED_MAX, dtype, device).differences(reference, flash, without=lacking)
        status |= bool(failed)
        print(f"{model}: {_listed(failed) or 'equal to torch'}{'; not for ' + _listed(lacking) if lacking else ''}")
    return status


if __name__ == "__main__":
    sys.exit(main())
