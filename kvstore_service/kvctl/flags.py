"""kvctl's command line."""

import argparse
import re
from typing import Any

import shtab

from kvstore_service.kvctl import commands
from kvstore_service.kvctl.heat import heat
from kvstore_service.kvctl.top import top
from kvstore_service.shared.settings import Parser, default_socket, socket_path
from kvstore_service.shared.types import StoreError, parse_size, uid_of

CALL_S = 10.0
SECONDS_MAX = 86400.0  # the daemon takes deadlines of a day at most


def _common(suppress: bool) -> Parser:
    """The flags that may stand before the command and behind it; behind it they have no defaults."""

    def default(value: Any) -> Any:
        return argparse.SUPPRESS if suppress else value

    flags = Parser(add_help=False)
    flags.add_argument(
        "--socket", type=_socket, default=default(None), help=f"gRPC socket of kvstored (default: {default_socket()})"
    )
    flags.add_argument(
        "--broker", type=_socket, default=default(None),
        help="its broker socket (default: broker.sock beside the gRPC socket)",
    )  # fmt: skip
    flags.add_argument(
        "--tcp", default=default(None), metavar="HOST:PORT", help="ask another machine's daemon over TLS (needs --tls)"
    )
    flags.add_argument(
        "--tls", default=default(None), metavar="DIR", help="directory with ca.crt, client.crt and client.key"
    )
    flags.add_argument("--format", choices=("table", "json"), default=default("table"), help="(default: table)")
    flags.add_argument(
        "--timeout", type=_seconds, default=default(None), metavar="S",
        help=f"deadline of the whole command (default: {CALL_S:g} for each of its calls)",
    )  # fmt: skip
    return flags


