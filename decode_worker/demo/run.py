"""`headgate demo`: what the store is for, on this machine: a long generation, then questions on a long document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from decode_worker.config import ConfigError, WorkerConfig
from decode_worker.demo.curve import figures as curve_figures
from decode_worker.demo.curve import print_curve
from decode_worker.demo.document import Document, FactsDoNotFit, load_words
from decode_worker.demo.generation import Result, measure
from decode_worker.demo.questions import answer_questions, import_ray, show_answers
from decode_worker.demo.texts import CHECKOUT, document_of, own_document
from decode_worker.figures import print_json, print_table
from decode_worker.model.checkpoint import Checkpoint
from decode_worker.model.tokenizer import Tokenizer
from kvstore_service.shared.scratch import Scratch, disk

DEFAULT_MODEL = CHECKOUT / "models" / "retriever"
SEED = 20261


@dataclass(frozen=True)
class Request:
    """What is shown: a generation behind each context of `lengths`, then questions on a document of `tokens` tokens,
    made of the text in `file` or of our own."""

    tokens: int
    questions: int
    lengths: Sequence[int]
    file: Path | None
    with_ray: bool
    as_json: bool


def run(config: WorkerConfig, request: Request) -> None:
    """Raises ConfigError, StoreError, CheckpointError, ValueError, RuntimeError with one-line messages."""
    console = Console(stderr=True)
    document = _document(config, request)
    Checkpoint.open(config.model).config.check_context(config.context)
    if request.with_ray:
        import_ray()
    results = _generations(config, request.lengths, console)
    if results and not request.as_json:
        print_curve(results)
    questioned = answer_questions(config, document, request.with_ray, console)
    if request.as_json:
        print_json([*curve_figures(results), *questioned.figures])
        return
    show_answers(Console(), questioned)
    title = (
        f"The worst case for speed: {request.questions} questions, each in a fresh session, on {request.tokens:,} "
        f"tokens that lie on disk; {config.policy} + {config.retriever}"
    )
    print_table(title, questioned.figures)


def _generations(config: WorkerConfig, lengths: Sequence[int], console: Console) -> list[Result]:
    results: list[Result] = []
    with Scratch("headgate-data", disk()) as scratch, console.status("") as status:
        for length in lengths:
            status.update(f"a generation behind {length:,} tokens")
            results += measure(scratch.path, length, config, console.print)
    return results


def _document(config: WorkerConfig, request: Request) -> Document:
    """With a fact for every question."""
    Tokenizer.load(config.model, Checkpoint.open(config.model).config.vocab)
    try:
        words = load_words(config.model)
    except (KeyError, TypeError):
        raise ConfigError(f"model={config.model}: its tokenizer knows no whole words; use the shipped model") from None
    try:
        if request.file is not None:
            return document_of(request.file, words, request.tokens, request.questions, SEED)
        return own_document(words, request.tokens, request.questions, SEED)
    except FactsDoNotFit as error:
        fix = "give fewer --questions, a longer --context or the shipped --model"
        raise ConfigError(f"--questions {request.questions}: {error}; {fix}") from None
