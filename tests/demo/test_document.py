"""The demo's document: a user's text with facts in it, or our own documentation and made lines."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest

from decode_worker.demo import texts
from decode_worker.demo.document import FactsDoNotFit, TooShort, build_document, load_words, made_lines, words_of
from decode_worker.demo.run import DEFAULT_MODEL

LINE = "the river came down from the hills behind the town"


@pytest.fixture(scope="module")
def words() -> list[str]:
    return load_words(DEFAULT_MODEL)


def test_a_users_text_keeps_its_beginning_and_takes_every_fact(words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("\n".join(f"{LINE} {number}" for number in range(400)))
    document = texts.document_of(file, words, 1024, 10, 1)
    facts = {fact.line for fact in document.facts}
    lines = document.text.splitlines()
    rest = [line for line in lines if line not in facts]
    assert len(facts) == 10
    assert facts < set(lines)
    assert len(words_of(document.text)) == 1024
    assert rest[:-1] == file.read_text().splitlines()[: len(rest) - 1]


def test_our_own_document_begins_with_the_documentation(words: list[str]) -> None:
    document = texts.own_document(words, 4096, 5, 1)
    assert "# Headgate" in document.text[:100]
    assert len(words_of(document.text)) == 4096


def test_made_lines_follow_where_there_is_no_documentation(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "CHECKOUT", tmp_path)
    document = texts.own_document(words, 4096, 5, 1)
    assert len(words_of(document.text)) == 4096
    known = set(words)
    assert all(word in known for word in words_of(document.text))


def test_made_lines_are_varied_and_repeatable(words: list[str]) -> None:
    first, again = (list(islice(made_lines(words, random.Random(3)), 200)) for _ in range(2))
    assert first == again
    assert len(set(first)) == 200


def test_a_text_that_ends_too_early_says_how_long_it_is(words: list[str]) -> None:
    with pytest.raises(TooShort) as short:
        build_document(words, [LINE] * 10, 1000, 3, random.Random(0))
    assert (short.value.tokens, short.value.wanted) == (100, 982)


def test_no_fact_is_asked_for_that_the_text_answers(words: list[str]) -> None:
    """Keys that stand before a colon in the text are not used; when all do, no fact fits."""
    with pytest.raises(FactsDoNotFit, match="0 keys"):
        build_document(words, [f"{word} :" for word in words if word.isalpha()] * 2, 15_000, 1, random.Random(0))
