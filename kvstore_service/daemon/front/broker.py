"""The fd broker: a SEQPACKET socket that says who a peer is, and passes descriptors to it and from it.

    {"verb": "hello", "name": N}       -> {"token": T}
    {"verb": "take", "transfer": X}    -> {"count": C} + C descriptors
    {"verb": "offer"} + 1 descriptor   -> {"transfer": X}
    anything refused                   -> {"error": "..."}, and the connection ends if no hello came before it

The kernel's word for the peer's user id is checked before a byte is read. A connection's life is its worker's life.
"""

import contextlib
import errno
import json
import logging
import os
import re
import secrets
import selectors
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from kvstore_service.daemon import directories
from kvstore_service.daemon.logs import event
from kvstore_service.daemon.store.registry import Worker
from kvstore_service.shared import memory
from kvstore_service.shared.types import StoreError

MESSAGE_BYTES_MAX = 4096
DESCRIPTORS_MAX = 253  # SCM_MAX_FD
CONNECTIONS_MAX = 128
TRANSFERS_MAX = 64  # per connection
HELLO_S = 3.0
TRANSFER_S = 60.0
_TICK_S = 0.5
_CROWDED_NAP_S = 0.05  # the listener stays readable while there is no descriptor for a peer
_RELEASE_THREADS = 4

log = logging.getLogger("kvstored.broker")


@dataclass
class _Transfer:
    fds: list[int]
    inbound: bool
    expires_s: float


@dataclass(eq=False)
class _Connection:
    socket: socket.socket
    uid: int
    pid: int
    opened_s: float
    process: int | None = None
    worker: Worker | None = None
    transfers: dict[str, _Transfer] = field(default_factory=dict)


