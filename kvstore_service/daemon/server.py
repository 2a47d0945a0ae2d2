"""kvstored: one daemon per node.

1. resolve the configuration        2. claim data directory and sockets
3. start data plane and store       4. serve broker, gRPC and metrics; print the ready line
5. on SIGTERM or SIGINT refuse new work, wait for the workers a little, release everything, remove the sockets
"""

import contextlib
import logging
import os
import resource
import select
import signal
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvstore_service import __version__
from kvstore_service._proto import admin_service_pb2_grpc, store_service_pb2_grpc
from kvstore_service.daemon import directories, logs, native
from kvstore_service.daemon.config import Config, ConfigError, load, to_yaml
from kvstore_service.daemon.disk.catalog import Catalog
from kvstore_service.daemon.disk.cost import DiskCost
from kvstore_service.daemon.disk.rebuild import rebuild
from kvstore_service.daemon.front import health
from kvstore_service.daemon.front.broker import Broker
from kvstore_service.daemon.front.latencies import Latencies
from kvstore_service.daemon.front.metrics import Measures, registry
from kvstore_service.daemon.front.metrics_server import MetricsServer
from kvstore_service.daemon.front.replies import Replies
from kvstore_service.daemon.front.rpc import Gate
from kvstore_service.daemon.front.server import Server
from kvstore_service.daemon.front.services import AdminService, StoreService
from kvstore_service.daemon.front.socket_path import SocketPath, open_to
from kvstore_service.daemon.store.registry import Limits, Worker
from kvstore_service.daemon.store.store import Store
from kvstore_service.shared.stdout import StdoutError, whole_stdout
from kvstore_service.shared.types import StoreError, printable

ADMIN_SERVICE = "kvstore.v1.AdminService"
GRACE_S = 1.0
NOTIFY_S = 1.0
SWITCH_S = 0.0005  # a call takes the interpreter several times; a page of a listing would keep each waiting for 5 ms
END_S = 20.0  # after draining; whatever hangs then is left behind

log = logging.getLogger("kvstored")


