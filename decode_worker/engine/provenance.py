"""What a session's decode steps compute KV under: a part of the identity of the tails that it seals."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from decode_worker.config import WorkerConfig
from decode_worker.policy.base import Policy


def provenance(config: WorkerConfig, policy: Policy) -> bytes:
    """Canonical JSON of all settings that a step's KV depends on. Never EXACT, not even where every head holds every
    token: a step's products have other last bits than a prefill's.

    Model, context and dtypes stand in the fingerprint already."""
    settings = policy.settings
    values = {
        "reuse": asdict(settings.reuse),
        "attended": settings.attended,
        "unit": settings.unit,
        "retriever": policy.retriever.name,
        "index": policy.retriever.parameters.hex(),
        "query": config.query,
        "matrices": config.weights,
        "budget": settings.budget,
        "sink": settings.sink,
        "recent": settings.recent,
        "tail": settings.tail,
        "slack": settings.slack,
        "cos_floor": settings.cos_floor,
        "order": config.order,
        "stale": config.stale,
        "thresholds": _digest(settings.tau),
        "weights": _digest(settings.weights),
        "resident": _digest(settings.resident),
    }
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def _digest(values: NDArray[np.generic]) -> str:
    return hashlib.sha256(repr((values.shape, values.dtype.str)).encode() + values.tobytes()).hexdigest()
