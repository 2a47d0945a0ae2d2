"""The fd broker: a SEQPACKET socket that says who a peer is, and passes descriptors to it and from it.

    {"verb": "hello", "name": N}       -> {"token": T}; with "role": "operator" for a peer that administers only
    {"verb": "take", "transfer": X}    -> {"count": C} + C descriptors
    {"verb": "offer"} + 1 descriptor   -> {"transfer": X}
    anything refused                   -> {"error": "..."}, and the connection ends if no hello came before it

The kernel's word for the peer's user id is checked before a byte is read. A connection's life is its worker's life.
"""

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import re
import secrets
import selectors
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from kvstore_service.daemon.front.closers import STRANGERS, Closers
from kvstore_service.daemon.front.socket_path import open_to
from kvstore_service.daemon.logs import Sparse
from kvstore_service.daemon.store.registry import Worker
from kvstore_service.shared import memory
from kvstore_service.shared.types import StoreError, Violation

MESSAGE_BYTES_MAX = 4096
DESCRIPTORS_MAX = 253  # SCM_MAX_FD
CONNECTIONS_MAX = 512
USER_CONNECTIONS_MAX = 96
ADMIN_CONNECTIONS = 64  # of CONNECTIONS_MAX, kept for those who may administer
TRANSFERS_MAX = 64  # per connection
TRANSFER_BYTES_MAX = 1 << 30  # of one connection's transfers, both ways; one sidecar can have as many
USER_TRANSFER_BYTES_MAX = 2 << 30  # of all connections of a user
HELLO_S = 3.0
TRANSFER_S = 60.0
_TICK_S = 0.5
_CROWDED_NAP_S = 0.05  # the listener stays readable while there is no descriptor for a peer
_RELEASE_THREADS = 4  # of each user

log = logging.getLogger("kvstored.broker")


@dataclass
class _Transfer:
    fds: list[int]
    inbound: bool
    expires_s: float
    size_bytes: int = 0  # of memory that lives by the transfer alone


@dataclass(eq=False)
class _Connection:
    socket: socket.socket
    uid: int
    pid: int
    opened_s: float
    process: int | None = None
    worker: Worker | None = None
    transfers: dict[str, _Transfer] = field(default_factory=dict)
    memory: str = ""  # the transfer of the latest registration


def _waiting_bytes(connection: _Connection) -> int:
    return sum(transfer.size_bytes for transfer in connection.transfers.values())


def _require_room(subject: str, wanted: int, most: int) -> None:
    if wanted > most:
        raise StoreError(
            "RESOURCE_EXHAUSTED",
            f"{subject}: {wanted} would wait, at most {most} may; take or use those that wait first",
            retry_after_s=1.0,
            violations=[Violation(subject, f"at most {most}")],
            reason="LIMIT_REACHED",
        )


class Room:
    """A transfer to be."""

    def __init__(self, lock: threading.Lock, connection: _Connection, name: str) -> None:
        self._lock = lock
        self._connection = connection
        self._name = name

    def give(self, fds: Sequence[int]) -> str:
        """Offers descriptors to the worker; takes them over. Returns the transfer's id. INVALID_ARGUMENT for too many,
        UNAUTHENTICATED if the worker has left; they are then still the caller's."""
        if len(fds) > DESCRIPTORS_MAX:
            raise StoreError("INVALID_ARGUMENT", f"{len(fds)} descriptors; a transfer has at most {DESCRIPTORS_MAX}")
        with self._lock:
            transfer = self._connection.transfers.get(self._name)
            if transfer is None:
                raise StoreError("UNAUTHENTICATED", "the worker's broker connection has ended", reason="TOKEN_UNKNOWN")
            transfer.fds = list(fds)
            transfer.expires_s = time.monotonic() + TRANSFER_S
        return self._name

    def close(self) -> None:
        """Gives the room up if nothing was given."""
        with self._lock:
            transfer = self._connection.transfers.get(self._name)
            if transfer is not None and not transfer.fds:
                del self._connection.transfers[self._name]


