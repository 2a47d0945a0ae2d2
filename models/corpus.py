"""Documents for training and evaluation: text that the machine has and text that is made, with facts in it.

What the machine has: the topics of Python's interactive help, docstrings of its standard library,
and the licence texts that Debian keeps.  Another version of Python has other texts.
"""

from __future__ import annotations

import ast
import os
import pydoc_data.topics
import random
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Literal

from decode_worker.demo.document import Document, build_document, load_words, made_lines, words_of
from decode_worker.demo.document import paragraphs as paragraphs_of
from decode_worker.demo.texts import documentation, own_document

Split = Literal["train", "eval", "demo"]

RETRIEVER = Path(__file__).parent / "retriever"
LIBRARY = Path(os.__file__).parent
# The library's modules are for training, these of its packages for evaluation.
PACKAGES = ("asyncio", "concurrent", "ctypes", "email", "encodings", "http", "importlib",
            "json", "logging", "multiprocessing", "unittest", "urllib", "wsgiref", "xml")  # fmt: skip
LICENCES = Path("/usr/share/common-licenses")
MADE_PARAGRAPHS = 600  # of each split
MADE_LINES = 5  # of a paragraph


def texts(split: Split) -> Iterator[str]:
    """What the machine has for a split."""
    if split == "demo":
        yield documentation()
    elif split == "train":
        yield from pydoc_data.topics.topics.values()
        yield from _docstrings(LIBRARY.glob("*.py"))
    else:
        yield from _licences()
        files = (file for name in PACKAGES for file in (LIBRARY / name).rglob("*.py"))
        yield from _docstrings(file for file in files if "test" not in file.parts)


@cache
def paragraphs(split: Split) -> tuple[tuple[str, ...], ...]:
    """The split's text as paragraphs of short lines, made ones at the end; no split has paragraphs of `train`."""
    known = set() if split == "train" else {_tokens(paragraph) for paragraph in paragraphs("train")}
    found = (paragraph for text in texts(split) for paragraph in paragraphs_of(text))
    made = made_lines(load_words(RETRIEVER), random.Random(split))
    invented = [tuple(islice(made, MADE_LINES)) for _ in range(MADE_PARAGRAPHS)]
    return (*(paragraph for paragraph in found if _tokens(paragraph) not in known), *invented)


def make_document(words: Sequence[str], tokens: int, facts: int, seed: int, split: Split = "eval") -> Document:
    """A document of exactly `tokens` tokens with `facts` fact lines; ValueError if they do not fit.

    `demo` is the document of `headgate demo`. The others begin at a random paragraph of their text, which is repeated
    in another order where it ends.
    """
    if split == "demo":
        return own_document(words, tokens, facts, seed)
    rng = random.Random(f"{split}/{seed}")
    return build_document(words, _endless(split, rng), tokens, facts, rng)


def _endless(split: Split, rng: random.Random) -> Iterator[str]:
    pool = paragraphs(split)
    start = rng.randrange(len(pool))
    order = [*range(start, len(pool)), *range(start)]
    while True:
        for index in order:
            yield from pool[index]
        rng.shuffle(order)


def _tokens(paragraph: Iterable[str]) -> tuple[str, ...]:
    return tuple(words_of(" ".join(paragraph)))


def _licences() -> Iterator[str]:
    for file in sorted(LICENCES.glob("*")):
        if not file.is_symlink():
            yield file.read_text()


def _docstrings(files: Iterable[Path]) -> Iterator[str]:
    """Of all modules, classes and functions, file by file; Python's own sources only."""
    for file in sorted(files):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""
