"""What benchmarks take from the command line: numbers, directories, and the parts of those that have some, which run
one after the other."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from bench.document import scratch
from decode_worker.figures import Figure

S = TypeVar("S")


def some_of(names: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """An argparse type: names such as a,b, all of them among `names`."""
    known = tuple(names)

    def parts(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        if unknown := [part for part in chosen if part not in known]:
            raise argparse.ArgumentTypeError(f"there is no part {unknown[0]}; there are {', '.join(known)}")
        return chosen

    return parts


def count(text: str) -> int:
    """An argparse type."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write a number, 1 or more")
    return int(text)


def directory(text: str) -> Path:
    """An argparse type."""
    if not os.access(text, os.W_OK | os.X_OK) or not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no directory that can be written to")
    return Path(text)


def run(parts: Iterable[str], of: Mapping[str, Callable[[S, Path], list[Figure]]], settings: S) -> list[Figure]:
    """Each in a directory of its own; says how long it took."""
    figures = []
    for part in parts:
        started = time.monotonic()
        with scratch() as directory:
            figures += of[part](settings, Path(directory))
        print(f"{part}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return figures
