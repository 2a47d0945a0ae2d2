"""The systems of the papers as combinations: when a head selects again × what its window keeps × what it attends to.

All of them give a head the same places for the same `budget`, so that they compare at equal device bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from decode_worker.kernels.registry import Registry


@dataclass(frozen=True)
class Preset:
    """`attended`: the selected part of a head's places; None: all but the slack. `unit`: records that are selected,
    held and fetched together. `resident`: every head holds every token, and nothing is selected."""

    reuse: str
    cache: str
    attended: float | None = None
    unit: int = 1
    resident: bool = False


PRESETS: Registry[Preset] = Registry("policy")

PRESETS.register("qsac")(Preset("label", "exact_set"))  # LiteCache §4 with delta fetch
PRESETS.register("litecache")(Preset("label", "whole_set"))  # LiteCache §4
PRESETS.register("infinigen")(Preset("always", "exact_set"))  # InfiniGen: the speculative query selects at every step
PRESETS.register("lru")(Preset("always", "lru", attended=0.5, unit=8))  # a block cache, as in RetroInfer and PQCache
PRESETS.register("full")(Preset("always", "exact_set", resident=True))
