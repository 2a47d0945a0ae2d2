"""`headgate`: the demo, and generation with one's own checkpoint."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from decode_worker.config import KEYS, ConfigError, WorkerConfig
from decode_worker.model.errors import CheckpointError
from kvstore_service.client import StoreError
from kvstore_service.settings import add_flags

DEMO_CONTEXT = 32768
DEMO_QUESTIONS = 100
# Questions and answers live behind the document.
DEMO_ROOM = 512


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    # SIGTERM ends like Ctrl-C: daemons, Ray and temporary directories are cleaned up on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_fail("terminated", 143)))
    try:
        arguments.run(arguments)
    except (ConfigError, argparse.ArgumentTypeError) as error:
        return _fail(error, 2)
    except (StoreError, CheckpointError, ValueError, OSError, RuntimeError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    return 0


def _fail(error: object, status: int) -> int:
    print(f"headgate: {str(error).strip().splitlines()[-1]}", file=sys.stderr)
    return status


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; --help says the rest."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"headgate: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="headgate",
        description="Long-context decoding over the Headgate KV store.",
        epilog="Every flag of the worker may also stand in --config (YAML) or the environment (HEADGATE_BUDGET, ...).",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="a document in a private store, answered by QSAC and by full attention")
    demo.add_argument(
        "--questions", type=_positive, default=DEMO_QUESTIONS, help="questions to ask (default: %(default)s)"
    )
    demo.add_argument("--context", type=_positive, default=DEMO_CONTEXT, dest="tokens", help="tokens of the document")
    demo.add_argument("--no-ray", action="store_true", help="run the worker in this process")
    demo.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    demo.set_defaults(run=_demo)
    add_flags(demo, [key for key in KEYS if key.name not in ("context", "socket", "broker", "name")])

    generate = commands.add_parser("generate", help="continue a prompt with a checkpoint of your own")
    generate.add_argument("--prompt-file", type=Path, required=True, help="UTF-8 text")
    generate.add_argument(
        "--new-tokens", type=_positive, default=256, help="most tokens to generate (default: %(default)s)"
    )
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--top-k", type=int, default=0)
    generate.add_argument(
        "--private", action="store_true", help="start a daemon of its own instead of using the node's"
    )
    generate.set_defaults(run=_generate)
    add_flags(generate, KEYS)
    return parser


def _demo(arguments: argparse.Namespace) -> None:
    from decode_worker import demo

    if arguments.tokens % 256 or arguments.tokens < 1024:
        raise ConfigError(f"--context {arguments.tokens}: write a multiple of 256 from 1024 on")
    arguments.context = None
    config = WorkerConfig.resolve(
        arguments, model=demo.DEFAULT_MODEL, context=arguments.tokens + DEMO_ROOM, name="demo"
    )
    demo.run(config, arguments.tokens, arguments.questions, not arguments.no_ray, arguments.json)


def _generate(arguments: argparse.Namespace) -> None:
    from decode_worker.generate import run
    from decode_worker.model.sampling import Sampling

    config = WorkerConfig.resolve(arguments)
    sampling = Sampling(arguments.temperature, arguments.top_p, arguments.top_k, config.seed)
    started = time.monotonic()
    count = run(config, arguments.prompt_file, arguments.new_tokens, sampling, private=arguments.private)
    print(f"\n{count} tokens in {time.monotonic() - started:.1f} s", file=sys.stderr)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write a whole number above 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
