"""The daemon's configuration: YAML file < environment KVSTORE_* < flags, validated once."""

import argparse
import grp
import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from kvstore_service.daemon import logs
from kvstore_service.daemon.disk.cost import OFF, Microseconds
from kvstore_service.daemon.native import PACK_TOKENS_MAX, TIER_POLICIES, WINDOW_KINDS
from kvstore_service.shared import settings
from kvstore_service.shared.settings import ConfigError, Key
from kvstore_service.shared.types import HASH_BLOCK_TOKENS, format_size

GROUP_END = (1 << 32) - 1  # which stands for none
DRAM_BYTES_MIN = 4 << 20
PREFIX = "KVSTORE_"


def machine_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True)
class Config:
    """What a daemon runs with. `origins` says where each value came from."""

    data_dir: Path
    socket: Path
    broker: Path
    dram_bytes: int
    arena_bytes: int | None  # None: half of dram_bytes
    tier_policy: str
    learn_bytes: int
    nvme_bytes: int
    pack_tokens: int
    extent_blocks: int
    copy_threads: int
    io_depth: int
    disk_cost: Microseconds | None  # None: measured at the start
    window: str
    gpu: int
    cuda_library: str
    gdr_library: str
    worker_bytes_max: int
    slots_max: int
    sessions_max: int
    on_full: str
    evict_high: float
    evict_low: float
    lease_s: float
    upload_stall_s: float
    upload_ttl_s: float
    drain_s: float
    metrics_addr: str
    allow_uids: frozenset[int]
    admin_uids: frozenset[int]
    socket_group: int | None
    verify_bytes_per_s: int
    retier_bytes_per_s: int  # 0: not by itself
    log_format: str
    log_level: str
    tcp: str
    tls: str
    tls_subjects: frozenset[str]
    origins: Mapping[str, str]

    @property
    def peer_uids(self) -> frozenset[int]:
        """Who may connect at all."""
        return self.allow_uids | self.admin_uids

    def values(self) -> dict[str, str]:
        """Every key's value as one would write it in the file."""
        return {key.name: key.show(getattr(self, key.name)) for key in KEYS}


def _data_dir() -> str:
    if os.getuid() == 0:
        return "/var/lib/headgate"
    return str(Path(os.environ.get("XDG_DATA_HOME", settings.home() / ".local/share")) / "headgate")


def _dram_bytes(value: Any) -> int:
    return _of_the_machine(settings.size(DRAM_BYTES_MIN)(value))


def _of_the_machine(size_bytes: int) -> int:
    if size_bytes > machine_bytes():
        machine = format_size(machine_bytes())
        raise ValueError(f"{format_size(size_bytes)} is more than this machine's memory of {machine}; write less")
    return size_bytes


def _arena_bytes(value: Any) -> int | None:
    return None if value == "half" else _of_the_machine(settings.size(0)(value))


def _show_arena_bytes(arena_bytes: int | None) -> str:
    return "half" if arena_bytes is None else format_size(arena_bytes)


def _worker_bytes(value: Any) -> int:
    return machine_bytes() // 2 if value == "half" else _of_the_machine(settings.size(1 << 20)(value))


def _pack_tokens(value: Any) -> int:
    tokens = settings.count(HASH_BLOCK_TOKENS, PACK_TOKENS_MAX)(value)
    if tokens % HASH_BLOCK_TOKENS:
        raise ValueError(f"write a multiple of {HASH_BLOCK_TOKENS}")
    return tokens


def _copy_threads(value: Any) -> int:
    if value == "auto":
        return max(1, min(4, len(os.sched_getaffinity(0)) - 1))
    return settings.count(1, 64)(value)


def _disk_cost(value: Any) -> Microseconds | None:
    if value == "auto":
        return None
    if value is False or value == "off":
        return OFF
    parts = value if isinstance(value, list) else str(value).split(",")
    if len(parts) != 3:
        raise ValueError("write REQUEST,KIB,PIECE in microseconds, auto or off")
    request, kib, piece = (settings.number(0, 1e6)(part) for part in parts)
    return request, kib, piece


