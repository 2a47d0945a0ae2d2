"""What was measured of a model: importance of heads, similarity of queries, a trained hash (LiteCache §4.3)."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

HASH_SEED = 0x48474154
HASH_BITS = 256
AUTO_NAME = "headgate_profile.json"
_FIELDS = ("query_importance", "kv_importance", "mean_similarity", "eta", "p", "margin", "hash")


class ProfileError(ValueError):
    """A profile that cannot be read or does not fit the model."""


class ModelShape(Protocol):
    """What a profile must fit; decode_worker.model.config.ModelConfig is one."""

    @property
    def layers(self) -> int: ...
    @property
    def q_heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@dataclass(frozen=True, eq=False)
class Profile:
    """`query_importance` float32[layers, Hq]; `kv_importance`, `mean_similarity` float32[layers, H]; all in [0, 1]."""

    query_importance: NDArray[np.float32]
    kv_importance: NDArray[np.float32]
    mean_similarity: NDArray[np.float32]
    eta: float = 0.8
    p: float = 3.0
    margin: float = 0.1
    projection: NDArray[np.float32] | None = None  # [layers, H, d, 256]
    centre: NDArray[np.float32] | None = None  # [layers, H, d]

    @staticmethod
    def default(shape: ModelShape) -> Profile:
        """Nothing measured: importance 1 everywhere (cautious), similarity 0, a random hash."""
        return Profile(
            query_importance=np.ones((shape.layers, shape.q_heads), np.float32),
            kv_importance=np.ones((shape.layers, shape.kv_heads), np.float32),
            mean_similarity=np.zeros((shape.layers, shape.kv_heads), np.float32),
        )

    @staticmethod
    def load(
        source: str | Path,
        shape: ModelShape,
        *,
        directory: Path | None = None,
        eta: float | None = None,
        p: float | None = None,
        margin: float | None = None,
    ) -> Profile:
        """`source`: a JSON file, `off` (the default profile), or `auto` (headgate_profile.json in `directory`, if any).

        eta, p and margin replace the file's values. ProfileError if the file is unreadable or made for another shape.
        """
        path = Path(source)
        if str(source) == "auto":
            path = (directory or Path()) / AUTO_NAME
        absent = str(source) == "off" or (str(source) == "auto" and (directory is None or not path.exists()))
        profile = Profile.default(shape) if absent else _read(path, shape)
        return replace(
            profile,
            eta=profile.eta if eta is None else eta,
            p=profile.p if p is None else p,
            margin=profile.margin if margin is None else margin,
        )

    def thresholds(self) -> NDArray[np.float32]:
        """tau of every KV head (eq. 3-5), float32[layers, H]."""
        weight = self.kv_importance.astype(np.float64) ** self.p
        angle = weight * math.acos(self.eta) + (1 - weight) * math.pi
        return np.cos(angle).astype(np.float32)

    def difficulty(self) -> NDArray[np.float32]:
        """D = tau - (mean similarity - margin), float32[layers, H]: how often a head would miss."""
        return (self.thresholds() - (self.mean_similarity - self.margin)).astype(np.float32)

    def resident_heads(self, head_bytes: int, resident_bytes: int, *, layer0: bool = True) -> NDArray[np.bool_]:
        """bool[layers, H]: layer 0 (unless offloaded), then the most difficult heads that `resident_bytes` holds.

        head_bytes: one head's KV at the declared maximum of tokens. Ties go to the lower layer, then the lower head.
        """
        difficulty = self.difficulty()
        resident = np.zeros(difficulty.shape, bool)
        resident[0] = layer0
        if not layer0:
            difficulty[0] = -np.inf
        order = np.argsort(-difficulty.ravel(), kind="stable")
        wanted = order[(difficulty.ravel()[order] > 0) & ~resident.ravel()[order]]
        resident.ravel()[wanted[: resident_bytes // head_bytes]] = True
        return resident

    def query_weights(self) -> NDArray[np.float32]:
        """Importance of query heads by KV head, float32[layers, H, g]."""
        layers, heads = self.kv_importance.shape
        return np.ascontiguousarray(self.query_importance.reshape(layers, heads, -1))

    def hash_parameters(
        self, layers: int, kv_heads: int, head_dim: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Projection [layers, H, d, 256] and centre [layers, H, d]; drawn at random without a trained hash."""
        projection = self.projection
        if projection is None:
            shape = (layers, kv_heads, head_dim, HASH_BITS)
            projection = np.random.default_rng(HASH_SEED).standard_normal(shape, dtype=np.float32)
        centre = self.centre
        if centre is None:
            centre = np.zeros((layers, kv_heads, head_dim), np.float32)
        return projection, centre


def _read(path: Path, shape: ModelShape) -> Profile:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else f"not valid JSON ({error})"
        raise ProfileError(f"profile={path}: {what}; give a profile, auto or off") from error
    if not isinstance(content, dict):
        raise ProfileError(f"profile={path}: not a JSON object; give a profile, auto or off")
    unknown = sorted(set(content) - set(_FIELDS))
    if unknown:
        raise ProfileError(f"profile={path}: unknown keys {', '.join(unknown)}; known are {', '.join(_FIELDS)}")
    default = Profile.default(shape)
    projection, centre = _read_hash(path, content, shape) if "hash" in content else (None, None)
    return Profile(
        query_importance=_table(path, content, "query_importance", default.query_importance),
        kv_importance=_table(path, content, "kv_importance", default.kv_importance),
        mean_similarity=_table(path, content, "mean_similarity", default.mean_similarity),
        eta=_number(path, content, "eta", default.eta, -1, 1),
        p=_number(path, content, "p", default.p, 0, 100),
        margin=_number(path, content, "margin", default.margin, 0, 2),
        projection=projection,
        centre=centre,
    )


def _number(path: Path, content: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = float(content.get(name, default))
    if not low <= value <= high:
        raise ProfileError(f"profile={path}: {name}={value} must lie in [{low}, {high}]")
    return value


def _table(path: Path, content: dict[str, Any], name: str, default: NDArray[np.float32]) -> NDArray[np.float32]:
    if name not in content:
        return default
    table = np.asarray(content[name], dtype=np.float32)
    if table.shape != default.shape:
        raise ProfileError(f"profile={path}: {name} has shape {table.shape}, the model needs {default.shape}")
    lowest = -1 if name == "mean_similarity" else 0
    if not ((table >= lowest) & (table <= 1)).all():
        raise ProfileError(f"profile={path}: {name} must lie in [{lowest}, 1]")
    return table


def _read_hash(
    path: Path, content: dict[str, Any], shape: ModelShape
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    file = path.parent / content["hash"]
    try:
        if file.suffix == ".safetensors":
            from safetensors.numpy import load_file

            arrays = load_file(file)
        else:
            with np.load(file, allow_pickle=False) as stored:
                arrays = dict(stored)
        projection, centre = (arrays[name].astype(np.float32) for name in ("projection", "centre"))
    except (OSError, ValueError, KeyError) as error:
        raise ProfileError(f"profile={path}: hash={file}: {error}") from error
    grid = (shape.layers, shape.kv_heads, shape.head_dim)
    if projection.shape != (*grid, HASH_BITS) or centre.shape != grid:
        raise ProfileError(f"profile={path}: the hash in {file} was made for another model shape")
    return projection, centre
