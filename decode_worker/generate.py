"""`headgate generate`: streams the continuation of a text file by a user's own checkpoint."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from decode_worker.config import WorkerConfig
from decode_worker.model.checkpoint import Checkpoint
from decode_worker.model.sampling import Sampling
from decode_worker.model.tokenizer import Tokenizer
from decode_worker.scheduler import Request
from decode_worker.text_file import read_text
from decode_worker.worker import Worker
from kvstore_service.client import StoreClient, StoreError
from kvstore_service.client.private import PrivateDaemon
from kvstore_service.shared.scratch import Scratch, disk


def run(
    config: WorkerConfig, prompt_file: Path, new_tokens: int, sampling: Sampling, stop: Sequence[str], private: bool
) -> int:
    """Prints text as it comes; returns the number of tokens. Raises ValueError, StoreError, CheckpointError,
    OSError."""
    ids = _encode(config, prompt_file, new_tokens)
    with contextlib.ExitStack() as stack:
        if private:
            scratch = stack.enter_context(Scratch("headgate-data", disk()))
            daemon = stack.enter_context(PrivateDaemon(scratch.path))
            config = replace(config, socket=Path(daemon.socket), broker=Path(daemon.broker))
        else:
            _require_daemon(config)
        worker = stack.enter_context(contextlib.closing(Worker(config)))
        return _stream(worker, Request(ids, new_tokens, sampling, stop=tuple(stop)))


def _encode(config: WorkerConfig, prompt_file: Path, new_tokens: int) -> list[int]:
    """Token ids of the prompt; refuses what cannot run before a daemon is started or weights are loaded."""
    text = read_text("--prompt-file", prompt_file)
    shape = Checkpoint.open(config.model).config
    shape.check_context(config.context)
    ids = Tokenizer.load(config.model, shape.vocab).encode(text)
    if not ids:
        raise ValueError(f"--prompt-file {prompt_file}: the tokenizer makes no token of it; give a longer text")
    if len(ids) + new_tokens > config.context:
        fix = f"shorten the text or give fewer --new-tokens; this model covers {shape.context_max}"
        if len(ids) + new_tokens <= shape.context_max:
            fix = f"give --context {len(ids) + new_tokens} or more"
        raise ValueError(
            f"{len(ids)} prompt tokens + {new_tokens} new ones (--new-tokens) exceed --context {config.context}: {fix}"
        )
    return ids


def _require_daemon(config: WorkerConfig) -> None:
    fix = "start one (kvstored), name its --socket and --broker, or give --private"
    try:
        with StoreClient.connect(str(config.socket), str(config.broker), config.name, config.answer_s) as client:
            client.require_serving()
    except StoreError as error:
        if error.code == "DEADLINE_EXCEEDED":
            silent = f"the daemon at {config.socket} has not answered for {config.wait_ms} ms"
            raise StoreError(error.code, f"{silent}: it is stopped or overloaded; see its log, or {fix}") from error
        if error.code != "UNAVAILABLE":
            raise
        raise StoreError(error.code, f"{error.message}; {fix}") from error


def _stream(worker: Worker, request: Request) -> int:
    columns = (TextColumn("prefill"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    count = 0
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        row = bar.add_task("prefill", total=None)
        pieces = worker.generate(request, lambda done, total: bar.update(row, completed=done, total=total))
        first = next(pieces, None)
    try:
        for piece in itertools.chain([] if first is None else [first], pieces):
            count += piece.token is not None
            print(piece.text, end="", flush=True)
    finally:
        print(flush=True)
    return count
