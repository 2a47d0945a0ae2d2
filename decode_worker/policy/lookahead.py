"""How far ahead of its misses a worker tells the daemon what they will want (KVDrive section 7.3, CLO section 2.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

STEPS_MAX = 64
HINTED_BYTES_MAX = 4 << 20  # of a step: a hint that is read too late is read for nothing


@dataclass(frozen=True)
class Lookahead:
    """`layer`: one more layer ahead than speculation, with the query that this layer's input gives. `steps`: heads that
    will miss within so many, with the present query. Neither: no hints."""

    layer: bool = False
    steps: int = 0

    def __bool__(self) -> bool:
        return self.layer or self.steps > 0

    @classmethod
    def of(cls, value: Any) -> Lookahead:
        """Of an option: `off` (which YAML 1.1 reads as false), `next`, or a number of steps. ValueError."""
        text = "off" if value is False else str(value)
        if text in ("off", "next"):
            return cls(layer=text == "next")
        if not text.isdecimal() or not 1 <= int(text) <= STEPS_MAX:
            raise ValueError(f"write off, next, or a number of steps from 1 to {STEPS_MAX}")
        return cls(steps=int(text))

    def __str__(self) -> str:
        return "next" if self.layer else str(self.steps) if self.steps else "off"


OFF = Lookahead()
