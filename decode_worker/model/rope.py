"""Rotary position embedding: frequencies of every supported scaling, and the rotation itself."""

import math
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from decode_worker.model.json_object import JsonObject

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]

_TABLE_BLOCK = 16384


@dataclass(frozen=True)
class RopeConfig:
    """How positions become angles. Fields that ``kind`` does not use keep their defaults.

    ``attention_factor`` multiplies cos and sin (YaRN and LongRoPE),
    so attention itself keeps the plain 1/sqrt(d).
    """

    kind: RopeKind
    theta: float
    rotary_dim: int
    factor: float = 1.0
    original_positions: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @classmethod
    def parse(cls, config: JsonObject, head_dim: int, max_positions: int) -> "RopeConfig":
        """Reads ``rope_theta`` and ``rope_scaling``, or ``rope_parameters`` (transformers 5).

        Raises CheckpointError for an unknown scaling and for missing or malformed parameters.
        """
        old_style = bool(config.values.get("rope_scaling"))
        rope = config.child("rope_scaling" if old_style else "rope_parameters")
        for key, value in rope.values.items():
            if isinstance(value, dict):
                rope.fail(key, "absent: RoPE parameters per layer type are not supported")
        kind = cls._parse_kind(rope, config.values.get("model_type") == "phi3")
        theta = (rope if rope.has("rope_theta") else config).number("rope_theta", 10000.0)
        partial = rope if rope.has("partial_rotary_factor") else config
        rotary_dim = int(head_dim * partial.number("partial_rotary_factor", 1.0))
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            partial.fail("partial_rotary_factor", f"an even part of head_dim {head_dim}")
        if kind == "default":
            return cls(kind, theta, rotary_dim)
        if kind == "linear":
            return cls(kind, theta, rotary_dim, rope.number("factor"))

        # Phi-3 keeps the trained length beside the RoPE parameters, and there it has priority.
        original = config if config.has("original_max_position_embeddings") else rope
        default = max_positions if kind == "yarn" else None
        original_positions = original.integer("original_max_position_embeddings", default)
        factor = max_positions / original_positions
        if kind == "llama3" or rope.has("factor"):
            factor = rope.number("factor")
        if kind == "llama3":
            low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
            if high <= low:
                rope.fail("high_freq_factor", f"greater than low_freq_factor {low}")
            return cls(
                kind, theta, rotary_dim, factor, original_positions,
                low_freq_factor=low, high_freq_factor=high,
            )  # fmt: skip
        if kind == "yarn":
            return cls(
                kind, theta, rotary_dim, factor, original_positions,
                attention_factor=rope.number("attention_factor", _yarn_attention(rope, factor)),
                beta_fast=rope.number("beta_fast", 32.0),
                beta_slow=rope.number("beta_slow", 1.0),
                truncate=rope.flag("truncate", True),
            )  # fmt: skip
        grown = math.log(factor) / math.log(original_positions) if factor > 1 else 0.0
        return cls(
            kind, theta, rotary_dim, factor, original_positions,
            attention_factor=rope.number("attention_factor", math.sqrt(1 + grown)),
            short_factor=rope.numbers("short_factor", rotary_dim // 2),
            long_factor=rope.numbers("long_factor", rotary_dim // 2),
        )  # fmt: skip

    @staticmethod
    def _parse_kind(rope: JsonObject, phi3: bool) -> RopeKind:
        key = "rope_type" if rope.has("rope_type") else "type"
        name = rope.values.get(key) or "default"
        if phi3 and name in ("su", "yarn"):
            name = "longrope"  # what the first Phi-3 checkpoints called it
        kinds = ("default", "longrope") if phi3 else get_args(RopeKind)
        if name not in kinds:
            rope.fail(key, f"one of {', '.join(kinds)} for this architecture")
        return cast(RopeKind, name)

    def uses_long_factor(self, declared_max: int) -> bool:
        """True when LongRoPE rotates a session of up to ``declared_max`` tokens by its long factor.

        Chosen once per session: keys that are already stored cannot be rotated again when a
        session grows past the switch.
        """
        return self.kind == "longrope" and declared_max > self.original_positions

    def choice(self, declared_max: int) -> str:
        """The part of the rotation that config.json does not decide, for the fingerprint."""
        if self.kind != "longrope":
            return self.kind
        return "longrope:long" if self.uses_long_factor(declared_max) else "longrope:short"

    def inverse_frequencies(self, declared_max: int) -> Tensor:
        """Angle per position of every rotated pair, float32 [rotary_dim / 2].

        Rounding follows transformers operation by operation: a relative error of 1e-7 is a
        visible angle at position 100,000.
        """
        exponent = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim
        period = self.theta**exponent
        if self.kind == "linear":
            return 1.0 / period / self.factor
        if self.kind == "llama3":
            return self._llama3(1.0 / period)
        if self.kind == "yarn":
            return self._yarn(period)
        if self.kind == "longrope":
            long = self.uses_long_factor(declared_max)
            return 1.0 / (torch.tensor(self.long_factor if long else self.short_factor) * period)
        return 1.0 / period

    def _llama3(self, plain: Tensor) -> Tensor:
        """Llama 3.1: long wavelengths are stretched, short ones kept, those between blended."""
        turns = self.original_positions / (2 * math.pi / plain)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0, 1)
        return (1 - kept) * plain / self.factor + kept * plain

    def _yarn(self, period: Tensor) -> Tensor:
        """YaRN (arXiv 2309.00071, section 3.2): a linear ramp between kept and stretched pairs."""

        def pair_of(turns: float) -> float:
            wavelength = self.original_positions / (turns * 2 * math.pi)
            return self.rotary_dim * math.log(wavelength) / (2 * math.log(self.theta))

        low, high = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotary_dim - 1)
        width = high - low or 0.001
        pairs = torch.arange(self.rotary_dim // 2, dtype=torch.float32)
        kept = 1 - ((pairs - low) / width).clamp(0, 1)
        return 1.0 / (self.factor * period) * (1 - kept) + 1.0 / period * kept


def _yarn_attention(rope: JsonObject, factor: float) -> float:
    def growth(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.has("mscale") and rope.has("mscale_all_dim"):
        return growth(rope.number("mscale")) / growth(rope.number("mscale_all_dim"))
    return growth(1.0)


class RotaryTable:
    """cos and sin of every position below ``declared_max``, so that a decode step only gathers.

    The table takes 2 * declared_max * rotary_dim elements of ``dtype`` (64 MiB for 128K positions,
    128 dimensions and bfloat16).
    """

    def __init__(self, config: RopeConfig, declared_max: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rotary_dim = config.rotary_dim
        frequencies = config.inverse_frequencies(declared_max)
        self._table = torch.empty(declared_max, 2, config.rotary_dim, dtype=dtype, device=device)
        for first in range(0, declared_max, _TABLE_BLOCK):
            block = self._table[first : first + _TABLE_BLOCK]
            # The float32 product is part of the model: transformers computes the same one.
            positions = torch.arange(first, first + len(block), dtype=torch.float32)
            angles = positions[:, None] * frequencies
            cos, sin = angles.cos(), angles.sin()
            block[:, 0] = torch.cat((cos, cos), -1) * config.attention_factor
            block[:, 1] = torch.cat((-sin, sin), -1) * config.attention_factor

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each [T, 1, rotary_dim], of ``positions`` int64 [T].

        The first half of sin is negated, which spares ``apply`` the negation of rotate_half.
        Raises IndexError on the CPU for a position that is not below ``declared_max``.
        """
        cos, sin = self._table.index_select(0, positions).split(1, 1)
        return cos, sin


def apply(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first ``rotary_dim`` of x[T, H, d] by cos and sin of RotaryTable.cos_sin."""
    rotary_dim = cos.shape[-1]
    turned = x[..., :rotary_dim]
    turned = torch.addcmul(turned * cos, turned.roll(rotary_dim // 2, -1), sin)
    if rotary_dim == x.shape[-1]:
        return turned
    return torch.cat((turned, x[..., rotary_dim:]), -1)
