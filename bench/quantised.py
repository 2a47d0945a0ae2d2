"""What do packs of int8 and int4 records save, and what do they cost in accuracy, beside bfloat16?

Parts (`--only`), each with all kinds in turn in the same run:

    accuracy  the shipped model answers questions on its own documentation: right answers under `qsac`, and how far the
              logits of steps that attend to everything are from those over bfloat16 records (KL)
    dram      the step of shape B8 with all KV in DRAM, when all heads hit and when none does
    disk      the same when none does and DRAM holds a quarter of the bfloat16 KV, whatever the kind
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.comparison import column, in_turn
from bench.decoder import HITS, SEED, WAIT_MS, Decoder, Document
from bench.parts import run, some_of
from decode_worker.config import WorkerConfig
from decode_worker.demo.document import load_words
from decode_worker.demo.run import DEFAULT_MODEL
from decode_worker.demo.texts import own_document
from decode_worker.engine.engine import Engine
from decode_worker.figures import Figure, print_json, print_table
from decode_worker.synthetic.checkpoint import B8, Shape, random_checkpoint
from kvstore_service.client.private import PrivateDaemon

PLAIN, *QUANTISED = KINDS = ("model", "int8", "int4")
POLICY = "qsac"
ACCURACY_DRAM = "512MiB"


@dataclass(frozen=True)
class Settings:
    """`dram_share`: of the bfloat16 KV, for `disk`."""

    tokens: int = 16 << 10
    steps: int = 8
    repeats: int = 5
    threads: int = min(2, len(os.sched_getaffinity(0)))
    budget: float = 0.1
    dram_share: float = 0.25
    shape: Shape = field(default_factory=lambda: B8)
    document_tokens: int = 8 << 10
    questions: int = 60
    compared: int = 12  # questions whose logits are


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.quantised", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=some_of(PARTS), default=tuple(PARTS), help="parts, such as accuracy,disk")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = measure(Settings(), arguments.only)
    print_json(figures) if arguments.json else print_table("Quantised records", figures)
    return 0


def measure(settings: Settings, parts: Iterable[str]) -> list[Figure]:
    torch.set_num_threads(settings.threads)
    return run(parts, PARTS, settings)


# --- accuracy ---


def accuracy(settings: Settings, directory: Path) -> list[Figure]:
    with PrivateDaemon(directory / "accuracy", ACCURACY_DRAM) as daemon:
        config = {
            "model": DEFAULT_MODEL, "socket": Path(daemon.socket), "broker": Path(daemon.broker),
            "context": 2 * settings.document_tokens, "wait_ms": WAIT_MS, "threads": settings.threads,
        }  # fmt: skip
        right: dict[str, int] = {}
        logits: dict[str, torch.Tensor] = {}
        for kind in KINDS:
            questions = Questions(settings, WorkerConfig(**config, policy=POLICY, record_kind=kind))
            right[kind], _ = questions.ask(settings.questions)
            questions = Questions(settings, WorkerConfig(**config, policy="full", record_kind=kind))
            _, logits[kind] = questions.ask(settings.compared)
    asked, plain = settings.questions, logits[PLAIN].log_softmax(1)
    figures = [Figure("accuracy.bfloat16", 100 * right[PLAIN] / asked, "%")]
    for kind in QUANTISED:
        value = 100 * right[kind] / asked
        figures.append(
            Figure(f"accuracy.{kind}", value, "%", "bfloat16", 100 * right[PLAIN] / asked, right[kind] / right[PLAIN])
        )
        far = (plain.exp() * (plain - logits[kind].log_softmax(1))).sum(1)
        figures.append(Figure(f"kl.{kind}", float(far.mean()), "nats, mean", runs=len(far), max=float(far.max())))
        same = (plain.argmax(1) == logits[kind].argmax(1)).float().mean()
        figures.append(Figure(f"same_token.{kind}", 100 * float(same), "% of the likeliest tokens"))
    return figures


class Questions:
    """The questions of a document that is stored, each asked in a fresh session."""

    def __init__(self, settings: Settings, config: WorkerConfig) -> None:
        self._settings, self._config = settings, config

    def ask(self, count: int) -> tuple[int, torch.Tensor]:
        """How many of the first `count` were answered right; the logits of all steps behind the document, in which the
        right answer is fed whatever was said."""
        with contextlib.closing(Engine(self._config)) as engine:
            encode = engine.tokenizer.encode
            words = load_words(self._config.model)
            document = own_document(words, self._settings.document_tokens, self._settings.questions, SEED)
            ids = encode(document.text)
            stored, _ = engine.prefill(ids)
            engine.close_session(stored)
            right, rows = 0, []
            for fact in document.facts[:count]:
                question, answer = encode(fact.question), encode(fact.answer)
                session, rest = engine.attach([*ids, question[0]])
                fed = [*rest, *question[1:], *answer]
                steps = torch.stack([engine.step([session], [token])[0] for token in fed[:-1]])
                engine.close_session(session)
                right += steps[-len(answer) :].argmax(1).tolist() == answer
                rows.append(steps)
        return right, torch.cat(rows)


# --- steps ---


def dram(settings: Settings, directory: Path) -> list[Figure]:
    return _steps(settings, directory, "dram", ("hit", "miss"), 1.0)


def disk(settings: Settings, directory: Path) -> list[Figure]:
    return _steps(settings, directory, "disk", ("miss",), settings.dram_share)


def _steps(settings: Settings, directory: Path, place: str, hits: tuple[str, ...], dram_share: float) -> list[Figure]:
    """A store for each kind, so that none displaces another's records."""
    checkpoint = random_checkpoint(directory / "model", settings.shape, SEED)
    with contextlib.ExitStack() as stack:
        decoders: dict[str, Decoder] = {}
        for kind in KINDS:
            document = Document(
                checkpoint, directory / kind, settings.tokens,
                budget=settings.budget, threads=settings.threads, record_kind=kind, dram_share=dram_share,
            )  # fmt: skip
            stack.enter_context(document)
            decoders.update((f"{kind}.{each}", document.decoder(POLICY, HITS[each])) for each in hits)
        samples = in_turn({key: each.run for key, each in decoders.items()}, settings.steps, settings.repeats)
        record_bytes = {kind: decoders[f"{kind}.{hits[0]}"].engine.records.record_bytes for kind in KINDS}
    figures = []
    for each in hits:
        plain = samples[f"{PLAIN}.{each}"]
        figures += [Figure.of_runs(f"step_ms.bfloat16.{place}.{each}", column(plain, "step"), "ms")]
        for kind in QUANTISED:
            mine = samples[f"{kind}.{each}"]
            at = f"{kind}.{place}.{each}"
            figures.append(
                Figure.of_runs(f"step_ms.{at}", column(mine, "step"), "ms", "bfloat16", column(plain, "step"))
            )
            ratios = [a / b for a, b in zip(column(mine, "step"), column(plain, "step"), strict=True)]
            names = [f"quantised_step_ratio.{at}", *([f"quantised_step_ratio.{kind}"] if place == "disk" else [])]
            figures += [Figure.of_runs(name, ratios, "x") for name in names]
        for kind in KINDS:
            mine, name = samples[f"{kind}.{each}"], "bfloat16" if kind == PLAIN else kind
            moved = [record_bytes[kind] * count for count in column(mine, "moved")]
            figures.append(Figure.of_runs(f"moved_bytes.{name}.{place}.{each}", moved, "B/step"))
            if place == "disk":
                read = column(mine, "nvme_read")
                figures.append(Figure.of_runs(f"nvme_read_bytes.{name}.{place}.{each}", read, "B/step"))
    return figures


PARTS: dict[str, Callable[[Settings, Path], list[Figure]]] = {part.__name__: part for part in (accuracy, dram, disk)}


if __name__ == "__main__":
    sys.exit(main())
