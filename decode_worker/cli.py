"""`headgate`: the demo, and generation with one's own checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from decode_worker.config import DEFAULTS, ENVIRONMENT, KEYS, ConfigError, WorkerConfig
from decode_worker.model.errors import CheckpointError
from kvstore_service.client import StoreError
from kvstore_service.shared.settings import Parser, add_flags, count, number
from kvstore_service.shared.stdout import StdoutError, whole_stdout

DEMO_CONTEXT = 32768
DEMO_QUESTIONS = 100
DEMO_LENGTHS = (8192, 32768, 131072)
# Questions and answers live behind the document.
DEMO_ROOM = 512
AGAIN_S = 0.01
# What installs a package that is missing.
EXTRAS = {"ray": "serve", "torch": "worker", "safetensors": "worker", "tokenizers": "worker"}


def main(argv: Sequence[str] | None = None) -> int:
    """0, 1 for a failure, 2 for wrong usage, 130 and 143 after SIGINT and SIGTERM; a failure is one line on stderr."""
    try:
        arguments = _parser().parse_args(argv)
    except ConfigError as error:
        return _fail(error, 2)
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, _end)
    sys.unraisablehook = _unraisable
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        try:
            with whole_stdout():
                arguments.run(arguments)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)  # what `_end` raised has been seen
    except ConfigError as error:
        return _fail(error, 2)
    except StoreError as error:
        limits = " and ".join(violation.subject for violation in error.violations)
        return _fail(error.message + (f"; raise the daemon's {limits}, or ask for less" if limits else ""), 1)
    except BrokenPipeError:
        return 1
    except (CheckpointError, StdoutError, ValueError, OSError, RuntimeError, MemoryError) as error:
        return _fail(error, 1)
    except ImportError as error:
        if error.name not in EXTRAS:
            raise
        instead = ", or give --no-ray" if error.name == "ray" else ""
        return _fail(f"{error.name} is not installed: pip install 'headgate[{EXTRAS[error.name]}]'{instead}", 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except SystemExit:  # from _end, or from the handler that Ray sets while it starts
        return _fail("terminated", 143)
    return 0


def _end(received: int, _: object) -> None:
    """Unwinds, so that daemons, Ray and temporary directories are cleaned up; nothing interrupts that.

    What is raised here may go no further than a finaliser or a library that drops errors (gRPC and nanobind have such
    places): it is raised again until it is seen to unwind."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, lambda *_: None if _unwinding() else _raise(received))
    signal.setitimer(signal.ITIMER_REAL, AGAIN_S, AGAIN_S)
    _raise(received)


def _raise(received: int) -> None:
    raise KeyboardInterrupt if received == signal.SIGINT else SystemExit


def _unwinding() -> bool:
    """Whether what `_raise` raises is being handled."""
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
        error = error.__context__
    return error is not None


def _unraisable(dropped: Any) -> None:
    """Says what a finaliser raised, unless `_end` did, which comes again."""
    if not issubclass(dropped.exc_type, KeyboardInterrupt | SystemExit):
        sys.__unraisablehook__(dropped)


