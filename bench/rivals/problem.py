"""What a rival is given, and how it says that it cannot be had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from decode_worker.model.transformer import Transformer

Step = Callable[[], object]


class NotRun(Exception):
    """A rival or a figure that this machine cannot have; the text says why."""


@dataclass(frozen=True)
class Problem:
    """One token at position `context` - 1 of a KV cache that is full, with the weights of `checkpoint`.

    `model`: the same weights as our layers in torch."""

    checkpoint: Path
    model: Transformer
    context: int
    threads: int
