"""`headgate generate`: streams the continuation of a text file by a user's own checkpoint."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from decode_worker.config import WorkerConfig
from decode_worker.model.sampling import Sampling
from decode_worker.worker import Worker
from kvstore_service.private import PrivateDaemon


def run(config: WorkerConfig, prompt_file: Path, new_tokens: int, sampling: Sampling, private: bool) -> int:
    """Prints text as it comes; returns the number of tokens. Raises ValueError, StoreError, CheckpointError,
    OSError."""
    text = _read_prompt(prompt_file)
    with contextlib.ExitStack() as stack:
        if private:
            data_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="headgate-", dir="/var/tmp"))
            daemon = stack.enter_context(PrivateDaemon(data_dir))
            config = replace(config, socket=Path(daemon.socket), broker=Path(daemon.broker))
        worker = stack.enter_context(contextlib.closing(Worker(config)))
        ids = worker.encode(text)
        if len(ids) + new_tokens > config.context:
            raise ValueError(
                f"{len(ids)} prompt tokens + {new_tokens} new ones exceed --context {config.context}: "
                "raise it or shorten the text"
            )
        return _stream(worker, ids, new_tokens, sampling)


def _stream(worker: Worker, ids: list[int], new_tokens: int, sampling: Sampling) -> int:
    columns = (TextColumn("prefill"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    count, pieces = 0, worker.text_stream()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        row = bar.add_task("prefill", total=None)
        tokens = worker.generate(
            ids, new_tokens, sampling, lambda done, total: bar.update(row, completed=done, total=total)
        )
        first = next(tokens, None)
    for token in itertools.chain([] if first is None else [first], tokens):
        count += 1
        print(pieces.push(token), end="", flush=True)
    print(pieces.finish(), flush=True)
    return count


def _read_prompt(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompt-file {path}: byte {error.start} is not UTF-8; give a text file") from None
    if not text.strip():
        raise ValueError(f"--prompt-file {path}: the prompt is empty; give a file with text")
    return text
