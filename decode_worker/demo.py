"""`headgate demo`: a long document in a private store, questions answered by QSAC and by full attention, one table."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from decode_worker.config import ConfigError, WorkerConfig
from decode_worker.figures import Figure, print_json, print_table
from decode_worker.model.checkpoint import Checkpoint
from decode_worker.model.tokenizer import Tokenizer
from decode_worker.records import RecordFormat
from decode_worker.worker import Answer, Footprint, PrefillReport, Worker
from kvstore_service.client import AdminClient
from kvstore_service.client.private import PrivateDaemon
from kvstore_service.shared.scratch import Scratch, disk

CHECKOUT = Path(__file__).resolve().parents[1]
DEFAULT_MODEL = CHECKOUT / "models" / "retriever"
SHOWN = 5
# The store's DRAM holds a quarter of the document's KV: the rest must come from NVMe.
DRAM_SHARE = 4
DRAM_BYTES_MIN = 4 << 20
PREFILL_TOKENS = 8192
SEED = 20261


@dataclass(frozen=True)
class Task:
    """A document and its questions, as token ids and as text."""

    document: list[int]
    questions: list[tuple[str, str]]  # (question, expected answer)


@dataclass
class Outcome:
    """What one policy did with all questions."""

    answers: list[Answer]
    texts: list[str]
    correct: int
    counters: dict[str, int]
    footprint: Footprint

    @property
    def accuracy(self) -> float:
        return self.correct / len(self.texts)

    @property
    def steps(self) -> int:
        return sum(answer.steps for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.steps / sum(answer.decode_s for answer in self.answers)


def run(config: WorkerConfig, tokens: int, questions: int, with_ray: bool, as_json: bool) -> None:
    """A document of `tokens` tokens. Raises ConfigError, StoreError, CheckpointError, ValueError, RuntimeError with
    one-line messages."""
    console = Console(stderr=True)
    document = _document(config, tokens, questions)
    with contextlib.ExitStack() as stack:
        Checkpoint.open(config.model).config.check_context(config.context)
        dram_bytes = max(DRAM_BYTES_MIN, _kv_bytes(config, tokens) // DRAM_SHARE)
        scratch = stack.enter_context(Scratch("headgate-data", disk()))
        with console.status("starting a private daemon"):
            daemon = stack.enter_context(PrivateDaemon(scratch.path, dram_bytes))
        config = WorkerConfig(**{**vars(config), "socket": daemon.socket, "broker": daemon.broker})
        worker = stack.enter_context(_worker(config, with_ray, console))
        task = _task(worker, document)
        report = _prefill(worker, task, console)
        sparse = _ask(worker, task, config.policy, console)
        speeds = _prefill_speeds(worker, task)
        worker.reconfigure(policy="full")
        full = _ask(worker, task, "full", console)
        figures = _figures(config, report, sparse, full, speeds, dram_bytes, daemon)
    if as_json:
        print_json(figures)
        return
    _show_answers(Console(), task, sparse)
    print_table(
        f"{len(task.document):,}-token document, {questions} questions, {config.policy} + {config.retriever}", figures
    )


@contextlib.contextmanager
def _worker(config: WorkerConfig, with_ray: bool, console: Console) -> Iterator[Any]:
    """A Worker, or a RemoteWorker that stands for one."""
    with contextlib.ExitStack() as stack:
        if with_ray:
            # Before ray is imported: a thread's late call would start another Ray after the end of this one.
            os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
            from decode_worker.actor import RemoteWorker, local_ray

            with console.status("starting a local Ray with one worker"):
                stack.enter_context(local_ray())
                worker: Any = stack.enter_context(RemoteWorker(config))
                worker.ping()
        else:
            worker = stack.enter_context(contextlib.closing(Worker(config)))
        yield worker


def _prefill(worker: Any, task: Task, console: Console) -> PrefillReport:
    with _bar(console) as bar:
        row = bar.add_task("prefill", total=None)
        report: PrefillReport = worker.prefill_document(
            task.document, lambda done, total: bar.update(row, completed=done, total=total or None)
        )
    return report


def _ask(worker: Any, task: Task, label: str, console: Console) -> Outcome:
    answers, texts, correct = [], [], 0
    with _bar(console) as bar:
        for question, expected in bar.track(task.questions, description=f"questions, {label}"):
            new_tokens = len(worker.encode(expected))
            answer = worker.answer(task.document, worker.encode(question), new_tokens, decode_question=True)
            text = worker.decode(answer.tokens)
            answers.append(answer)
            texts.append(text)
            correct += text.split() == expected.split()
    return Outcome(answers, texts, correct, worker.counters(), worker.footprint())


def _prefill_speeds(worker: Any, task: Task) -> tuple[float, float]:
    """Tokens/s of an 8K prompt with the store and without. Both are new to the store, or nothing would be written."""
    prompts = [task.document[first : first + PREFILL_TOKENS] for first in (1, 2)]
    without_store = worker.prefill_speed(prompts[0], stored=False)
    return worker.prefill_speed(prompts[1], stored=True), without_store


def _figures(
    config: WorkerConfig,
    report: PrefillReport,
    sparse: Outcome,
    full: Outcome,
    speeds: tuple[float, float],
    dram_bytes: int,
    daemon: PrivateDaemon,
) -> list[Figure]:
    with contextlib.closing(AdminClient.connect(daemon.socket, daemon.broker)) as admin:
        status = admin.get_status()
    used_dram = min(dram_bytes, status.counters["frames_used"] * status.counters["frame_bytes"])
    kv_bytes = _kv_bytes(config, report.stored_tokens)
    counters, foot = sparse.counters, sparse.footprint
    nvme = sum(a.nvme_read_bytes or 0 for a in sparse.answers)
    proc = sum(a.proc_read_bytes or 0 for a in sparse.answers)
    with_store, without_store = speeds
    full_device = full.footprint.device_bytes
    moved = sum(a.records_moved for a in sparse.answers) / sparse.steps
    cache_bytes = foot.device_bytes - foot.resident_bytes
    f, other = Figure, "full attention"
    return [
        f("accuracy", 100 * sparse.accuracy, "%", other, 100 * full.accuracy, _ratio(sparse.accuracy, full.accuracy)),
        f("decode", sparse.tokens_per_s, "tokens/s", other, full.tokens_per_s, sparse.tokens_per_s / full.tokens_per_s),
        f("bind", _mean_ms(sparse), "ms/session", other, _mean_ms(full), _mean_ms(sparse) / _mean_ms(full)),
        f("kv_bytes", kv_bytes, "B"),
        f("device_bytes", foot.device_bytes, "B", other, full_device, foot.device_bytes / full_device),
        f("resident_bytes", foot.resident_bytes, "B"),
        f("offloaded_bytes", foot.offloaded_bytes, "B"),
        f("device_share", cache_bytes / foot.offloaded_bytes, "(device - resident) / offloaded"),
        f("index_bytes", foot.index_bytes, "B"),
        f("dram_bytes", used_dram, "B", "budget", dram_bytes, used_dram / dram_bytes),
        f("nvme_bytes", status.pack_bytes, "B"),
        f("hit_ratio", counters["hits"] / max(1, counters["lookups"]), "label hits / lookups"),
        f("records_moved", moved, "records/token"),
        f("nvme_read_bytes", nvme, "B in decode", "/proc/PID/io", proc, _ratio(nvme, proc)),
        f("prefill", report.tokens / report.seconds, f"tokens/s, {report.tokens} tokens"),
        f("prefill_8k", with_store, "tokens/s", "without the store", without_store, with_store / without_store),
    ]  # fmt: skip


def _show_answers(console: Console, task: Task, outcome: Outcome) -> None:
    for (question, expected), text in list(zip(task.questions, outcome.texts, strict=True))[:SHOWN]:
        mark = "[green]right[/]" if text.split() == expected.split() else f"[red]expected[/] {expected}"
        console.print(f"  {question} [bold]{text}[/]  {mark}", highlight=False)
    console.print(f"  ... {outcome.correct} of {len(outcome.texts)} right\n", highlight=False)


def _document(config: WorkerConfig, tokens: int, questions: int) -> Any:
    """models.corpus.Document with a fact for every question."""
    corpus = _corpus()
    Tokenizer.load(config.model, Checkpoint.open(config.model).config.vocab)
    try:
        return corpus.build_document(corpus.load_words(config.model), tokens, questions, SEED, "demo")
    except (ValueError, KeyError, TypeError) as error:
        fix = "give fewer --questions, a longer --context or the shipped --model"
        raise ConfigError(f"--questions {questions}: {error}; {fix}") from None


def _task(worker: Any, document: Any) -> Task:
    return Task(worker.encode(document.text), [(fact.question, fact.answer) for fact in document.facts])


def _corpus() -> Any:
    """models/corpus.py of the checkout, which makes documents with facts."""
    if not (CHECKOUT / "models" / "corpus.py").is_file():
        raise ValueError(
            "the demo's documents are made by models/corpus.py: run `make demo` in a checkout of the repository"
        )
    sys.path.insert(0, str(CHECKOUT))
    try:
        return importlib.import_module("models.corpus")
    finally:
        sys.path.remove(str(CHECKOUT))


def _kv_bytes(config: WorkerConfig, tokens: int) -> int:
    shape = Checkpoint.open(config.model).config
    return (
        tokens
        * shape.layers
        * shape.kv_heads
        * RecordFormat(shape.kv_heads, shape.head_dim, config.storage).record_bytes
    )


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:>16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )


def _mean_ms(outcome: Outcome) -> float:
    return 1000 * sum(a.bind_s for a in outcome.answers) / len(outcome.answers)


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None
