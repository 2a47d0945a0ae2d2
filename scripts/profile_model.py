"""Measure a checkpoint and write headgate_profile.json into its directory.

    python scripts/profile_model.py --model models/retriever [--context 4096] [--documents 4] [--questions 64]

Documents are of the corpus split `eval`; what each figure means stands in decode_worker/profiling.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from decode_worker import profiling  # noqa: E402
from decode_worker.model.checkpoint import Checkpoint  # noqa: E402
from decode_worker.model.tokenizer import Tokenizer  # noqa: E402
from decode_worker.model.transformer import Transformer  # noqa: E402
from decode_worker.profile import AUTO_NAME, Profile  # noqa: E402
from models import corpus  # noqa: E402

ROOM = 256  # positions behind the document for a question and its answer
BUDGETS = (0.1, 0.05)


def load_cases(model: Transformer, directory: Path, args: argparse.Namespace) -> list[profiling.Case]:
    """The stored documents with their questions."""
    tokenizer, words = Tokenizer.load(directory, model.config.vocab), corpus.load_words(directory)
    cases = []
    for seed in range(args.documents):
        document = corpus.build_document(words, args.context, args.questions, seed, "eval")
        pairs = [(tokenizer.encode(fact.question), tokenizer.encode(fact.answer)) for fact in document.facts]
        prefix = profiling.prefill(model, tokenizer.encode(document.text), profiling.Limits().storage)
        cases.append(profiling.Case(prefix, profiling.Questions.of(pairs)))
    return cases


def show_heads(console: Console, profile: Profile) -> None:
    rows = zip(
        profile.kv_importance, profile.query_importance, profile.mean_similarity, profile.thresholds(), strict=True
    )
    columns = ("layer", "KV importance", "query importance", "similarity", "tau")
    texts = ([str(layer), *map(_numbers, row)] for layer, row in enumerate(rows))
    console.print(_table("heads", columns, texts))


def show_hash(console: Console, model: Transformer, cases: list[profiling.Case], profile: Profile) -> None:
    rows = []
    for name, variant in profiling.hash_variants(profile, cases).items():
        for budget in BUDGETS:
            kept = profiling.attention_kept(model, cases, variant, replace(profiling.Limits(), budget=budget))[1:]
            rows.append([name, f"{budget:.0%}", f"{kept.mean():.3f}", " | ".join(map(_numbers, kept))])
    columns = ("hash", "budget", "mean", "by layer from 1")
    console.print(_table("attention mass kept, relative to the exact selection", columns, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--context", type=int, default=4096, help="tokens of a document")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--questions", type=int, default=64, help="facts, and questions, of a document")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    console = Console()
    model = Transformer.load(Checkpoint.open(args.model), args.context + ROOM)
    cases = load_cases(model, args.model, args)
    profile, points, full = profiling.measure(model, cases, profiling.Limits())
    show_heads(console, profile)
    rows = ([f"{p.p:g}", f"{p.eta:g}", f"{p.accuracy:.1%}", f"{p.hit_ratio:.1%}"] for p in points)
    console.print(_table(f"QSAC by p and eta; full attention {full:.1%}", ("p", "eta", "accuracy", "label hits"), rows))
    show_hash(console, model, cases, profile)
    profiling.save(profile, args.model / AUTO_NAME)
    console.print(f"eta {profile.eta:g}, p {profile.p:g} -> {args.model / AUTO_NAME}")


def _table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    return table


def _numbers(values: Any) -> str:
    return " ".join(f"{value:.3f}" for value in values)


if __name__ == "__main__":
    main()
