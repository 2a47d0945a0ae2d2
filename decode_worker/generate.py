"""`headgate generate`: streams the continuation of a text file by a user's own checkpoint, and says what it took."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from decode_worker.config import WorkerConfig
from decode_worker.figures import Figure, report
from decode_worker.model.checkpoint import Checkpoint
from decode_worker.model.sampling import Sampling
from decode_worker.model.tokenizer import Tokenizer
from decode_worker.scheduler import Finish, Request, Usage
from decode_worker.text_file import read_text
from decode_worker.worker import Worker
from kvstore_service.client import StoreClient, StoreError
from kvstore_service.client.private import PrivateDaemon
from kvstore_service.shared.scratch import Scratch, disk


def run(
    config: WorkerConfig,
    prompt_file: Path,
    new_tokens: int,
    sampling: Sampling,
    stop: Sequence[str],
    *,
    private: bool,
    as_json: bool,
) -> None:
    """Prints text as it comes and then, on stderr, what it took; or both at the end in one JSON object.

    Raises ValueError, StoreError, CheckpointError, OSError."""
    ids = _encode(config, prompt_file, new_tokens)
    with contextlib.ExitStack() as stack:
        if private:
            scratch = stack.enter_context(Scratch("headgate-data", disk()))
            daemon = stack.enter_context(PrivateDaemon(scratch.path))
            config = replace(config, socket=Path(daemon.socket), broker=Path(daemon.broker))
        else:
            _require_daemon(config)
        worker = stack.enter_context(contextlib.closing(Worker(config)))
        window, refused = worker.windows()
        request = Request(ids, new_tokens, sampling, stop=tuple(stop))
        text, finish, usage = _stream(worker, request, None if as_json else sys.stdout)
    if as_json:
        told = {"window": window, "windows_refused": refused, "finish": finish.value, "text": text}
        print(json.dumps({**report(_figures(usage)), **told}, indent=2))
    else:
        print("\n" + summary(usage, finish), file=sys.stderr)
        for name, reason in refused.items():
            print(f"window {window}, not {name}: {reason}", file=sys.stderr)


def summary(usage: Usage, finish: Finish) -> str:
    """One line for people."""
    first_s = usage.waited_s + usage.prefill_s
    total_s = first_s + usage.decode_s
    first = f": the first after {first_s:.2f} s" if usage.generated else ""
    steps = f", then {_rate(usage):.1f} tokens/s" if usage.steps else ""
    prefill = f"; prefill took {usage.prefill_s / total_s:.0%} of it"
    reused = f", {usage.reused:,} of {usage.prompt:,} prompt tokens were in the store"
    ended = "; then the text ended (at its end-of-sequence token or a stop text)" if finish is Finish.STOP else ""
    return f"{usage.generated} tokens in {total_s:.1f} s{first}{steps}{prefill}{reused}{ended}"


def _figures(usage: Usage) -> list[Figure]:
    first_s = usage.waited_s + usage.prefill_s
    return [
        Figure("time_to_first_token", first_s, "s"),
        Figure("decode", _rate(usage), "tokens/s"),
        Figure("prefill_share", usage.prefill_s / (first_s + usage.decode_s), "prefill / all"),
        Figure("prompt_tokens", usage.prompt, "tokens"),
        Figure("reused_tokens", usage.reused, "tokens"),
        Figure("generated_tokens", usage.generated, "tokens"),
    ]


def _rate(usage: Usage) -> float:
    """Tokens per second of the steps, the one that ended the text included; 0 without any."""
    return usage.steps / usage.decode_s if usage.steps else 0.0


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


def _stream(worker: Worker, request: Request, shown: TextIO | None) -> tuple[str, Finish, Usage]:
    """Shows the text as it comes, and ends with it."""
    columns = (TextColumn("prefill"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    texts: list[str] = []
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        row = bar.add_task("prefill", total=None)
        outputs = worker.generate(request, lambda done, total: bar.update(row, completed=done, total=total))
        first = next(outputs)
    try:
        for output in itertools.chain([first], outputs):
            texts.append(output.text)
            if shown is not None:
                print(output.text, end="", file=shown, flush=True)
    finally:
        if shown is not None:
            print(file=shown, flush=True)
    assert output.finish is not None, "the last output of a text says how it ended"
    assert output.usage is not None
    return "".join(texts), output.finish, output.usage
