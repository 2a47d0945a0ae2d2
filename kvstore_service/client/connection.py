"""The worker's end of the fd broker. The connection's life is the worker's life in the daemon."""

import json
import select
import socket
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

from kvstore_service.shared import memory
from kvstore_service.shared.settings import require_own
from kvstore_service.shared.types import StoreError

_MESSAGE_BYTES_MAX = 4096
_DESCRIPTORS_MAX = 253


class BrokerConnection:
    """Says hello and holds the `token`. Thread-safe; every exchange ends within `timeout_s`."""

    def __init__(self, path: str, name: str, timeout_s: float, operator: bool = False) -> None:
        """As a worker, or as an `operator`, who administers only and for whom room is kept.

        UNAVAILABLE if no daemon answers, PERMISSION_DENIED if it refuses this user, or is a stranger's."""
        require_own(Path(path))
        self._silent = (
            f"the daemon at {path} has not answered for {timeout_s:g} s: it is stopped or overloaded; see its log"
        )
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            # Blocking, for the kernel to queue it: one that does not block fails at once while many others connect.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", *_timeval(timeout_s)))
            self._socket.connect(path)
            self._socket.settimeout(timeout_s)
            answer, _ = self._exchange({"verb": "hello", "name": name, "role": "operator" if operator else "worker"})
        except OSError as error:
            self._socket.close()
            raise StoreError("UNAVAILABLE", f"no daemon answers at {path}: {error.strerror or error}") from error
        except BaseException:
            self._socket.close()
            raise
        self.token = str(answer["token"])

    def take(self, transfer: str) -> list[int]:
        """Descriptors of a transfer; the caller owns them."""
        answer, fds = self._exchange({"verb": "take", "transfer": transfer})
        if len(fds) != answer["count"]:
            raise StoreError("INTERNAL", f"{len(fds)} of {answer['count']} descriptors came; see `ulimit -n`")
        return fds

    def offer(self, name: str, content: bytes) -> str:
        """Passes constant memory with this content to the daemon. Returns the transfer's id."""
        with memory.Owned(memory.of_bytes(name, content)) as offered:
            answer, _ = self._exchange({"verb": "offer"}, [offered.fd])
        return str(answer["transfer"])

    @property
    def ended(self) -> bool:
        """Whether the daemon has closed the connection, or this end did."""
        if self._socket.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def close(self) -> None:
        self._socket.close()

    def _exchange(self, message: dict[str, str], fds: Sequence[int] = ()) -> tuple[dict[str, object], list[int]]:
        with self._lock:
            try:
                socket.send_fds(self._socket, [json.dumps(message).encode()], fds)
                text, received, _, _ = socket.recv_fds(
                    self._socket, _MESSAGE_BYTES_MAX, _DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
                )
            except TimeoutError as error:
                raise StoreError("DEADLINE_EXCEEDED", self._silent) from error
            except (ConnectionError, BrokenPipeError) as error:
                if message["verb"] == "hello":
                    text, received = self._last_words(), []
                else:
                    raise StoreError("UNAVAILABLE", f"the daemon is gone: {error.strerror}") from error
        if not text:
            raise StoreError("UNAVAILABLE", "the daemon closed the connection")
        answer = json.loads(text)
        if "error" in answer:
            raise StoreError(answer.get("code", "PERMISSION_DENIED"), answer["error"])
        return answer, received

    def _last_words(self) -> bytes:
        """A refusal may lie in the socket although sending failed, because the daemon says it without reading."""
        try:
            return self._socket.recv(_MESSAGE_BYTES_MAX)
        except OSError:
            return b""


def _timeval(timeout_s: float) -> tuple[int, int]:
    """Whole seconds and microseconds, at least one: none would be for ever."""
    return divmod(max(1, int(timeout_s * 1e6)), 1_000_000)
