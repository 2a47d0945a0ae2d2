"""A peer that speaks HTTP/2 by itself: it sends requests of gRPC up to their last byte, as far as windows let it, and
does so again as soon as a call has ended."""

import select
import socket
import struct
import time

PUSH_S = 3.0
FRAME_BYTES = 16384
WINDOW_BYTES = 65535
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _WINDOW = 0, 1, 3, 4, 6, 8
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_CANCEL = 8
_INITIAL_WINDOW = 4


class SlowPeer:
    def __init__(self, path: str, method: str) -> None:
        self._method = method
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(5.0)
        self._socket.connect(path)
        self._readable = select.poll()  # select() takes no descriptor beyond 1,023
        self._readable.register(self._socket, select.POLLIN)
        self._received = b""
        self._room, self._initial = WINDOW_BYTES, WINDOW_BYTES
        self._rooms: dict[int, int] = {}
        self._sent: dict[int, int] = {}
        self._next = 1
        self.ended = 0  # calls
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, b""))
        self._hear(1.0)

    def close(self) -> None:
        self._socket.close()

    def push(self, streams: int, size_bytes: int) -> None:
        """For PUSH_S: keeps `streams` calls open and sends each its request but for the end."""
        body = struct.pack(">BI", 0, size_bytes) + bytes(size_bytes - 1)
        end_s = time.monotonic() + PUSH_S
        while time.monotonic() < end_s:
            while len(self._sent) < streams:
                self._open()
            self._hear(0.01)
            for stream, sent in list(self._sent.items()):
                part = body[sent : sent + min(FRAME_BYTES, self._room, self._rooms[stream])]
                if part:
                    self._socket.sendall(_frame(_DATA, 0, stream, part))
                    self._sent[stream] += len(part)
                    self._room -= len(part)
                    self._rooms[stream] -= len(part)

    def _open(self) -> None:
        self._rooms[self._next], self._sent[self._next] = self._initial, 0
        self._socket.sendall(_frame(_HEADERS, _END_HEADERS, self._next, _head(self._method)))
        self._next += 2

    def _ended(self, stream: int) -> None:
        if self._sent.pop(stream, None) is not None:
            del self._rooms[stream]
            self._socket.sendall(_frame(_RESET, 0, stream, struct.pack(">I", _CANCEL)))
            self.ended += 1

    def _hear(self, timeout_s: float) -> None:
        while self._readable.poll(timeout_s * 1000):
            timeout_s = 0.0
            heard = self._socket.recv(1 << 20)
            assert heard
            self._received += heard
            while len(self._received) >= 9 and len(self._received) >= 9 + int.from_bytes(self._received[:3], "big"):
                end = 9 + int.from_bytes(self._received[:3], "big")
                kind, flags, stream = struct.unpack(">BBI", self._received[3:9])
                payload, self._received = self._received[9:end], self._received[end:]
                self._obey(kind, flags, stream, payload)

    def _obey(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            for key, value in struct.iter_unpack(">HI", payload):
                if key == _INITIAL_WINDOW:
                    self._rooms = {name: room + value - self._initial for name, room in self._rooms.items()}
                    self._initial = value
            self._socket.sendall(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self._socket.sendall(_frame(_PING, _ACK, 0, payload))
        elif kind == _RESET or (kind == _HEADERS and flags & _END_STREAM):
            self._ended(stream)
        elif kind == _WINDOW:
            (more,) = struct.unpack(">I", payload)
            if stream == 0:
                self._room += more
            elif stream in self._rooms:
                self._rooms[stream] += more


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _head(method: str) -> bytes:
    """HPACK, every field written out."""
    fields = {
        ":method": "POST", ":scheme": "http", ":path": method, ":authority": "localhost", "te": "trailers",
        "content-type": "application/grpc",
    }  # fmt: skip
    texts = [text.encode() for pair in fields.items() for text in pair]
    coded = [bytes([len(text)]) + text for text in texts]
    return b"".join(b"\0" + name + value for name, value in zip(coded[::2], coded[1::2], strict=True))
