"""Measures a checkpoint over documents with facts, shows what was found, and writes its profile beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from decode_worker.calibration import measure
from decode_worker.calibration.profile import AUTO_NAME, Profile
from decode_worker.demo.document import Document
from decode_worker.model.checkpoint import Checkpoint
from decode_worker.model.tokenizer import Tokenizer
from decode_worker.model.transformer import Transformer

ROOM = 256  # positions behind the document for a question and its answer
BUDGETS = (0.1, 0.05)


def calibrate(directory: Path, documents: Sequence[Document], context: int) -> None:
    """`documents` of `context` tokens each; writes headgate_profile.json into the checkpoint's directory."""
    console, limits = Console(), measure.Limits()
    model = Transformer.load(Checkpoint.open(directory), context + ROOM)
    tokenizer = Tokenizer.load(directory, model.config.vocab)
    cases = [_case(model, tokenizer, document, limits) for document in documents]
    profile, points, full = measure.measure_profile(model, cases, limits)
    _show_heads(console, profile)
    rows = ([f"{p.p:g}", f"{p.eta:g}", f"{p.accuracy:.1%}", f"{p.hit_ratio:.1%}"] for p in points)
    console.print(_table(f"QSAC by p and eta; full attention {full:.1%}", ("p", "eta", "accuracy", "label hits"), rows))
    _show_hash(console, model, cases, profile)
    measure.save(profile, directory / AUTO_NAME)
    console.print(f"eta {profile.eta:g}, p {profile.p:g} -> {directory / AUTO_NAME}")


def _case(model: Transformer, tokenizer: Tokenizer, document: Document, limits: measure.Limits) -> measure.Case:
    pairs = [(tokenizer.encode(fact.question), tokenizer.encode(fact.answer)) for fact in document.facts]
    prefix = measure.prefill(model, tokenizer.encode(document.text), limits.storage)
    return measure.Case(prefix, measure.Questions.of(pairs))


def _show_heads(console: Console, profile: Profile) -> None:
    rows = zip(
        profile.kv_importance, profile.query_importance, profile.mean_similarity, profile.thresholds(), strict=True
    )
    columns = ("layer", "KV importance", "query importance", "similarity", "tau")
    texts = ([str(layer), *map(_numbers, row)] for layer, row in enumerate(rows))
    console.print(_table("heads", columns, texts))


def _show_hash(console: Console, model: Transformer, cases: Sequence[measure.Case], profile: Profile) -> None:
    rows = []
    for name, variant in measure.hash_variants(profile, cases).items():
        for budget in BUDGETS:
            kept = measure.attention_kept(model, cases, variant, replace(measure.Limits(), budget=budget))[1:]
            rows.append([name, f"{budget:.0%}", f"{kept.mean():.3f}", " | ".join(map(_numbers, kept))])
    columns = ("hash", "budget", "mean", "by layer from 1")
    console.print(_table("attention mass kept, relative to the exact selection", columns, rows))


def _table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    return table


def _numbers(values: Any) -> str:
    return " ".join(f"{value:.3f}" for value in values)