def _show_disk_cost(cost: Microseconds | None) -> str:
    return "auto" if cost is None else "off" if cost == OFF else ",".join(f"{part:g}" for part in cost)


def _address(value: Any) -> str:
    # YAML 1.1 reads a bare `off` as false.
    if value is False or value == "off":
        return "off"
    host, colon, port = str(value).rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 65536):
        raise ValueError("write HOST:PORT or off")
    return str(value)


def _loopback(value: Any) -> str:
    address = _address(value)
    if address != "off" and address.rpartition(":")[0] not in ("127.0.0.1", "localhost", "[::1]"):
        raise ValueError("metrics are served on loopback only; write 127.0.0.1:PORT or off")
    return address


def _uids(value: Any) -> frozenset[int]:
    if value == "own":
        return frozenset({os.getuid()})
    items = value if isinstance(value, list) else str(value).split(",")
    try:
        uids = frozenset(int(item) for item in items)
    except (ValueError, TypeError):
        uids = frozenset({-1})
    if min(uids, default=-1) < 0:
        raise ValueError("write own, or user ids separated by commas")
    return uids


def _admin_uids(value: Any) -> frozenset[int]:
    return _uids(value) | {0} if value == "own" else _uids(value)


def _group(value: Any) -> int | None:
    if value is None or value == "none":
        return None
    try:
        group = int(value) if str(value).isdecimal() else grp.getgrnam(str(value)).gr_gid
    except KeyError:
        raise ValueError("no group has this name; write the name or the id of one, or none") from None
    if group >= GROUP_END:
        raise ValueError(f"write a group's id below {GROUP_END}")
    return group


def _show_group(group: int | None) -> str:
    return "none" if group is None else str(group)


def _rate(value: Any) -> int:
    """Bytes per second; 0: unlimited."""
    if value == "unlimited":
        return 0
    try:
        return settings.size(1 << 20)(value)
    except ValueError:
        raise ValueError("write a size of at least 1MiB, such as 200MiB, or unlimited") from None


def _show_rate(bytes_per_s: int) -> str:
    return format_size(bytes_per_s) if bytes_per_s else "unlimited"


def _retier_rate(value: Any) -> int:
    """Bytes per second; 0: off."""
    if value is False or value == "off":  # as YAML reads it
        return 0
    try:
        return settings.size(1 << 20)(value)
    except ValueError:
        raise ValueError("write a size of at least 1MiB, such as 20MiB, or off") from None


def _show_retier_rate(bytes_per_s: int) -> str:
    return format_size(bytes_per_s) if bytes_per_s else "off"


def _show_uids(uids: frozenset[int]) -> str:
    return ",".join(map(str, sorted(uids)))


def _subjects(value: Any) -> frozenset[str]:
    items = value if isinstance(value, list) else str(value).split(",")
    names = frozenset(str(item).strip() for item in items if item is not None)
    return frozenset() if names == {"none"} or value is None else names - {""}


def _show_subjects(subjects: frozenset[str]) -> str:
    return ",".join(sorted(subjects)) or "none"


def _tls(value: Any) -> str:
    if value is False or value in ("off", ""):
        return "off"
    if not isinstance(value, str):
        raise ValueError("write a directory or off")
    directory = settings.path(value)
    for name in ("ca.crt", "server.crt", "server.key"):
        if not (directory / name).is_file():
            raise ValueError(f"{directory / name} is missing; the directory holds ca.crt, server.crt and server.key")
    try:
        ssl.create_default_context().load_cert_chain(directory / "server.crt", directory / "server.key")
    except (ssl.SSLError, OSError) as error:
        raise ValueError(f"server.crt and server.key cannot be loaded ({error})") from None
    return str(directory)