class Broker:
    """One thread serves all connections; releases run beside it, so that a slow one delays nobody.

    `admit(uid, pid, name)` makes a worker of a peer that said hello; `release(worker)` is called once, when its
    connection has ended."""

    def __init__(
        self,
        path: Path,
        allow_uids: frozenset[int],
        admit: Callable[[int, int, str], Worker],
        release: Callable[[Worker], None],
    ) -> None:
        self._path = path
        self._allow_uids = allow_uids
        self._admit = admit
        self._release = release
        self._lock = threading.Lock()
        self._connections: dict[str, _Connection] = {}  # by token
        self._selector = selectors.DefaultSelector()
        self._releasers = ThreadPoolExecutor(_RELEASE_THREADS, thread_name_prefix="release")
        self._listener = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        self._waker, self._wake = socket.socketpair()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="broker", daemon=True)

    def start(self) -> None:
        self._listener.bind(str(self._path))
        os.chmod(self._path, socket_mode(self._allow_uids))
        self._listener.listen(CONNECTIONS_MAX)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._waker, selectors.EVENT_READ)
        self._thread.start()

    def close(self) -> None:
        """Ends every connection and waits until their workers are released."""
        self._closing = True
        self._wake.send(b"x")
        if self._thread.ident is not None:
            self._thread.join(timeout=10.0)
        self._releasers.shutdown(wait=True)
        for end in (self._listener, self._waker, self._wake):
            end.close()
        self._selector.close()
        self._path.unlink(missing_ok=True)

    def give(self, token: str, fds: Sequence[int]) -> str:
        """Offers descriptors to the worker; takes them over, whatever happens. Returns the transfer's id."""
        owned = list(fds)
        if len(owned) > DESCRIPTORS_MAX:
            _close(owned)
            raise StoreError("INVALID_ARGUMENT", f"{len(owned)} descriptors; a transfer has at most {DESCRIPTORS_MAX}")
        with self._lock:
            connection = self._connections.get(token)
            if connection is not None and len(connection.transfers) < TRANSFERS_MAX:
                return _put(connection, owned, inbound=False)
        _close(owned)
        if connection is None:
            raise StoreError("UNAUTHENTICATED", "the worker's broker connection has ended")
        raise StoreError("RESOURCE_EXHAUSTED", f"{TRANSFERS_MAX} transfers wait to be taken", retry_after_s=1.0)

    def receive(self, token: str, transfer: str) -> int:
        """The descriptor that the worker offered under this id; the caller owns it. NOT_FOUND."""
        with self._lock:
            connection = self._connections.get(token)
            offered = connection.transfers.get(transfer) if connection else None
            if connection is None or offered is None or not offered.inbound:
                raise StoreError("NOT_FOUND", f"no descriptor was offered as transfer {transfer!r}")
            del connection.transfers[transfer]
        return offered.fds[0]

    # the thread

    def _serve(self) -> None:
        strangers: dict[socket.socket, _Connection] = {}
        while not self._closing:
            ended: set[_Connection] = set()
            for key, _ in self._selector.select(_TICK_S):
                if key.fileobj is self._listener:
                    self._accept(strangers)
                elif isinstance(key.data, _Connection) and key.data not in ended:
                    died = key.fileobj is not key.data.socket
                    if died or not self._answer(key.data):
                        ended.add(key.data)
                        strangers.pop(key.data.socket, None)
                        self._end(key.data)
            now_s = time.monotonic()
            for connection in list(strangers.values()):
                if connection.worker is not None:
                    del strangers[connection.socket]
                elif now_s - connection.opened_s > HELLO_S:
                    del strangers[connection.socket]
                    self._end(connection)
            self._expire(now_s)
        for connection in {key.data for key in self._selector.get_map().values() if key.data is not None}:
            self._end(connection)

    def _accept(self, strangers: dict[socket.socket, _Connection]) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            try:
                peer, _ = self._listener.accept()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                event(log, logging.WARNING, "no peer can be let in", error=error)
                time.sleep(_CROWDED_NAP_S)
                return
            peer.setblocking(False)
            pid, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            refusal = self._refusal(uid)
            if refusal:
                event(log, logging.WARNING, "peer refused", uid=uid, pid=pid, reason=refusal)
                with contextlib.suppress(OSError):
                    _send(peer, {"error": refusal})
                peer.close()
                return
            connection = strangers[peer] = _Connection(peer, uid, pid, time.monotonic())
            self._selector.register(peer, selectors.EVENT_READ, connection)
            # A forked child can hold the socket open beyond its parent's death.
            with contextlib.suppress(OSError):
                connection.process = os.pidfd_open(pid)
                self._selector.register(connection.process, selectors.EVENT_READ, connection)

    def _refusal(self, uid: int) -> str:
        if uid not in self._allow_uids:
            return f"user id {uid} is not in allow_uids"
        if (
            sum(isinstance(key.fileobj, socket.socket) for key in self._selector.get_map().values()) - 2
            >= CONNECTIONS_MAX
        ):
            return f"{CONNECTIONS_MAX} connections are open"
        return ""

    def _answer(self, connection: _Connection) -> bool:
        """Reads one message and answers it. False: the connection is over."""
        try:
            text, fds, flags, _ = socket.recv_fds(
                connection.socket, MESSAGE_BYTES_MAX, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return True
        except OSError:
            return False
        try:
            if not text:
                return False
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise StoreError("INVALID_ARGUMENT", f"a message has at most {MESSAGE_BYTES_MAX} bytes")
            answer, outgoing = self._obey(connection, _parse(text), fds)
        except StoreError as error:
            answer, outgoing = {"error": error.message, "code": error.code}, []
        except Exception:
            # Whatever a peer found, it ends this peer alone.
            log.exception("peer dropped", extra={"fields": {"uid": connection.uid, "pid": connection.pid}})
            return False
        finally:
            _close(fds)
        try:
            _send(connection.socket, answer, outgoing)
        except OSError:
            return False
        finally:
            _close(outgoing)
        return connection.worker is not None

    def _obey(
        self, connection: _Connection, message: dict[str, object], fds: list[int]
    ) -> tuple[dict[str, object], list[int]]:
        """Descriptors that are kept leave `fds`; those returned are closed once they were sent."""
        verb = message.get("verb")
        if connection.worker is None:
            if verb != "hello" or fds:
                raise StoreError("UNAUTHENTICATED", "say hello first")
            # Names stand in logs and in answers to operators.
            return self._hello(
                connection, re.sub(r"[^\w.:@-]", "?", str(message.get("name", ""))[:64], flags=re.ASCII)
            ), []
        if verb == "take":
            return self._take(connection, str(message.get("transfer", "")))
        if verb == "offer":
            return self._offer(connection, fds), []
        raise StoreError("INVALID_ARGUMENT", f"unknown verb {verb!r}; take or offer")

    def _hello(self, connection: _Connection, name: str) -> dict[str, object]:
        worker = self._admit(connection.uid, connection.pid, name)
        connection.worker = worker
        with self._lock:
            self._connections[worker.token] = connection
        return {"token": worker.token}

    def _take(self, connection: _Connection, transfer_id: str) -> tuple[dict[str, object], list[int]]:
        with self._lock:
            transfer = connection.transfers.get(transfer_id)
            if transfer is None or transfer.inbound:
                raise StoreError("NOT_FOUND", f"no transfer {transfer_id!r} waits for this connection")
            del connection.transfers[transfer_id]
        return {"count": len(transfer.fds)}, transfer.fds

    def _offer(self, connection: _Connection, fds: list[int]) -> dict[str, object]:
        if len(fds) != 1 or memory.seals_of(fds[0]) & memory.CONSTANT != memory.CONSTANT:
            raise StoreError("INVALID_ARGUMENT", "offer one memfd, sealed against shrinking, growing and writing")
        with self._lock:
            if len(connection.transfers) >= TRANSFERS_MAX:
                raise StoreError("RESOURCE_EXHAUSTED", f"{TRANSFERS_MAX} transfers are open")
            return {"transfer": _put(connection, [fds.pop()], inbound=True)}

    def _expire(self, now_s: float) -> None:
        with self._lock:
            for connection in self._connections.values():
                late = [name for name, transfer in connection.transfers.items() if transfer.expires_s < now_s]
                for name in late:
                    _close(connection.transfers.pop(name).fds)

    def _end(self, connection: _Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()
        if connection.process is not None:
            self._selector.unregister(connection.process)
            os.close(connection.process)
        worker = connection.worker
        if worker is None:
            return
        with self._lock:
            self._connections.pop(worker.token, None)
            for transfer in connection.transfers.values():
                _close(transfer.fds)
            connection.transfers.clear()
        self._releasers.submit(self._release_worker, worker)

    def _release_worker(self, worker: Worker) -> None:
        try:
            self._release(worker)
        except Exception:
            log.exception("release failed", extra={"fields": {"name": worker.name, "pid": worker.pid}})


def claim_path(path: Path) -> None:
    """Makes `path` free for a listener: a socket that a dead daemon left is removed.

    FAILED_PRECONDITION if a daemon listens there, or if it is another kind of file."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    directories.require_own(path.parent)
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise StoreError("FAILED_PRECONDITION", f"{path} exists and is no socket; remove it or use another path")
    except FileNotFoundError:
        return
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(path))
            except FileNotFoundError:
                return
            except OSError as error:
                if not isinstance(error, ConnectionRefusedError) and "wrong type" not in str(error):
                    raise StoreError("FAILED_PRECONDITION", f"{path} cannot be probed: {error}") from error
                continue
        raise StoreError("FAILED_PRECONDITION", f"another daemon is listening on {path}; stop it or use another path")
    path.unlink(missing_ok=True)


def socket_mode(allow_uids: frozenset[int]) -> int:
    """Open to others only if some are allowed; each is then judged by its credentials or its token."""
    return 0o600 if allow_uids == {os.getuid()} else 0o666


def _put(connection: _Connection, fds: list[int], inbound: bool) -> str:
    name = secrets.token_hex(16)
    connection.transfers[name] = _Transfer(fds, inbound, time.monotonic() + TRANSFER_S)
    return name


def _parse(text: bytes) -> dict[str, object]:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise StoreError("INVALID_ARGUMENT", "a message is one JSON object")
    return message


def _send(peer: socket.socket, message: dict[str, object], fds: Sequence[int] = ()) -> None:
    socket.send_fds(peer, [json.dumps(message).encode()], fds, socket.MSG_NOSIGNAL)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
