"""A JSON object of a checkpoint with typed access, so that every bad value is named."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from decode_worker.model.errors import CheckpointError


def canonical_json(value: object) -> bytes:
    """The one spelling of ``value`` that digests cover: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


@dataclass(frozen=True)
class JsonObject:
    """The values of one JSON object; ``where`` names it in messages, for example ``config.json``.

    A key whose value is null counts as absent, as it does in transformers.
    """

    where: str
    values: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> "JsonObject":
        try:
            values = json.loads(path.read_bytes(), parse_constant=_refuse_constant)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}; give a checkpoint directory") from error
        except ValueError as error:
            raise CheckpointError(f"{path} is not valid JSON ({error}); fetch the file again") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} holds a {type(values).__name__}, not a JSON object; fetch the file again")
        return cls(path.name, values)

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def fail(self, key: str, must: str) -> NoReturn:
        """Raises the CheckpointError that says what the value of ``key`` must be."""
        value = repr(self.values[key]) if key in self.values else "missing"
        raise CheckpointError(f"{self.where}: {key} is {value}; it must be {must}")

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer of at least 1."""
        value = self.values[key] if self.has(key) else default
        if type(value) is not int or value < 1:
            self.fail(key, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number greater than 0."""
        value = self.values[key] if self.has(key) else default
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            self.fail(key, "a number greater than 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values[key] if self.has(key) else default
        if not isinstance(value, bool):
            self.fail(key, "true or false")
        return value

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of ``count`` numbers greater than 0."""
        value = self.values.get(key)
        must = f"a list of {count} numbers greater than 0"
        if not isinstance(value, list) or len(value) != count:
            self.fail(key, must)
        if any(isinstance(x, bool) or not isinstance(x, int | float) or x <= 0 for x in value):
            self.fail(key, must)
        return tuple(float(x) for x in value)

    def child(self, key: str) -> "JsonObject":
        """The object under ``key``; empty when absent."""
        value = self.values[key] if self.has(key) else {}
        if not isinstance(value, dict):
            self.fail(key, "a JSON object")
        return JsonObject(f"{self.where}: {key}", value)
