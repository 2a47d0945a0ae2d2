"""Questions on a long document in a private store, answered by a sparse policy and by full attention."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from decode_worker.config import WorkerConfig
from decode_worker.demo.document import Document, words_of
from decode_worker.demo.generation import ALWAYS_SELECTS, FULL
from decode_worker.figures import Figure
from decode_worker.model.checkpoint import Checkpoint
from decode_worker.records import RecordFormat
from decode_worker.worker import Answer, Footprint, PrefillReport, Worker
from kvstore_service.client import AdminClient
from kvstore_service.client.private import PrivateDaemon
from kvstore_service.shared.scratch import Scratch, disk

# The store's DRAM holds a quarter of the document's KV: the rest must come from NVMe.
DRAM_SHARE = 4
DRAM_BYTES_MIN = 4 << 20
PREFILL_TOKENS = 8192
SHOWN = 5
COMPARED = 25  # questions that the policy which selects always answers too


@dataclass(frozen=True)
class Task:
    """A document and its questions, as token ids and as text."""

    document: list[int]
    questions: list[tuple[str, str]]  # (question, expected answer)

    def first(self, count: int) -> Task:
        return Task(self.document, self.questions[:count])


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

    @property
    def hit_ratio_all(self) -> float:
        """With the first step of each session, which misses everywhere."""
        return self.counters["hits"] / max(1, self.counters["lookups"] + self._first_lookups)

    @property
    def _first_lookups(self) -> int:
        return len(self.answers) * self.footprint.offloaded_heads

    def moved(self, count: int) -> float:
        """Records per token of the first `count` answers."""
        answers = self.answers[:count]
        return sum(answer.records_moved for answer in answers) / sum(answer.steps for answer in answers)


@dataclass(frozen=True)
class Questioned:
    """The questions as the policy of the configuration answered them, and the figures of all policies."""

    task: Task
    sparse: Outcome
    figures: list[Figure]


def answer_questions(config: WorkerConfig, document: Document, with_ray: bool, console: Console) -> Questioned:
    """In a private daemon that lives as long as this takes; the questions are the document's facts."""
    with contextlib.ExitStack() as stack:
        tokens = len(words_of(document.text))
        dram_bytes = max(DRAM_BYTES_MIN, _kv_bytes(config, tokens) // DRAM_SHARE)
        scratch = stack.enter_context(Scratch("headgate-data", disk()))
        with console.status("starting a private daemon"):
            daemon = stack.enter_context(PrivateDaemon(scratch.path, dram_bytes))
        config = replace(config, socket=Path(daemon.socket), broker=Path(daemon.broker))
        worker = stack.enter_context(_worker(config, with_ray, console))
        task = _task(worker, document)
        report = _prefill(worker, task, console)
        sparse = _ask(worker, task, config.policy, console)
        speeds = _prefill_speeds(worker, task)
        worker.reconfigure(policy=ALWAYS_SELECTS)
        always = _ask(worker, task.first(COMPARED), ALWAYS_SELECTS, console)
        worker.reconfigure(policy=FULL)
        full = _ask(worker, task, FULL, console)
        return Questioned(task, sparse, _figures(config, report, sparse, always, full, speeds, dram_bytes, daemon))


@contextlib.contextmanager
def _worker(config: WorkerConfig, with_ray: bool, console: Console) -> Iterator[Any]:
    """A Worker, or a RemoteWorker that stands for one."""
    with contextlib.ExitStack() as stack:
        if with_ray:
            actor = import_ray()
            with console.status("starting a local Ray with one worker"):
                stack.enter_context(actor.local_ray())
                worker: Any = stack.enter_context(actor.RemoteWorker(config))
                worker.ping()
        else:
            worker = stack.enter_context(contextlib.closing(Worker(config)))
        yield worker


def import_ray() -> Any:
    """decode_worker.actor; ImportError before anything has begun where Ray is not installed."""
    # Before ray is imported: a thread's late call would start another Ray after the end of this one.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    from decode_worker import actor

    return actor


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
    always: Outcome,
    full: Outcome,
    speeds: tuple[float, float],
    dram_bytes: int,
    daemon: PrivateDaemon,
) -> list[Figure]:
    with contextlib.closing(AdminClient.connect(daemon.socket, daemon.broker)) as admin:
        status = admin.get_status()
    used_dram = min(dram_bytes, status.counters["frames_used"] * status.counters["frame_bytes"])
    kv_bytes = _kv_bytes(config, report.stored_tokens)
    foot = sparse.footprint
    nvme = sum(a.nvme_read_bytes or 0 for a in sparse.answers)
    proc = sum(a.proc_read_bytes or 0 for a in sparse.answers)
    with_store, without_store = speeds
    full_device = full.footprint.device_bytes
    compared = len(always.answers)
    moved, moved_always = sparse.moved(compared), always.moved(compared)
    f, other = Figure, "full attention"
    return [
        f("accuracy", 100 * sparse.accuracy, "%", other, 100 * full.accuracy, _ratio(sparse.accuracy, full.accuracy)),
        f("decode", sparse.tokens_per_s, "tokens/s", other, full.tokens_per_s, sparse.tokens_per_s / full.tokens_per_s),
        f("bind", _mean_ms(sparse), "ms/session", other, _mean_ms(full), _mean_ms(sparse) / _mean_ms(full)),
        f("kv_bytes", kv_bytes, "B"),
        f("device_bytes", foot.device_bytes, "B", other, full_device, foot.device_bytes / full_device),
        f("resident_bytes", foot.resident_bytes, "B"),
        f("offloaded_bytes", foot.offloaded_bytes, "B"),
        f("index_bytes", foot.index_bytes, "B"),
        f("device_share", foot.device_share, "(device - resident + index) / offloaded"),
        f("attended", statistics.mean(a.attended for a in sparse.answers), "of the tokens, offloaded heads"),
        f("dram_bytes", used_dram, "B", "budget", dram_bytes, used_dram / dram_bytes),
        f("nvme_bytes", status.pack_bytes, "B"),
        f("hit_ratio", sparse.counters["hits"] / max(1, sparse.counters["lookups"]), "label hits / lookups"),
        f("hit_ratio_all", sparse.hit_ratio_all, "the same with first steps"),
        f("records_moved", moved, f"records/token, {compared} questions", ALWAYS_SELECTS, moved_always,
          _ratio(moved, moved_always)),
        f("nvme_read_bytes", nvme, "B in decode", "/proc/PID/io", proc, _ratio(nvme, proc)),
        f("prefill", report.tokens / report.seconds, f"tokens/s, {report.tokens} tokens"),
        f("prefill_8k", with_store, "tokens/s", "without the store", without_store, with_store / without_store),
    ]  # fmt: skip