def parser() -> argparse.ArgumentParser:
    flags = Parser(
        prog="kvctl", description="Asks the node's kvstored.", allow_abbrev=False, parents=[_common(suppress=False)]
    )
    verbs = flags.add_subparsers(metavar="COMMAND", required=True)
    common = _common(suppress=True)

    def add(name: str, command: commands.Command, text: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text, allow_abbrev=False, parents=[common])
        sub.set_defaults(command=command)
        return sub

    def add_packs(sub: argparse.ArgumentParser, count: str, text: str = "") -> None:
        sub.add_argument("packs", nargs=count, metavar="PACK", help=f"pack ids or unique beginnings of them{text}")

    add("status", commands.status, "state, sizes and counters")
    viewing = add("top", top, "what the daemon does now: rates, times, hits, disk, frames, queue, owners")
    viewing.add_argument("--every", type=_seconds, default=1.0, metavar="S", help="seconds of a view (default: 1)")
    viewing.add_argument("--once", action="store_true", help="one view, then the end")
    viewing.add_argument(
        "--json", dest="format", action="store_const", const="json", default=argparse.SUPPRESS,
        help="a line for each view, as --format json",
    )  # fmt: skip
    add("sessions", commands.sessions, "open sessions")
    add("describe", commands.describe, "one session and its packs").add_argument("session")
    listing = add("packs", commands.packs, "stored packs")
    listing.add_argument("--tenant", type=_tenant, metavar="UID", help="only this user's")
    listing.add_argument("--damaged", action="store_true", help="only those that failed a check")
    listing.add_argument("--pinned", action="store_true", help="only pinned ones")
    listing.add_argument("--unused", action="store_true", help="only those that no session uses and nobody pinned")
    listing.add_argument(
        "--older-than", type=_age, default=0.0, metavar="AGE", help="only those not used for 30m, 12h, 7d"
    )
    pinning = add("pin", commands.pinning(True), "protect packs from eviction, durably")
    add_packs(pinning, "+")
    pinning.add_argument(
        "--ttl", type=_age, default=0.0, metavar="AGE", help="the pin ends by itself after 30m, 12h, 7d"
    )
    add_packs(add("unpin", commands.pinning(False), "let packs be evicted again"), "+")
    removal = add("evict", commands.evict, "remove packs with their sidecars from the store")
    add_packs(removal, "*")
    removal.add_argument("--descendants", action="store_true", help="also the packs that continue them")
    removal.add_argument("--unused", action="store_true", help="also every pack that no session uses and nobody pinned")
    removal.add_argument(
        "--older-than", type=_age, default=0.0, metavar="AGE", help="of --unused only those not used for 30m, 12h, 7d"
    )
    removal.add_argument("--dry-run", action="store_true", help="only show which packs would go")
    add_packs(add("verify", commands.verify, "read every block and check its CRC"), "*", " (default: all)")
    rewriting = add("retier", commands.retier, "rewrite packs in an order of their records learnt from their use")
    add_packs(rewriting, "*")
    rewriting.add_argument("--all", action="store_true", help="every pack that nobody has")
    rewriting.add_argument("--dry-run", action="store_true", help="only show what would come of it")
    add("audit", commands.audit, "compare what must be equal: catalogue and files, references, runs, frames")
    add("config", commands.config, "the daemon's configuration and where each value came from")
    add("drain", commands.drain, "refuse new work from now on; SIGTERM then ends the daemon").add_argument(
        "--wait", type=_no_seconds_or_more, default=0.0, metavar="S", help="until no session is open, at most S seconds"
    )
    add("workers", commands.workers, "peers of the broker: workers, and operators, who have no memory")
    add("uploads", commands.uploads, "packs that are being written")
    add("kill", commands.kill, "end a worker's connection and all that it holds").add_argument(
        "worker", metavar="WORKER", help="its id, pid or name"
    )
    add(
        "watch", commands.watch, "commits, evictions, damage, workers, quotas, rewritten packs, drains as they happen"
    ).add_argument(
        "kinds", nargs="*", metavar="KIND", help="only these: commit damage drain evict quota retier upload worker"
    )
    tracing = add("trace", commands.trace, "which extents runs want from now on, as an array that numpy.load reads")
    tracing.add_argument("--seconds", type=_seconds, default=10.0, metavar="S", help="how long (default: 10)")
    tracing.add_argument("file", metavar="FILE", help="to write, a .npy file")
    drawing = add("heat", heat, "draw a trace: what was wanted of each layer and KV head; asks no daemon")
    drawing.add_argument("trace", metavar="TRACE", help="a file that kvctl trace wrote")
    drawing.add_argument("picture", metavar="OUT", help="to write, a .png file")
    drawing.add_argument("--misses", action="store_true", help="only what came from disk")
    add("explain", commands.explain, "why a prompt, a pack or a session is found or not, fast or slow").add_argument(
        "subject", nargs="?", default="", metavar="SUBJECT",
        help="a session, a slot (SLOT or WORKER/SLOT), or the beginning of a pack's id or of a prompt's last digest "
        "(default: the latest lookups)",
    )  # fmt: skip
    bound = add(
        "quota", commands.quota, "what users have and may have, on disk and in DRAM; set it with SIZE and --dram"
    )
    bound.add_argument("tenant", nargs="?", type=_tenant, metavar="UID")
    bound.add_argument("size", nargs="?", type=_quota_size, metavar="SIZE", help="on disk: such as 8GiB, or none")
    bound.add_argument("--dram", type=_quota_size, metavar="SIZE", help="of the DRAM tier: such as 1GiB, or none")
    add("token", commands.token, "print a token for other gRPC clients (grpcurl); it is valid while this command runs")
    completion = verbs.add_parser("completion", help="print the completion script of a shell", allow_abbrev=False)
    completion.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    return flags


def _seconds(text: str) -> float:
    if (value := _no_seconds_or_more(text)) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: write seconds above 0")
    return value


def _no_seconds_or_more(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= SECONDS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r}: write seconds, from 0 to {SECONDS_MAX:g}")
    return value


def _socket(text: str) -> str:
    try:
        return str(socket_path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def _tenant(text: str) -> str:
    """uid-N, of that or of N alone."""
    tenant = f"uid-{text}" if text.isdecimal() else text
    try:
        uid_of(tenant)
    except StoreError as error:
        raise argparse.ArgumentTypeError(error.message) from None
    return tenant


def _quota_size(text: str) -> int:
    try:
        size_bytes = 0 if text == "none" else parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if text != "none" and size_bytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write a size above 0, or none")
    return size_bytes


def _age(text: str) -> float:
    match = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: write an age such as 90s, 30m, 12h or 7d")
    return int(match[1]) * {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}[match[2]]


def usage_error(arguments: argparse.Namespace) -> str:
    """What is wrong with flags that are each valid; empty if nothing is."""
    if arguments.command is commands.evict and not (arguments.packs or arguments.unused):
        return "evict needs packs or --unused"
    if arguments.command is commands.evict and arguments.older_than and not arguments.unused:
        return "--older-than chooses among --unused; give both"
    if arguments.command is commands.retier and bool(arguments.packs) == arguments.all:
        return "retier needs packs or --all, one of the two"
    return "--tcp and --tls belong together; give both" if bool(arguments.tcp) != bool(arguments.tls) else ""