KEYS = (
    Key("data_dir", _data_dir, settings.path, "packs and catalogue; one daemon at a time"),
    Key("socket", lambda: settings.runtime_dir() / "store.sock", settings.socket_path, "unix socket of gRPC"),
    Key("broker", lambda: settings.runtime_dir() / "broker.sock", settings.socket_path, "unix socket of the fd broker"),
    Key("dram_bytes", lambda: "1GiB", _dram_bytes, "memory of the DRAM tier", format_size),
    Key(
        "arena_bytes",
        lambda: "half",
        _arena_bytes,
        "part of dram_bytes that a user with pull windows has alone, or half (of it); 0: no such windows",
        _show_arena_bytes,
    ),
    Key(
        "tier_policy",
        lambda: TIER_POLICIES[0],
        settings.choice(*TIER_POLICIES),
        f"what leaves DRAM first: {', '.join(TIER_POLICIES)}",
    ),
    Key(
        "learn_bytes",
        lambda: "0B",
        settings.size(0),
        "memory for samples of what runs want of packs, which retier learns from; 0B: none are taken",
        format_size,
    ),
    Key("nvme_bytes", lambda: "64GiB", settings.size(1 << 20), "most bytes of packs and sidecars on disk", format_size),
    Key(
        "pack_tokens",
        lambda: 1024,
        _pack_tokens,
        f"most tokens of a pack, a multiple of {HASH_BLOCK_TOKENS}; prefill reuses 1024s",
    ),
    Key("extent_blocks", lambda: 4, settings.count(1, 16), "4 KiB blocks that are cached together"),
    Key("copy_threads", lambda: "auto", _copy_threads, "copy threads; auto = cores - 1, from 1 to 4"),
    Key("io_depth", lambda: 64, settings.count(1, 4096), "reads in flight per copy thread"),
    Key(
        "disk_cost",
        lambda: "auto",
        _disk_cost,
        "microseconds of the disk for a request, a KiB and a piece of memory, such as 15,0.4,2.5; auto = measured at "
        "the start; off: reads nothing between wanted blocks",
        _show_disk_cost,
    ),
    Key(
        "window",
        lambda: "auto",
        settings.choice(*WINDOW_KINDS, "auto"),
        f"where windows lie: {', '.join(WINDOW_KINDS)}, or auto (the best that works here and that a worker can map)",
    ),
    Key("gpu", lambda: 0, settings.count(0, 255), "whose memory gdr and staged windows lie in: its number"),
    Key("cuda_library", lambda: "libcuda.so.1", str, "the NVIDIA driver's library, needed by gdr and staged windows"),
    Key("gdr_library", lambda: "libgdrapi.so.2", str, "GDRCopy's library, needed by gdr windows"),
    Key("worker_bytes_max", lambda: "half", _worker_bytes, "most memory of a worker, or half (of all)", format_size),
    Key("slots_max", lambda: 256, settings.count(1, 65536), "slots over all workers"),
    Key("sessions_max", lambda: 1024, settings.count(1, 1 << 20), "open sessions over all workers"),
    Key(
        "on_full", lambda: "evict", settings.choice("evict", "refuse"), "a full store evicts what is used least, or not"
    ),
    Key("evict_high", lambda: 0.95, settings.number(0.1, 1), "part of nvme_bytes, or a quota, above which it evicts"),
    Key("evict_low", lambda: 0.9, settings.number(0.1, 1), "part of it down to which it does"),
    Key("lease_s", lambda: 10, settings.number(0, 86400), "time to attach a pack that was found or committed"),
    Key("upload_stall_s", lambda: 10, settings.number(0, 86400), "a worker without progress blocks others so long"),
    Key("upload_ttl_s", lambda: 600, settings.number(0, 86400), "then the uploads of such a worker are aborted"),
    Key("drain_s", lambda: 30, settings.number(0, 86400), "time that open sessions have to end after SIGTERM"),
    Key("metrics_addr", lambda: "127.0.0.1:9464", _loopback, "Prometheus, on loopback; port 0 = any free one; or off"),
    Key("allow_uids", lambda: "own", _uids, "user ids whose workers are served: own, or 0,1000", _show_uids),
    Key("admin_uids", lambda: "own", _admin_uids, "who may administer: own (and root), or 0,1000", _show_uids),
    Key(
        "socket_group",
        lambda: "none",
        _group,
        "group that may connect (needed by uids of others): name or id",
        _show_group,
    ),
    Key("verify_bytes_per_s", lambda: "200MiB", _rate, "most bytes a second that kvctl verify reads", _show_rate),
    Key(
        "retier_bytes_per_s",
        lambda: "off",
        _retier_rate,
        "most bytes a second that packs nobody has are rewritten with, in a learnt order; off: only by kvctl retier",
        _show_retier_rate,
    ),
    Key("log_format", lambda: "text", settings.choice(*logs.FORMATS), "lines on stderr: text (key=value) or json"),
    Key("log_level", lambda: "info", settings.choice(*logs.LEVELS), "least serious event that is logged"),
    Key("tcp", lambda: "off", _address, "HOST:PORT of AdminService over mutual TLS, or off"),
    Key("tls", lambda: "off", _tls, "directory with ca.crt, server.crt, server.key (needed by tcp)"),
    Key(
        "tls_subjects",
        lambda: "none",
        _subjects,
        "names of certificates that may administer over tcp: CN or SAN",
        _show_subjects,
    ),
)
NAMES = tuple(key.name for key in KEYS)
assert (*NAMES, "origins") == tuple(field.name for field in fields(Config))


