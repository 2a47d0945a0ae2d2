"""Settings of daemon and worker: YAML file < environment < flags, each value with its origin."""

import argparse
import difflib
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvstore_service.types import format_size, parse_size

Resolved = dict[str, tuple[Any, str]]


class ConfigError(ValueError):
    """Names the key, the value and the fix."""


@dataclass(frozen=True)
class Key:
    """One setting. `parse` turns what was written (or the default) into a value; ValueError says what is accepted."""

    name: str
    default: Callable[[], Any] | None
    parse: Callable[[Any], Any]
    help: str
    show: Callable[[Any], str] = str


def add_flags(parser: argparse.ArgumentParser, keys: Iterable[Key]) -> None:
    """`--config FILE` and a flag per key, spelled with dashes or underscores."""
    parser.add_argument("--config", metavar="FILE", help="YAML file of `key: value` lines")
    for key in keys:
        spellings = dict.fromkeys((f"--{key.name.replace('_', '-')}", f"--{key.name}"))
        shown = f" (default: {key.default()})" if key.default else ""
        parser.add_argument(*spellings, dest=key.name, help=f"{key.help}{shown}".replace("%", "%%"))


def resolve(
    keys: Sequence[Key],
    prefix: str,
    arguments: argparse.Namespace,
    environment: Mapping[str, str],
    defaults: Mapping[str, Any] | None = None,
) -> Resolved:
    """name -> (value as written, origin) of every key that is set anywhere. ConfigError for unknown keys.

    `defaults` stand above the keys' own defaults and below everything that a user writes.
    """
    names = [key.name for key in keys]
    raw: Resolved = {key.name: (key.default(), "default") for key in keys if key.default}
    raw.update({name: (value, "default") for name, value in (defaults or {}).items()})
    file = getattr(arguments, "config", None) or environment.get(f"{prefix}CONFIG")
    if file:
        raw.update({name: (value, f"file {file}") for name, value in read_file(Path(file), names).items()})
    for variable, value in environment.items():
        if not variable.startswith(prefix) or variable == f"{prefix}CONFIG":
            continue
        name = variable.removeprefix(prefix).lower()
        if name not in names:
            raise unknown(variable, [f"{prefix}{known.upper()}" for known in names], "environment variable")
        raw[name] = (value, f"environment {variable}")
    for name in names:
        if (flag := getattr(arguments, name, None)) is not None:
            raw[name] = (flag, f"flag --{name.replace('_', '-')}")
    return raw


def parsed(keys: Sequence[Key], raw: Resolved) -> dict[str, Any]:
    """Every value through its key's `parse`; ConfigError names key, value and origin."""
    values = {}
    for key in keys:
        value, origin = raw[key.name]
        try:
            values[key.name] = key.parse(value)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{key.name}={value!r} ({origin}): {error}") from None
    return values


def read_file(file: Path, names: Sequence[str]) -> dict[str, Any]:
    try:
        document = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {file}: {error}; give a readable YAML file") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{file}: not a mapping; write lines of `key: value`")
    for name in document:
        if name not in names:
            raise unknown(str(name), names, f"key in {file}")
    return document


def unknown(name: str, candidates: Sequence[str], what: str) -> ConfigError:
    asked = name.partition("=")[0]
    closest = difflib.get_close_matches(asked, candidates, n=1, cutoff=0)
    fix = f"did you mean {closest[0]}?" if closest else "see --help"
    return ConfigError(f"unknown {what} {asked}; {fix}")


# --- what values may look like ---


def path(value: Any) -> Path:
    return Path(str(value)).expanduser().absolute()


def size(minimum: int) -> Callable[[Any], int]:
    """Bytes, with units."""

    def parse(value: Any) -> int:
        size_bytes = parse_size(value)
        if size_bytes < minimum:
            raise ValueError(f"at least {format_size(minimum)}")
        return size_bytes

    return parse


def count(low: int, high: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if isinstance(value, bool) or not str(value).strip().isdigit() or not low <= int(value) <= high:
            raise ValueError(f"write a whole number from {low} to {high}")
        return int(value)

    return parse


def number(low: float, high: float) -> Callable[[Any], float]:
    def parse(value: Any) -> float:
        try:
            parsed_value = float(value)
        except (TypeError, ValueError):
            parsed_value = float("nan")
        if not low <= parsed_value <= high:
            raise ValueError(f"write a number from {low:g} to {high:g}")
        return parsed_value

    return parse


def choice(*words: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in words:
            raise ValueError(f"write {', '.join(words[:-1])} or {words[-1]}")
        return str(value)

    return parse


# --- where the daemon is ---


def runtime_dir() -> Path:
    """Where sockets live: $XDG_RUNTIME_DIR/headgate, /run/headgate for root, else ~/.local/state/headgate."""
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "headgate"
    return Path("/run/headgate") if os.getuid() == 0 else home() / ".local/state/headgate"


def home() -> Path:
    """The user's; one without (a service's uid) gets a directory of its own below the temporary one."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"headgate-{os.getuid()}"


def default_socket() -> str:
    return os.environ.get("KVSTORE_SOCKET", str(runtime_dir() / "store.sock"))


def default_broker() -> str:
    return os.environ.get("KVSTORE_BROKER", str(runtime_dir() / "broker.sock"))
