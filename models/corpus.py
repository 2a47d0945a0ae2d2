"""Documents of real text with facts in them, by split and seed; needs the standard library only.

A fact is one line of three values behind a key, ``key : v v v .``, somewhere in a document, and
its question is ``key :``.  Keys and values are two disjoint halves of the ordinary words of the
model's own vocabulary, so the text around the facts uses the same words and the same colon.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Literal

Split = Literal["train", "eval", "demo"]

HERE = Path(__file__).parent
TEXTS: dict[Split, Path] = {
    "train": HERE / "texts" / "train.txt",
    "eval": HERE / "texts" / "eval.txt",
    "demo": HERE / "demo_document.txt",
}
# The tokenizer's pre-tokenizer uses the same expression on lower-cased text.
WORD = r"[a-z]+|[0-9]|[^\sa-z0-9]"
FACT_TOKENS = 6
VOCABULARY = 4096
SPECIALS = ("[UNK]", "[PAD]")
# The most frequent words (the, of, to ...) would put a false lead on every line.
FACT_RANK_MIN = 200

_word = re.compile(WORD)
_line_words_max = 24


@dataclass(frozen=True)
class Fact:
    """``key : v v v .``; depth is the place of the key's token as a fraction of the document."""

    key: str
    values: tuple[str, str, str]
    depth: float

    @property
    def question(self) -> str:
        return f"{self.key} :"

    @property
    def answer(self) -> str:
        return " ".join(self.values)

    @property
    def line(self) -> str:
        return f"{self.question} {self.answer} ."


@dataclass(frozen=True)
class Document:
    """A text of exactly the tokens asked for, and its facts in the order of the text."""

    text: str
    facts: list[Fact]


def words_of(text: str) -> list[str]:
    """The tokens of a text, before words outside the vocabulary become [UNK]."""
    return _word.findall(text.lower())


def load_words(model: Path = HERE / "retriever") -> list[str]:
    """The vocabulary of a saved tokenizer, in the order of the token ids (by frequency)."""
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    return sorted(vocabulary, key=vocabulary.__getitem__)


def fact_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Keys and values: alternate ordinary words, so that both halves are equally frequent."""
    ordinary = [word for word in words[FACT_RANK_MIN:] if word.isalpha() and len(word) > 2]
    return ordinary[::2], ordinary[1::2]


@cache
def paragraphs(split: Split) -> tuple[tuple[str, ...], ...]:
    """The split's text as paragraphs of short lines; a long line is folded, no token is lost."""
    found = []
    for block in re.split(r"\n\s*\n", TEXTS[split].read_text()):
        lines: list[str] = []
        for line in block.splitlines():
            ends = [match.end() for match in _word.finditer(line.lower())]
            cuts = [0, *ends[_line_words_max - 1 : -1 : _line_words_max], len(line)]
            pieces = (line[a:b].strip() for a, b in pairwise(cuts))
            lines += [piece for piece in pieces if piece]
        if lines:
            found.append(tuple(lines))
    return tuple(found)


def _filler(split: Split, tokens: int, rng: random.Random) -> list[str]:
    """Lines of `tokens` tokens: the text from a random paragraph on, then shuffled repeats."""
    pool = paragraphs(split)
    start = rng.randrange(len(pool))
    order = [*range(start, len(pool)), *range(start)]
    lines: list[str] = []
    while tokens > 0:
        for index in order:
            for line in pool[index]:
                words = _word.findall(line.lower())
                if len(words) >= tokens:
                    return [*lines, " ".join(words[:tokens])]
                lines.append(line)
                tokens -= len(words)
        rng.shuffle(order)
    return lines


def build_document(
    words: Sequence[str],
    tokens: int,
    facts: int,
    seed: int,
    split: Split = "eval",
) -> Document:
    """A document of exactly `tokens` tokens with `facts` fact lines at uniform depth.

    Keys and values of a document are all different, and no key stands before a colon in the text.
    Raises ValueError if the facts do not fit the document or the vocabulary.
    """
    if not 1 <= facts * FACT_TOKENS < tokens:
        raise ValueError(f"{facts} facts of {FACT_TOKENS} tokens do not fit {tokens} tokens")
    keys, values = fact_words(words)
    rng = random.Random(f"{split}/{seed}")
    lines = _filler(split, tokens - facts * FACT_TOKENS, rng)
    text_words = [_word.findall(line.lower()) for line in lines]
    flat = [word for line in text_words for word in line]
    taken = {key for key, colon in pairwise(flat) if colon == ":"}
    keys = [key for key in keys if key not in taken]
    if facts > len(keys) or 3 * facts > len(values):
        raise ValueError(f"{facts} facts are more than {len(keys)} keys, {len(values)} values")
    chosen_keys, chosen = rng.sample(keys, facts), rng.sample(values, 3 * facts)

    # One fact in each of `facts` equal stretches of the text keeps every depth equally likely.
    places = [(index + rng.random()) / facts * len(flat) for index in range(facts)]
    out: list[str] = []
    found: list[Fact] = []
    position = filled = 0
    for line, line_words in zip([*lines, ""], [*text_words, []], strict=True):
        last = not line_words
        while len(found) < facts and (last or filled + len(line_words) / 2 > places[len(found)]):
            index = len(found)
            a, b, c = chosen[3 * index : 3 * index + 3]
            found.append(Fact(chosen_keys[index], (a, b, c), position / tokens))
            out.append(found[-1].line)
            position += FACT_TOKENS
        if not last:
            out.append(line)
            filled += len(line_words)
            position += len(line_words)
    return Document("\n".join(out) + "\n", found)