class Daemon:
    """All of kvstored in one object; `data_plane` is open to tests."""

    def __init__(self, config: Config) -> None:
        """Claims directory and sockets. StoreError FAILED_PRECONDITION if another daemon has them."""
        self.config = config
        with contextlib.ExitStack() as undo:
            self._paths = undo.enter_context(contextlib.ExitStack())
            for key, path in (("socket", config.socket), ("broker", config.broker)):
                self._paths.callback(_claim(key, path).close)
            directories.prepare(config.data_dir)
            catalog = Catalog(config.data_dir)
            undo.callback(catalog.close)
            catalog.freeze({"extent_blocks": config.extent_blocks})
            self._disk_cost = DiskCost.of(config.disk_cost, config.data_dir)
            with native.errors():
                self.data_plane = native.DataPlane(
                    config.dram_bytes,
                    config.io_depth,
                    config.copy_threads,
                    extent_blocks=config.extent_blocks,
                    window=config.window,
                    cuda_library=config.cuda_library,
                    gdr_library=config.gdr_library,
                    gpu=config.gpu,
                    arena_bytes=config.dram_bytes // 2 if config.arena_bytes is None else config.arena_bytes,
                    tier_policy=config.tier_policy,
                    disk_cost=self._disk_cost.us,
                    learn_bytes=config.learn_bytes,
                )
            undo.pop_all()
        self.store = Store(config, catalog, self.data_plane, self._disk_cost.us)
        self._replies = Replies()
        self._latencies = Latencies()
        self._broker = Broker(
            config.broker,
            config.peer_uids,
            config.admin_uids,
            config.socket_group,
            self.store.workers.admit,
            self._release,
        )
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._grpc = Server(self._gate, self._equip, descriptors // 4)
        self._metrics: MetricsServer | None = None

    def _gate(self) -> Gate:
        return Gate(
            self.store.state.registry,
            self._replies,
            self.config.allow_uids,
            self.config.admin_uids,
            self.config.tls_subjects,
            self._latencies.observe,
        )

    def _measures(self) -> Measures:
        config = self.config
        limits = {
            "dram_bytes": config.dram_bytes,
            "nvme_bytes": config.nvme_bytes,
            "sessions_max": config.sessions_max,
            "slots_max": config.slots_max,
            "workers_max": Limits.workers,
        }
        return Measures(
            self.store.operation.counters,
            limits,
            self.store.operation.users,
            self._latencies.histograms,
            self.data_plane.histograms,
            __version__,
        )

    def _equip(self, server: grpc.aio.Server) -> None:
        store_service_pb2_grpc.add_StoreServiceServicer_to_server(
            StoreService(self.store, self._broker, self.config), server
        )
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(
            AdminService(self.store, self._broker, self.config, os.getpid(), str(self._disk_cost)), server
        )
        health_pb2_grpc.add_HealthServicer_to_server(health.HealthService(self.store.state.draining.is_set), server)
        reflection.enable_server_reflection((ADMIN_SERVICE, health.SERVICE, reflection.SERVICE_NAME), server)

    def start(self) -> None:
        """Serves from here on."""
        self._broker.start()
        try:
            addresses: dict[str, grpc.ServerCredentials | None] = {f"unix:{self.config.socket}": None}
            if self.config.tcp != "off":
                addresses[self.config.tcp] = _credentials(Path(self.config.tls))
            self._grpc.listen(addresses)
            open_to(self.config.socket, self.config.socket_group)
            self._metrics = MetricsServer(self.config.metrics_addr, registry(self._measures()))
        except (RuntimeError, OSError) as error:
            tcp = "" if self.config.tcp == "off" else f" or tcp={self.config.tcp}"
            raise StoreError(
                "FAILED_PRECONDITION", f"cannot listen at socket={self.config.socket}{tcp}: {error}; give another one"
            ) from error
        self._grpc.serve()
        for kind, reason in self.data_plane.windows_refused:
            logs.event(log, logging.INFO, "no such windows here", window=kind, reason=reason)

    def ready_line(self) -> str:
        metrics = self._metrics.address if self._metrics else "off"
        sockets = f"socket={self.config.socket} broker={self.config.broker}"
        return f"kvstored ready {sockets} metrics={metrics} pid={os.getpid()}"

    def drain(self, timeout_s: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """Refuses new work and returns when no session is open, at the deadline, or when `hurry()`."""
        self.store.operation.drain()
        deadline = time.monotonic() + timeout_s
        while self.store.state.registry.all() and time.monotonic() < deadline and not hurry():
            time.sleep(0.02)

    def close(self) -> None:
        """Ends connections, poisons what workers still hold, removes the sockets."""
        self._grpc.stop(GRACE_S)
        self._broker.close()
        if self._metrics is not None:
            self._metrics.close()
        self.store.close()
        self._paths.close()

    def _release(self, worker: Worker) -> None:
        try:
            self.store.workers.release(worker)
        finally:
            self._replies.forget(worker.token)  # after it no call of the worker succeeds


def serve(make: Callable[[], Daemon]) -> int:
    """Runs a daemon in the main thread until SIGTERM or SIGINT; the second one ends the draining.
    Returns the exit status."""
    ending = _ending()

    def signalled() -> bool:
        return bool(select.select([ending], [], [], 0)[0])

    daemon = make()
    try:
        if not signalled():
            daemon.start()
            print(daemon.ready_line(), flush=True)
            _notify("READY=1")
        ending.recv(1)
        last = threading.Timer(daemon.config.drain_s + END_S, _give_up)
        last.daemon = True
        last.start()
        _notify("STOPPING=1")
        logs.event(log, logging.INFO, "draining", pid=os.getpid())
        daemon.drain(daemon.config.drain_s, signalled)
    finally:
        daemon.close()
    logs.event(log, logging.INFO, "ended", pid=os.getpid())
    return 0


def main(argv: Sequence[str] | None = None, make: Callable[[Config], Daemon] = Daemon) -> int:
    """`kvstored [--config FILE] [--KEY VALUE ...]`, `kvstored config print [...]` and `kvstored rebuild [...]`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["config"]:
            if arguments[1:2] != ["print"]:
                raise ConfigError(f"unknown command {' '.join(arguments[:2])!r}; write kvstored config print")
            with whole_stdout():
                print(to_yaml(load(arguments[2:])), end="")
            return 0
        rebuilding = arguments[:1] == ["rebuild"]
        config = load(arguments[1:] if rebuilding else arguments)
        logs.start(config.log_format, config.log_level)
        os.umask(0o077)  # sockets are created before their mode can be set
        if rebuilding:
            return _rebuild(config)
        _raise_descriptor_limit()
        sys.setswitchinterval(SWITCH_S)
        return serve(lambda: make(config))
    except ConfigError as error:
        print(f"kvstored: {error}", file=sys.stderr)
        return 2
    except (StoreError, StdoutError, OSError) as error:
        message = error.message if isinstance(error, StoreError) else str(error)
        print(f"kvstored: {printable(message)}", file=sys.stderr)  # it may quote a file's content, or a path
        return 1
    except sqlite3.Error as error:
        print(f"kvstored: the catalogue failed: {error}", file=sys.stderr)
        return 1


def _rebuild(config: Config) -> int:
    """While no daemon runs: rows for quarantined packs. 1 if a file stays in quarantine."""
    directories.prepare(config.data_dir)
    with contextlib.closing(Catalog(config.data_dir)) as catalog:
        rebuilt = rebuild(catalog)
    for line in rebuilt.lines():
        print(line)
    return 1 if rebuilt.left else 0


def _claim(key: str, path: Path) -> SocketPath:
    try:
        return SocketPath(path)
    except OSError as error:
        raise StoreError(
            "FAILED_PRECONDITION", f"{key}={path}: {error.strerror}; choose a directory that can be written"
        ) from error


def _notify(state: str) -> None:
    """Tells systemd, if it started us (sd_notify). One that does not listen keeps nobody from serving or draining."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to:
                to.settimeout(NOTIFY_S)
                to.connect("\0" + address[1:] if address[0] == "@" else address)
                to.send(state.encode())
        except OSError as error:
            logs.event(log, logging.WARNING, "NOTIFY_SOCKET does not answer", at=address, state=state, error=error)


def _ending() -> socket.socket:
    """Readable after SIGTERM or SIGINT. A lock or an event would not do: if another thread takes the signal, nothing
    wakes the main thread, where Python's handlers run."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    return reader


def _give_up() -> None:
    """What was acknowledged is durable: the next start needs nothing of what hangs here."""
    logs.event(log, logging.ERROR, "did not end in order", pid=os.getpid())
    os._exit(1)


def _credentials(directory: Path) -> grpc.ServerCredentials:
    pair = ((directory / "server.key").read_bytes(), (directory / "server.crt").read_bytes())
    return grpc.ssl_server_credentials([pair], (directory / "ca.crt").read_bytes(), require_client_auth=True)


def _raise_descriptor_limit() -> None:
    """Every open pack and upload holds one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
