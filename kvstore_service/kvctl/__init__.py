"""kvctl: what an operator asks of the node's daemon.

0: done. 1: a failure, or damage found, or a pack that could not be evicted. 2: wrong usage.
"""

import argparse
import math
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import shtab

from kvstore_service.client import AdminClient
from kvstore_service.kvctl.commands import Command
from kvstore_service.kvctl.flags import CALL_S, parser, usage_error
from kvstore_service.kvctl.heat import heat
from kvstore_service.kvctl.output import Output
from kvstore_service.shared.settings import ConfigError, default_broker, default_socket
from kvstore_service.shared.stdout import StdoutError, whole_stdout
from kvstore_service.shared.types import StoreError


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    flags = parser()
    try:
        arguments = flags.parse_args(argv)
        if "shell" not in arguments and (problem := usage_error(arguments)):
            flags.error(problem)
    except ConfigError as error:
        print(f"kvctl: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with whole_stdout():
            return _run(flags, arguments)
    except BrokenPipeError:
        return 1
    except (StoreError, StdoutError) as error:
        print(f"kvctl: {error.message if isinstance(error, StoreError) else error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(flags: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    if "shell" in arguments:
        print(shtab.complete(flags, arguments.shell))
        return 0
    output = Output(arguments.format == "json")
    if arguments.command is heat:
        return heat(None, output, arguments)
    with _connected(arguments) as client:
        command: Command = arguments.command
        return command(client, output, arguments)


def _connected(arguments: argparse.Namespace) -> AdminClient:
    deadline_s = time.monotonic() + (math.inf if arguments.timeout is None else arguments.timeout)
    call_s = arguments.timeout or CALL_S
    if arguments.tcp:
        client = AdminClient.connect_tls(arguments.tcp, arguments.tls, call_s)
    else:
        socket = arguments.socket or default_socket()
        client = AdminClient.connect(socket, arguments.broker or _broker_beside(socket), call_s)
    client.deadline_s = deadline_s
    return client


def _broker_beside(socket: str) -> str:
    if socket == default_socket():
        return default_broker()
    return str(Path(socket).with_name("broker.sock"))
