"""Documents with facts in them: lines of any text, and facts to ask about; needs the standard library only.

A fact is one line of three values behind a key, ``key : v v v .``, somewhere in a document, and
its question is ``key :``.  Keys and values are two disjoint halves of the ordinary words of the
model's own vocabulary, so the text around the facts uses the same words and the same colon.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

# The tokenizer's pre-tokenizer uses the same expression on lower-cased text.
WORD = r"[a-z]+|[0-9]|[^\sa-z0-9]"
FACT_TOKENS = 6
# The most frequent words (the, of, to ...) would put a false lead on every line.
FACT_RANK_MIN = 200
LINE_WORDS_MAX = 24

_word = re.compile(WORD)


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


class FactsDoNotFit(ValueError):
    """More facts than a document or a vocabulary has room for."""


class TooShort(ValueError):
    """A text with fewer tokens than a document needs; `tokens` of `wanted`."""

    def __init__(self, tokens: int, wanted: int) -> None:
        super().__init__(f"the text has {tokens} tokens, the document needs {wanted}")
        self.tokens, self.wanted = tokens, wanted


def words_of(text: str) -> list[str]:
    """The tokens of a text, before words outside the vocabulary become [UNK]."""
    return _word.findall(text.lower())


def load_words(model: Path) -> list[str]:
    """The vocabulary of a saved word-level tokenizer, in the order of the token ids (by frequency).

    KeyError or TypeError for a tokenizer of another kind."""
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    return sorted(vocabulary, key=vocabulary.__getitem__)


def fact_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Keys and values: alternate ordinary words, so that both halves are equally frequent."""
    ordinary = [word for word in words[FACT_RANK_MIN:] if word.isalpha() and len(word) > 2]
    return ordinary[::2], ordinary[1::2]


def paragraphs(text: str) -> list[tuple[str, ...]]:
    """A text as paragraphs of short lines; a long line is folded, no token is lost."""
    folded = (tuple(_folded(block)) for block in re.split(r"\n\s*\n", text))
    return [lines for lines in folded if lines]


def _folded(text: str) -> Iterator[str]:
    for line in text.splitlines():
        ends = [match.end() for match in _word.finditer(line.lower())]
        cuts = [0, *ends[LINE_WORDS_MAX - 1 : -1 : LINE_WORDS_MAX], len(line)]
        pieces = (line[a:b].strip() for a, b in pairwise(cuts))
        yield from (piece for piece in pieces if piece)


def made_lines(words: Sequence[str], rng: random.Random) -> Iterator[str]:
    """Lines without end and without meaning: words of the vocabulary by Zipf's law, with a sign or a number between."""
    ordinary = [word for word in words if word.isalpha()]
    weights = list(accumulate(1 / (rank + 2) for rank in range(len(ordinary))))
    while True:
        line = rng.choices(ordinary, cum_weights=weights, k=rng.randint(4, LINE_WORDS_MAX - 8))
        place = rng.randrange(1, len(line))
        line.insert(place, rng.choice((",", ":", ";", "-", f"{rng.randrange(1000)}")))
        yield " ".join(line) + rng.choice((".", ".", ":", ""))


def build_document(words: Sequence[str], lines: Iterable[str], tokens: int, facts: int, rng: random.Random) -> Document:
    """The first lines of a text, and `facts` fact lines at uniform depth: exactly `tokens` tokens.

    Keys and values of a document are all different, and no key stands before a colon in the text.
    Raises TooShort if the lines end before, FactsDoNotFit if the facts do not fit the document or the vocabulary.
    """
    if not 1 <= facts * FACT_TOKENS < tokens:
        raise FactsDoNotFit(f"{facts} facts of {FACT_TOKENS} tokens do not fit {tokens} tokens")
    keys, values = fact_words(words)
    text = _first_lines(lines, tokens - facts * FACT_TOKENS)
    flat = [word for _, line_words in text for word in line_words]
    taken = {key for key, colon in pairwise(flat) if colon == ":"}
    keys = [key for key in keys if key not in taken]
    if facts > len(keys) or 3 * facts > len(values):
        raise FactsDoNotFit(f"{facts} facts are more than {len(keys)} keys, {len(values)} values")
    chosen_keys, chosen = rng.sample(keys, facts), rng.sample(values, 3 * facts)

    # One fact in each of `facts` equal stretches of the text keeps every depth equally likely.
    places = [(index + rng.random()) / facts * len(flat) for index in range(facts)]
    out: list[str] = []
    found: list[Fact] = []
    position = filled = 0
    for line, line_words in [*text, ("", [])]:
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


def _first_lines(lines: Iterable[str], tokens: int) -> list[tuple[str, list[str]]]:
    """Lines of exactly `tokens` tokens, each with its tokens; the last one is cut."""
    found: list[tuple[str, list[str]]] = []
    left = tokens
    for line in lines:
        words = words_of(line)
        if len(words) >= left:
            return [*found, (" ".join(words[:left]), words[:left])]
        if words:
            found.append((line, words))
            left -= len(words)
    raise TooShort(tokens - left, tokens)