def show_answers(console: Console, questioned: Questioned) -> None:
    """The first few, and how many were right."""
    task, outcome = questioned.task, questioned.sparse
    for (question, expected), text in list(zip(task.questions, outcome.texts, strict=True))[:SHOWN]:
        mark = "[green]right[/]" if text.split() == expected.split() else f"[red]expected[/] {expected}"
        console.print(f"  {question} [bold]{text}[/]  {mark}", highlight=False)
    console.print(f"  ... {outcome.correct} of {len(outcome.texts)} right\n", highlight=False)


def _task(worker: Any, document: Document) -> Task:
    return Task(worker.encode(document.text), [(fact.question, fact.answer) for fact in document.facts])


def _kv_bytes(config: WorkerConfig, tokens: int) -> int:
    shape = Checkpoint.open(config.model).config
    return (
        tokens
        * shape.layers
        * shape.kv_heads
        * RecordFormat(shape.kv_heads, shape.head_dim, config.storage, config.record_kind).record_bytes
    )


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description:>16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Redirected, a line that a thread of Ray's prints draws the bar again below itself, even after the bar's end.
    return Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False)


def _mean_ms(outcome: Outcome) -> float:
    return 1000 * sum(a.bind_s for a in outcome.answers) / len(outcome.answers)


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None