def parser() -> argparse.ArgumentParser:
    flags = settings.Parser(
        prog="kvstored",
        usage="kvstored [config print | rebuild] [--config FILE] [--KEY VALUE ...]",
        description="The daemon that keeps the KV cache of this node's decode workers.",
        epilog="Every key may stand in the YAML file, in the environment (KVSTORE_DATA_DIR, ...) or in a flag; the "
        "later one wins. `kvstored config print` shows the result and where each value came from. `kvstored rebuild` "
        "gives packs their rows again after the catalogue was lost. Sizes take units: 8GiB, 512MiB. SIGTERM drains "
        "and ends the daemon.",
        allow_abbrev=False,
    )
    settings.add_flags(flags, KEYS)
    return flags


def load(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> Config:
    """Resolves file, environment and flags. ConfigError for anything unknown or out of range."""
    arguments = parser().parse_args(argv)
    raw = settings.resolve(KEYS, PREFIX, arguments, environment)
    config = Config(**settings.parsed(KEYS, raw), origins={name: origin for name, (_, origin) in raw.items()})
    if config.socket == config.broker:
        raise ConfigError(f"broker={config.broker}: the same path as socket; give each its own")
    if (config.arena_bytes or 0) > config.dram_bytes:
        raise ConfigError(
            f"arena_bytes={format_size(config.arena_bytes or 0)}: "
            f"more than dram_bytes={format_size(config.dram_bytes)}, of which it is a part; write less"
        )
    if config.tcp != "off" and config.tls == "off":
        raise ConfigError(f"tcp={config.tcp}: needs mutual TLS; set tls to the directory of the certificates")
    if config.tcp != "off" and not config.tls_subjects:
        raise ConfigError(
            f"tcp={config.tcp}: nobody may use it; set tls_subjects to the names of operators' certificates"
        )
    if config.retier_bytes_per_s and not config.learn_bytes:
        raise ConfigError(
            f"retier_bytes_per_s={_show_retier_rate(config.retier_bytes_per_s)}: nothing is learnt; set learn_bytes too"
        )
    if config.evict_low > config.evict_high:
        raise ConfigError(f"evict_low={config.evict_low}: write at most evict_high, {config.evict_high}")
    _check_group(config)
    return config


def _check_group(config: Config) -> None:
    """Others reach the sockets through a group; root needs none."""
    others = config.peer_uids - {os.getuid(), 0}
    if others and config.socket_group is None:
        raise ConfigError(
            f"user ids {_show_uids(others)} could not reach the sockets; set socket_group to a group of theirs and ours"
        )
    if config.socket_group not in (None, os.getegid(), *os.getgroups()) and os.geteuid() != 0:
        raise ConfigError(f"socket_group={config.socket_group}: this user is not in it; write one of its groups")


def to_yaml(config: Config) -> str:
    """The resolved configuration as a file that can be loaded again; each line says where its value came from."""
    lines = []
    for name, value in config.values().items():
        scalar = yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n...\n").rstrip()
        lines.append(f"{name}: {scalar}  # {config.origins[name]}")
    return "\n".join(lines) + "\n"
