"""What the demo's document is made of: the user's text, or our own documentation with made lines behind it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from decode_worker.demo.document import Document, TooShort, build_document, made_lines, paragraphs
from decode_worker.text_file import read_text

CHECKOUT = Path(__file__).resolve().parents[2]
CONTEXT_MIN = 1024
CONTEXT_UNIT = 256


def own_document(words: Sequence[str], tokens: int, facts: int, seed: int) -> Document:
    """Our documentation, as far as this installation has it, then lines of no meaning. May raise
    FactsDoNotFit."""
    rng = random.Random(seed)
    lines = itertools.chain(_lines(documentation()), made_lines(words, rng))
    return build_document(words, lines, tokens, facts, rng)


def document_of(file: Path, words: Sequence[str], tokens: int, facts: int, seed: int) -> Document:
    """The beginning of a user's text. ValueError, in one line, if it is no text or too short; FactsDoNotFit."""
    text = read_text("--document", file)
    try:
        return build_document(words, _lines(text), tokens, facts, random.Random(seed))
    except TooShort as error:
        fits = (tokens - error.wanted + error.tokens) // CONTEXT_UNIT * CONTEXT_UNIT
        smaller = f" or --context {fits}" if fits >= CONTEXT_MIN else ""
        raise ValueError(
            f"--document {file}: its {error.tokens} tokens are too few for --context {tokens}; "
            f"give a longer text{smaller}"
        ) from None


def documentation() -> str:
    """README and docs/*.md of the checkout; empty where there is none."""
    pages = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md"))]
    return "\n\n".join(page.read_text() for page in pages if page.is_file())


def _lines(text: str) -> Iterator[str]:
    return itertools.chain.from_iterable(paragraphs(text))
