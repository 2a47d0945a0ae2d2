"""Settings of daemon and worker: YAML file < environment < flags, each value with its origin."""

import argparse
import difflib
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from kvstore_service.shared.types import StoreError, format_size, parse_size

UNIX_PATH_BYTES_MAX = 107
MISSING = "the following arguments are required"  # argparse's words

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


class Parser(argparse.ArgumentParser):
    """Raises ConfigError, one line, for anything that it does not know; an unknown flag names the closest one."""

    _written: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        """What is wrong comes before what is missing."""
        known = self._option_string_actions
        if message.startswith(MISSING):
            for word in self._written:
                if word.startswith("--") and " " not in word and word.partition("=")[0] not in known:
                    raise self._unknown(word)
        raise ConfigError(f"{message}; see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Flags may be spelled with underscores, as their keys are."""
        self._written = [_dashed(_text(word)) for word in (sys.argv[1:] if args is None else args)]
        arguments, rest = super().parse_known_args(self._written, namespace)
        if rest:
            raise self._unknown(rest[0])
        return arguments, rest

    def _unknown(self, word: str) -> ConfigError:
        if not word.startswith("-"):
            return unknown(word, [], "word")
        return unknown(word, [flag for flag in self._option_string_actions if flag.startswith("--")], "flag", "--")


def _text(word: str) -> str:
    try:
        word.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"argument {word!r} is not UTF-8") from None
    return word


def _dashed(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def add_flags(parser: argparse.ArgumentParser, keys: Iterable[Key], defaults: Mapping[str, Any] | None = None) -> None:
    """`--config FILE` and a flag per key; --help shows what a key accepts
    and its default (`defaults` stand above the keys' own)."""
    parser.add_argument("--config", metavar="FILE", help="YAML file of `key: value` lines")
    for key in keys:
        default = (defaults or {}).get(key.name, key.default() if key.default else None)
        notes = [_accepted(key), "" if default is None else f"default: {default}"]
        shown = "; ".join(note for note in notes if note)
        text = f"{key.help} ({shown})" if shown else key.help
        flag = f"--{key.name.replace('_', '-')}"
        parser.add_argument(flag, dest=key.name, metavar="VALUE", help=text.replace("%", "%%"))


def _accepted(key: Key) -> str:
    """What the key's ValueError tells to write, asked with a value that nothing accepts."""
    try:
        key.parse(...)
    except ValueError as error:
        return str(error).removeprefix("write ") if str(error).startswith("write ") else ""
    return ""


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
            raise unknown(variable, [f"{prefix}{known.upper()}" for known in names], "environment variable", prefix)
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
        except (ValueError, TypeError, OverflowError) as error:
            raise ConfigError(f"{key.name}={value!r} ({origin}): {error}") from None
    return values


def read_file(file: Path, names: Sequence[str]) -> dict[str, Any]:
    try:
        document = yaml.safe_load(file.read_text())
    except RecursionError:
        raise ConfigError(f"--config {file}: nested too deeply; write lines of `key: value`") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        what = f"line {mark.line + 1}: {getattr(error, 'problem', '')}" if mark else getattr(error, "strerror", None)
        raise ConfigError(f"--config {file}: {what or 'not text'}; give a readable YAML file") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{file}: not a mapping; write lines of `key: value`")
    for name, value in document.items():
        if name not in names:
            raise unknown(str(name), names, f"key in {file}")
        if value is None:
            raise ConfigError(f"{file}: {name} has no value; write one or remove the line")
    return document


def unknown(name: str, candidates: Sequence[str], what: str, prefix: str = "") -> ConfigError:
    """Names the closest candidate. `prefix`: what all of them begin with, and what makes none of them alike."""
    asked = name.partition("=")[0]
    longer = [name for name in candidates if name.startswith(asked)]
    alike = difflib.get_close_matches(asked.removeprefix(prefix), [name.removeprefix(prefix) for name in candidates], 1)
    closest = longer[0] if longer else prefix + alike[0] if alike else ""
    fix = f"did you mean {closest}?" if closest else "see --help"
    return ConfigError(f"unknown {what} {asked}; {fix}")


# --- what values may look like ---


def path(value: Any) -> Path:
    text = str(value)
    try:
        text.encode()
        if not text or "\0" in text:
            raise ValueError("write a path" if not text else "write a path without NUL")
        return Path(text).expanduser().absolute()
    except UnicodeEncodeError:
        raise ValueError("write a path in UTF-8") from None
    except RuntimeError:
        raise ValueError("write a path without ~: this user has no home directory") from None


def socket_path(value: Any) -> Path:
    socket = path(value)
    if len(os.fsencode(socket)) > UNIX_PATH_BYTES_MAX:
        raise ValueError(f"a socket's path has at most {UNIX_PATH_BYTES_MAX} bytes; choose a shorter one")
    return socket


def size(minimum: int) -> Callable[[Any], int]:
    """Bytes, with units."""

    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ValueError(f"write a size of at least {format_size(minimum)}, such as 8GiB")
        size_bytes = parse_size(value)
        if size_bytes < minimum:
            raise ValueError(f"write at least {format_size(minimum)}")
        return size_bytes

    return parse


def count(low: int, high: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if isinstance(value, bool) or not str(value).strip().isdecimal() or not low <= int(value) <= high:
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
        if value is False and "off" in words:  # as YAML 1.1 reads a bare `off`
            return "off"
        if value not in words:
            shown = [word or "''" for word in words]
            raise ValueError(f"write {', '.join(shown[:-1])} or {shown[-1]}")
        return str(value)

    return parse


# --- where the daemon is ---


def runtime_dir() -> Path:
    """Where sockets live: $XDG_RUNTIME_DIR/headgate, /run/headgate for root, else ~/.local/state/headgate."""
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "headgate"
    return Path("/run/headgate") if os.getuid() == 0 else home() / ".local/state/headgate"


def home() -> Path:
    """The user's; one without (a service's uid, or HOME="") gets a directory of its own below the temporary one."""
    try:
        if os.environ.get("HOME") != "":
            return Path.home()
    except RuntimeError:
        pass
    return _homeless()


def _homeless() -> Path:
    return Path(tempfile.gettempdir()) / f"headgate-{os.getuid()}"


def require_own(socket: Path) -> None:
    """Before anything is said to a daemon there. PERMISSION_DENIED if it lies in the directory of a user without a
    home, which somebody else has made: anybody may, in the temporary one."""
    directory = _homeless()
    if directory not in socket.parents or not os.path.lexists(directory):
        return
    owner = directory.lstat().st_uid  # a link's own: whose it is could turn it elsewhere
    if owner != os.getuid():
        raise StoreError(
            "PERMISSION_DENIED", f"{directory} belongs to uid {owner}: remove it, or say where the daemon is "
            "(KVSTORE_SOCKET, KVSTORE_BROKER)"
        )  # fmt: skip


def default_socket() -> str:
    return os.environ.get("KVSTORE_SOCKET", str(runtime_dir() / "store.sock"))


def default_broker() -> str:
    return os.environ.get("KVSTORE_BROKER", str(runtime_dir() / "broker.sock"))
