"""A command's stdout: what it does not take is an error of the command, in one line."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


class StdoutError(Exception):
    """stdout is closed, or did not take what was written."""


@contextlib.contextmanager
def whole_stdout() -> Iterator[None]:
    """What is printed within is taken at its end. StdoutError if not; BrokenPipeError if nobody reads any more."""
    stream = sys.stdout
    if stream is None:
        raise StdoutError("stdout is closed; give it a file, or /dev/null")
    try:
        with contextlib.redirect_stdout(_Named(stream)):
            yield
            sys.stdout.flush()
    finally:
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # or the interpreter's last flush fails too


class _Named:
    """A stream whose errors say that they are stdout's."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _naming():
            return int(self._stream.write(text))

    def flush(self) -> None:
        with _naming():
            self._stream.flush()


@contextlib.contextmanager
def _naming() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StdoutError(f"stdout: {error.strerror}; what was to be shown is lost, write it elsewhere") from error