class Broker:
    """One thread serves all connections; releases run beside it, so that a slow one delays no other user.

    `admit(uid, pid, name, operator)` makes a worker of a peer that said hello; `release(worker)` is called once, when
    its connection has ended."""

    def __init__(
        self,
        path: Path,
        allow_uids: frozenset[int],
        admin_uids: frozenset[int],
        group: int | None,
        admit: Callable[[int, int, str, bool], Worker],
        release: Callable[[Worker], None],
    ) -> None:
        self._path = path
        self._allow_uids = allow_uids
        self._admin_uids = admin_uids
        self._group = group
        self._admit = admit
        self._release = release
        self._lock = threading.Lock()
        self._connections: dict[str, _Connection] = {}  # by token
        self._selector = selectors.DefaultSelector()
        self._unread: dict[
            socket.socket, int
        ] = {}  # ended, with an answer that the peer, of this user id, may still read
        self._refusals = Sparse(log)
        self._closers = Closers()
        self._releasers: dict[int, ThreadPoolExecutor] = {}  # by user id, of which a few may connect
        self._listener = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        self._waker, self._wake = socket.socketpair()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="broker", daemon=True)

    def start(self) -> None:
        self._listener.bind(str(self._path))
        open_to(self._path, self._group)
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
        for releaser in self._releasers.values():
            releaser.shutdown(wait=True)
        for end in (self._listener, self._waker, self._wake):
            end.close()
        self._selector.close()
        self._path.unlink(missing_ok=True)

    def give(self, token: str, fds: Sequence[int]) -> str:
        """Offers descriptors to the worker; takes them over, whatever happens. Returns the transfer's id."""
        try:
            with self.room(token, 0) as room:
                return room.give(fds)
        except StoreError:
            _close(fds)
            raise

    def give_memory(self, token: str, fds: Sequence[int]) -> str:
        """`give` of a registration's descriptors, in the place of those of an earlier one that were not taken."""
        self.withdraw_memory(token)
        name = self.give(token, fds)
        with self._lock:
            if (connection := self._connections.get(token)) is not None:
                connection.memory = name
        return name

    def withdraw_memory(self, token: str) -> None:
        """Nothing if it was taken."""
        with self._lock:
            connection = self._connections.get(token)
            transfer = connection.transfers.pop(connection.memory, None) if connection else None
        if transfer is not None:
            _close(transfer.fds)

    @contextlib.contextmanager
    def room(self, token: str, size_bytes: int) -> Iterator["Room"]:
        """Room for one transfer of so many bytes, kept before they are made; what is not given is given up.

        UNAUTHENTICATED, or RESOURCE_EXHAUSTED while too much waits to be taken."""
        with self._lock:
            connection = self._connections.get(token)
            if connection is None:
                raise StoreError("UNAUTHENTICATED", "the worker's broker connection has ended", reason="TOKEN_UNKNOWN")
            name = self._add_transfer(connection, _Transfer([], False, math.inf, size_bytes))
        room = Room(self._lock, connection, name)
        try:
            yield room
        finally:
            room.close()

    def _add_transfer(self, connection: _Connection, transfer: _Transfer) -> str:
        """For a caller that holds the lock. Returns the transfer's id. RESOURCE_EXHAUSTED."""
        user = [other for other in self._connections.values() if other.uid == connection.uid]
        user_bytes = sum(_waiting_bytes(other) for other in user)
        size_bytes = transfer.size_bytes
        _require_room("transfers", len(connection.transfers) + 1, TRANSFERS_MAX)
        _require_room("bytes of transfers", _waiting_bytes(connection) + size_bytes, TRANSFER_BYTES_MAX)
        _require_room(f"bytes of user id {connection.uid}", user_bytes + size_bytes, USER_TRANSFER_BYTES_MAX)
        name = secrets.token_hex(16)
        connection.transfers[name] = transfer
        return name

    def end(self, token: str) -> bool:
        """Ends the worker's connection, and with it the worker. False if it has ended already."""
        with self._lock:
            connection = self._connections.get(token)
            if connection is None:
                return False
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)
            return True

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
                    if died or not self._answer_safely(key.data):
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
            self._let_go_read()
        for peer in self._unread:
            peer.close()
        for connection in {key.data for key in self._selector.get_map().values() if key.data is not None}:
            self._end(connection)

    def _accept(self, strangers: dict[socket.socket, _Connection]) -> None:
        """One peer more. Whatever is wrong with it or with letting it in, the others are served."""
        try:
            peer, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            self._refusals.event(error.errno, logging.WARNING, "no peer can be let in", error=error)
            time.sleep(_CROWDED_NAP_S)
            return
        try:
            self._greet(peer, strangers)
        except Exception as error:
            if not isinstance(error, ConnectionError):  # it has gone again
                log.exception("a peer could not be let in")
            strangers.pop(peer, None)
            with contextlib.suppress(KeyError):
                self._selector.unregister(peer)
            peer.close()
            time.sleep(_CROWDED_NAP_S)

    def _greet(self, peer: socket.socket, strangers: dict[socket.socket, _Connection]) -> None:
        peer.setblocking(False)
        pid, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        refusal = self._refusal(uid)
        if refusal:
            self._refusals.event((uid, refusal), logging.WARNING, "peer refused", uid=uid, pid=pid, reason=refusal)
            with contextlib.suppress(OSError):
                _send(peer, {"error": refusal})
            payer = uid if uid in self._allow_uids else STRANGERS
            self._closers.close(payer, [peer.detach()])  # with what it has sent unread
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
        if self._closers.behind(uid):
            return f"descriptors of user id {uid} are still being closed"
        peers = {key.data for key in self._selector.get_map().values() if key.data is not None}
        uids = [*(peer.uid for peer in peers), *self._unread.values()]
        if uids.count(uid) >= USER_CONNECTIONS_MAX:
            return f"{USER_CONNECTIONS_MAX} connections of user id {uid} are open"
        if len(uids) >= CONNECTIONS_MAX - (0 if uid in self._admin_uids else ADMIN_CONNECTIONS):
            return f"{len(uids)} connections are open"
        return ""

    def _answer_safely(self, connection: _Connection) -> bool:
        """As `_answer`; what goes wrong in it ends this connection alone."""
        try:
            return self._answer(connection)
        except Exception:
            log.exception("an answer failed", extra={"fields": {"uid": connection.uid, "pid": connection.pid}})
            return False

    def _answer(self, connection: _Connection) -> bool:
        """Reads one message and answers it. False: the connection is over."""
        if self._closers.behind(connection.uid):
            return False
        if _unread(connection.socket):  # descriptors that are under way count for all that the daemon sends
            return False
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
            self._closers.close(connection.uid, fds)
        try:
            _send(connection.socket, answer, outgoing)
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                return False
            refusal = "too many descriptors are on their way to peers that do not read; try again"
            _send(connection.socket, {"error": refusal, "code": "RESOURCE_EXHAUSTED"})
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
            name = re.sub(r"[^\w.:@-]", "?", str(message.get("name", ""))[:64], flags=re.ASCII)
            return self._hello(connection, name, message.get("role") == "operator"), []
        if verb == "take":
            return self._take(connection, str(message.get("transfer", "")))
        if verb == "offer":
            return self._offer(connection, fds), []
        raise StoreError("INVALID_ARGUMENT", f"unknown verb {verb!r}; take or offer")

    def _hello(self, connection: _Connection, name: str, operator: bool) -> dict[str, object]:
        worker = self._admit(connection.uid, connection.pid, name, operator)
        connection.worker = worker
        with self._lock:
            self._connections[worker.token] = connection
        return {"token": worker.token}

    def _take(self, connection: _Connection, transfer_id: str) -> tuple[dict[str, object], list[int]]:
        with self._lock:
            transfer = connection.transfers.get(transfer_id)
            if transfer is None or transfer.inbound or not transfer.fds:
                raise StoreError("NOT_FOUND", f"no transfer {transfer_id!r} waits for this connection")
            del connection.transfers[transfer_id]
        return {"count": len(transfer.fds)}, transfer.fds

    def _offer(self, connection: _Connection, fds: list[int]) -> dict[str, object]:
        if len(fds) != 1 or not memory.is_constant(fds[0]):
            raise StoreError(
                "INVALID_ARGUMENT", "offer one memfd that can be read, sealed against shrinking, growing and writing"
            )
        size_bytes = memory.held_bytes(fds[0])
        with self._lock:
            name = self._add_transfer(connection, _Transfer(fds[:1], True, time.monotonic() + TRANSFER_S, size_bytes))
            fds.clear()
        return {"transfer": name}

    def _expire(self, now_s: float) -> None:
        with self._lock:
            for connection in self._connections.values():
                late = [name for name, transfer in connection.transfers.items() if transfer.expires_s < now_s]
                for name in late:
                    _close(connection.transfers.pop(name).fds)

    def _let_go_read(self) -> None:
        for peer in [peer for peer in self._unread if not _unread(peer)]:
            self._closers.close(self._unread.pop(peer), [peer.detach()])

    def _end(self, connection: _Connection) -> None:
        self._selector.unregister(connection.socket)
        with contextlib.suppress(OSError):
            connection.socket.shutdown(socket.SHUT_RDWR)
        if _unread(connection.socket):
            self._unread[connection.socket] = connection.uid
        else:
            self._closers.close(connection.uid, [connection.socket.detach()])  # with what it has sent unread
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
        if worker.uid not in self._releasers:
            self._releasers[worker.uid] = ThreadPoolExecutor(_RELEASE_THREADS, thread_name_prefix="release")
        self._releasers[worker.uid].submit(self._release_worker, worker)

    def _release_worker(self, worker: Worker) -> None:
        try:
            self._release(worker)
        except Exception:
            log.exception("release failed", extra={"fields": {"name": worker.name, "pid": worker.pid}})


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


def _unread(peer: socket.socket) -> bool:
    """Whether something that was sent to it waits for the peer to read it."""
    return fcntl.ioctl(peer, termios.TIOCOUTQ, bytes(4)) != bytes(4)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
