"""kvctl: what an operator asks of the node's daemon.

0: done. 1: a failure, or damage found, or a pack that could not be evicted. 2: wrong usage.
"""

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Sequence

import shtab

from kvstore_service.client import AdminClient
from kvstore_service.kvctl.commands import Command
from kvstore_service.kvctl.flags import CALL_S, parser, usage_error
from kvstore_service.kvctl.output import Output
from kvstore_service.shared.settings import ConfigError, default_broker, default_socket
from kvstore_service.shared.types import StoreError


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    flags = parser()
    try:
        arguments = flags.parse_args(argv)
        if "shell" in arguments:
            print(shtab.complete(flags, arguments.shell))
            return 0
        if problem := usage_error(arguments):
            flags.error(problem)
    except ConfigError as error:
        print(f"kvctl: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with _connected(arguments) as client:
            command: Command = arguments.command
            return command(client, Output(arguments.format == "json"), arguments)
    except StoreError as error:
        print(f"kvctl: {error.message}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's last flush fails too
        return 1
    except KeyboardInterrupt:
        return 130


def _connected(arguments: argparse.Namespace) -> AdminClient:
    deadline_s = time.monotonic() + (math.inf if arguments.timeout is None else arguments.timeout)
    call_s = arguments.timeout or CALL_S
    if arguments.tcp:
        client = AdminClient.connect_tls(arguments.tcp, arguments.tls, call_s)
    else:
        broker = arguments.broker or _broker_beside(arguments.socket)
        client = AdminClient.connect(arguments.socket, broker, call_s)
    client.deadline_s = deadline_s
    return client


def _broker_beside(socket: str) -> str:
    if socket == default_socket():
        return default_broker()
    return socket.rpartition("/")[0] + "/broker.sock" if "/" in socket else "broker.sock"
