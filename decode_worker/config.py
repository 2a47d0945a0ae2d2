"""A worker's configuration: YAML file < environment HEADGATE_* < flags, validated once."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from decode_worker.importance import IMPORTANCES
from decode_worker.kernels.sets import KERNELS
from decode_worker.policy.cache.base import CACHES
from decode_worker.policy.lookahead import Lookahead
from decode_worker.policy.presets import PRESETS
from decode_worker.policy.reuse.base import REUSES
from decode_worker.retrieval.base import RETRIEVERS
from decode_worker.window.kinds import WINDOWS
from kvstore_service.client import LEARNT, RECORD_ORDERS
from kvstore_service.shared.settings import (
    ConfigError,
    Key,
    choice,
    count,
    default_broker,
    default_socket,
    number,
    parsed,
    path,
    resolve,
    size,
)

__all__ = ["DEFAULTS", "ENVIRONMENT", "KEYS", "ConfigError", "WorkerConfig"]

# What our processes set, where nobody has, before they import torch. Its threads sleep at the end of each product:
# threads that spin take busy cores from the very threads that they wait for. And MKL is to give the same bits however
# many they are.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "MKL_CBWR": "AUTO,STRICT"}


@dataclass(frozen=True)
class WorkerConfig:
    """What an engine runs with; defaults as in docs/qsac.md. Validated where it is made, whoever makes it."""

    model: Path
    socket: Path = Path(default_socket())
    broker: Path = Path(default_broker())
    name: str = "worker"
    policy: str = "qsac"
    reuse: str = ""
    cache: str = ""
    retriever: str = "hash"
    query: str = "speculative"
    lookahead: str = "off"
    budget: float = 0.1
    sink: int = 4
    recent: int = 64
    tail: int = 0
    slack: float = 0.125
    eta: float | None = None
    p: float | None = None
    cos_floor: float = 1e-3
    margin: float | None = None
    profile: str = "auto"
    resident_bytes: int = 0
    layer0: str = "resident"
    context: int = 32768
    slots: int = 1
    compute: str = "float32"
    weights: str = "compute"
    storage: str = "bfloat16"
    record_kind: str = "model"
    order: str = "pack"
    importance: str = "head"
    labels: str = "off"
    staging_bytes: int = 16 << 20
    wait_ms: int = 2000
    stale: str = "use"
    kernels: str = "cpu"
    window: str = "auto"
    graph: str = "auto"
    sync: str = "flags"
    threads: int = 1
    decode_rings: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for key in KEYS:
            value = getattr(self, key.name)
            try:
                object.__setattr__(self, key.name, key.parse(value))
            except (ValueError, TypeError, OverflowError) as error:
                raise ConfigError(f"{key.name}={value!r}: {error}") from None
        if self.lookahead == "next" and self.query == "true":
            raise ConfigError("lookahead=next: needs queries that are made ahead; give --query speculative")
        if self.context <= self.sink + self.recent:
            raise ConfigError(f"context={self.context}: must exceed sink + recent = {self.sink + self.recent}")

    @property
    def answer_s(self) -> float:
        """How long a daemon that lives may take for an answer that costs it nothing: any wait, and a little."""
        return self.wait_ms / 1000 + 0.7

    @property
    def tail_places(self) -> int:
        """T of docs/qsac.md."""
        return self.tail or self.recent + 512

    @classmethod
    def resolve(
        cls, arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ, **defaults: Any
    ) -> WorkerConfig:
        """From a YAML file (arguments.config), the environment and flags; `defaults` stand below all of them."""
        raw = resolve(KEYS, "HEADGATE_", arguments, environment, defaults)
        if "model" not in raw:
            raise ConfigError("model has no value; give --model DIR or set HEADGATE_MODEL")
        return cls(**parsed([key for key in KEYS if key.name in raw], raw))


def _unless_profiled(parse: Callable[[Any], float]) -> Callable[[Any], float | None]:
    """None leaves the value to the profile."""
    return lambda value: None if value is None else parse(value)


def _budget(value: Any) -> float:
    """A fraction of the stored tokens, or a number of tokens above 1."""
    text = str(value).strip()
    try:
        budget = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        budget = 0.0
    if not 0 < budget < math.inf or (text.endswith("%") and budget > 1) or (budget > 1 and budget % 1):
        raise ValueError("write a fraction above 0 (0.1), at most 100% (10%), or a whole number of tokens (2048)")
    return budget


def _profile(value: Any) -> str:
    # YAML 1.1 reads a bare `off` as false.
    return "off" if value is False else str(value)


KEYS = (
    Key("model", None, path, "checkpoint directory (config.json, *.safetensors, tokenizer.json)"),
    Key("socket", None, path, "the daemon's gRPC socket"),
    Key("broker", None, path, "the daemon's descriptor broker"),
    Key("name", None, str, "this worker's name in kvctl"),
    Key("policy", None, choice(*PRESETS.names), "which system of the papers decides what moves, and when"),
    Key("reuse", None, choice("", *REUSES.names), "when a head selects again; empty: as the policy says"),
    Key("cache", None, choice("", *CACHES.names), "what a window keeps; empty: as the policy says"),
    Key("retriever", None, choice(*RETRIEVERS.names), "index that selects KV vectors for a query"),
    Key("query", None, choice("speculative", "true"), "which query selects"),
    Key(
        "lookahead",
        None,
        lambda value: str(Lookahead.of(value)),
        "what misses will want is read ahead from the disk: off, next (one more layer ahead), or within N steps",
    ),
    Key("budget", None, _budget, "selected part of the stored tokens (0.1), or their number"),
    Key("sink", None, count(0, 1024), "first tokens that are always held"),
    Key("recent", None, count(1, 1 << 16), "last tokens that are never selected but held"),
    Key("tail", None, count(0, 1 << 20), "tail places per head; 0 = recent + 512"),
    Key("slack", None, number(0, 16), "free places for deltas, as a part of the selected ones"),
    Key(
        "eta",
        None,
        _unless_profiled(number(-1, 1)),
        "similarity threshold of the most important heads (eq. 3); default: the profile's, else 0.8",
    ),
    Key(
        "p",
        None,
        _unless_profiled(number(0, 100)),
        "how fast thresholds fall with importance (eq. 4); default: the profile's, else 3",
    ),
    Key("cos_floor", None, number(0, 1), "a cosine at or below this is a group's similarity"),
    Key(
        "margin",
        None,
        _unless_profiled(number(0, 2)),
        "tolerance in the reuse difficulty; default: the profile's, else 0.1",
    ),
    Key("profile", None, _profile, "profile of thresholds and hash: a file, auto (the model's own) or off"),
    Key("resident_bytes", None, size(0), "memory for resident heads beyond layer 0"),
    Key("layer0", None, choice("resident", "offloaded"), "whether layer 0 is held in full"),
    Key("context", None, count(64, 1 << 24), "declared maximum of tokens per session"),
    Key("slots", None, count(1, 4096), "sessions bound at a time"),
    Key("compute", None, choice("float32", "bfloat16"), "dtype of the computation"),
    Key("weights", None, choice("compute", "int8"), "matrices of a decode step: the computation's dtype, or int8"),
    Key("storage", None, choice("float32", "bfloat16"), "dtype of stored K and V"),
    Key(
        "record_kind",
        None,
        choice("model", "int8", "int4"),
        "records of packs: in `storage`, or quantised; tails and resident heads never are",
    ),
    Key("order", None, choice(*RECORD_ORDERS[1:LEARNT]), "of the records in a pack's segments"),
    Key(
        "importance",
        None,
        choice(*IMPORTANCES.names),
        "what of a new prompt is put into DRAM as it is written: what each head attends to, or all heads of a layer by "
        "position; hint: read back from the disk, none: nothing",
    ),
    Key(
        "labels",
        None,
        choice("kept", "off"),
        "what heads selected with last: kept beside a session's packs at its end, for whoever attaches them; or off",
    ),
    Key("staging_bytes", None, size(1 << 16), "memory through which packs are written"),
    Key("wait_ms", None, count(1, 600_000), "deadline of every wait for the daemon"),
    Key("stale", None, choice("use", "fail"), "after a failed fetch: use the old set, or fail"),
    Key("kernels", None, choice(*KERNELS.names), "which kernels run a step"),
    Key(
        "window",
        None,
        choice("auto", *WINDOWS.names),
        "how records reach the kernels' memory; auto: the best that works here",
    ),
    Key("graph", None, choice("auto", "off"), "steps replayed as one graph of the device; auto: where it has them"),
    Key(
        "sync",
        None,
        choice("flags", "layer"),
        "flags: a step is never waited for; layer: the host waits at each layer, to compare",
    ),
    Key("threads", None, count(1, 1024), "threads of the worker's kernels"),
    Key(
        "decode_rings", None, count(1, 8), "rings that share a layer's tickets, each for a copy thread of the daemon's"
    ),
    Key("seed", None, count(0, 1 << 62), "seed of sampling"),
)
DEFAULTS = {field.name: field.default for field in fields(WorkerConfig) if field.default is not MISSING}
assert tuple(key.name for key in KEYS) == tuple(field.name for field in fields(WorkerConfig))