def _fail(error: object, status: int) -> int:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    print(f"headgate: {lines[-1]}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="headgate",
        description="Long-context decoding over the Headgate KV store.",
        epilog="Every flag of the worker may also stand in --config (YAML) or the environment (HEADGATE_BUDGET, ...).",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo", help="a document in a private store, answered by QSAC and by full attention", allow_abbrev=False
    )
    demo.add_argument(
        "--questions", type=_positive, default=DEMO_QUESTIONS, metavar="N",
        help="questions to ask (from 1; default: %(default)s)",
    )  # fmt: skip
    demo.add_argument(
        "--context", type=_positive, default=DEMO_CONTEXT, dest="tokens", metavar="N",
        help="tokens of the document (a multiple of 256 from 1024 on; default: %(default)s)",
    )  # fmt: skip
    demo.add_argument(
        "--long", type=_lengths, default=DEMO_LENGTHS, metavar="N,N",
        help="stored tokens behind which a long generation is timed, multiples of 256 from 1024 on, or none "
        f"(default: {','.join(map(str, DEMO_LENGTHS))})",
    )  # fmt: skip
    demo.add_argument(
        "--document", type=Path, metavar="FILE",
        help="UTF-8 text to plant facts in, as long as --context (default: our documentation, and made lines)",
    )  # fmt: skip
    demo.add_argument("--no-ray", action="store_true", help="run the worker in this process (default: in a local Ray)")
    demo.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    demo.set_defaults(run=_demo)
    demo_keys = [key for key in KEYS if key.name not in ("context", "socket", "broker", "name")]
    add_flags(demo, demo_keys, DEFAULTS | {"model": "the shipped retriever"})

    generate = commands.add_parser(
        "generate", help="continue a prompt with a checkpoint of your own", allow_abbrev=False
    )
    generate.add_argument("--prompt-file", type=Path, required=True, metavar="FILE", help="UTF-8 text (required)")
    generate.add_argument(
        "--new-tokens", type=_positive, default=256, metavar="N",
        help="most tokens to generate (from 1; default: %(default)s)",
    )  # fmt: skip
    generate.add_argument(
        "--temperature", type=_checked(number(0, 1000)), default=0.0, metavar="X",
        help="how freely tokens are drawn (from 0 to 1000; default: 0, greedy)",
    )  # fmt: skip
    generate.add_argument(
        "--top-p", type=_checked(_share), default=1.0, metavar="X",
        help="draw from the fewest tokens that reach this probability (above 0, to 1; default: 1, all)",
    )  # fmt: skip
    generate.add_argument(
        "--top-k", type=_natural, default=0, metavar="N", help="draw from the N likeliest tokens (default: 0, all)"
    )
    generate.add_argument(
        "--stop", type=_checked(_some_text), action="append", default=[], metavar="TEXT",
        help="end before this text; may be given several times (default: none)",
    )  # fmt: skip
    generate.add_argument(
        "--private", action="store_true", help="start a daemon of its own instead of using the node's"
    )
    generate.add_argument(
        "--json", action="store_true", help="print one JSON object with the text and the figures instead of the text"
    )
    generate.set_defaults(run=_generate)
    add_flags(generate, KEYS, DEFAULTS)
    return parser


def _demo(arguments: argparse.Namespace) -> None:
    if not _is_length(arguments.tokens):
        raise ConfigError(f"--context {arguments.tokens}: write a multiple of 256 from 1024 on")
    from decode_worker.demo import run as demo

    arguments.context = None
    config = WorkerConfig.resolve(
        arguments, model=demo.DEFAULT_MODEL, context=arguments.tokens + DEMO_ROOM, name="demo"
    )
    request = demo.Request(
        arguments.tokens, arguments.questions, arguments.long, arguments.document, not arguments.no_ray, arguments.json
    )
    demo.run(config, request)


def _generate(arguments: argparse.Namespace) -> None:
    config = WorkerConfig.resolve(arguments)

    from decode_worker.generate import run
    from decode_worker.model.sampling import Sampling

    sampling = Sampling(arguments.temperature, arguments.top_p, arguments.top_k, config.seed)
    run(
        config, arguments.prompt_file, arguments.new_tokens, sampling, arguments.stop,
        private=arguments.private, as_json=arguments.json,
    )  # fmt: skip


def _checked(parse: Callable[[Any], Any]) -> Callable[[str], Any]:
    """`parse` as a type of argparse, whose errors name the value and say what is accepted."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None

    return convert


def _share(text: str) -> float:
    with contextlib.suppress(ValueError):
        if (share := number(0, 1)(text)) > 0:
            return share
    raise ValueError("write a number above 0, at most 1")


def _is_length(tokens: int) -> bool:
    return tokens % 256 == 0 and tokens >= 1024


def _length_list(text: str) -> tuple[int, ...]:
    if text == "none":
        return ()
    parse = count(1, 1 << 24)
    lengths = tuple(parse(part) for part in text.split(","))
    if not all(_is_length(tokens) for tokens in lengths):
        raise ValueError("write multiples of 256 from 1024 on with commas between (8192,32768), or none")
    return lengths


def _some_text(text: str) -> str:
    if not text:
        raise ValueError("write the text that ends the generation")
    return text


_positive = _checked(count(1, 1 << 24))
_lengths = _checked(_length_list)
_natural = _checked(count(0, 1 << 24))


if __name__ == "__main__":
    sys.exit(main())
