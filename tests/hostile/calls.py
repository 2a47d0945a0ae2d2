"""Every method of the daemon, as its descriptors say, and calls of them with any bytes at all."""

import random
import threading
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvstore_service._proto import admin_service_pb2 as admin_pb
from kvstore_service._proto import store_service_pb2 as pb

Metadata = tuple[tuple[str, str], ...]
_SERVICES = (pb.DESCRIPTOR.services_by_name["StoreService"], admin_pb.DESCRIPTOR.services_by_name["AdminService"])
METHODS: list[MethodDescriptor] = [method for service in _SERVICES for method in service.methods]
GARBAGE = b"\xff" * 64  # no message at all

NUMBERS = (0, 1, 2, 3, 255, 256, 4096, 2**16 - 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1)
TEXTS = ("", "..", "../" * 8 + "etc/passwd", "/etc/passwd", "a\0b", "map", "x" * 70_000, "\u202e\n%s%n", "0")
BLOBS = (b"", bytes(16), bytes(32), b"\xff" * 32, b"../../etc/passwd", b"\0" * 70_000)


def path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def admin(method: MethodDescriptor) -> bool:
    return method.containing_service.name == "AdminService"


def request_of(method: MethodDescriptor) -> Message:
    message: Message = GetMessageClass(method.input_type)()
    return message


def token(value: str) -> Metadata:
    return (("kvstore-token", value),)


def code_of(
    channel: grpc.Channel, method: MethodDescriptor, payload: bytes, metadata: Metadata = (), timeout_s: float = 10.0
) -> str:
    """How a call with these bytes as its request ends. A stream of answers is left after the first one."""
    answers = channel.stream_stream(path_of(method))(iter([payload]), timeout=timeout_s, metadata=metadata)
    try:
        for _ in answers:
            if method.server_streaming:
                answers.cancel()
                return "OK"
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def fill(message: Message, value: Callable[[FieldDescriptor], Any], items: int = 1) -> Message:
    """Sets every field to what `value` says, `items` times where it repeats; None leaves a field as it is."""
    for field in message.DESCRIPTOR.fields:
        nested = field.message_type
        if nested is not None and nested.GetOptions().map_entry:
            continue
        held = getattr(message, field.name)
        repeated = hasattr(held, "append")
        for _ in range(items if repeated else 1):
            if nested is not None:
                fill(held.add() if repeated else held, value, items)
            elif (given := value(field)) is not None:
                if repeated:
                    held.append(given)
                else:
                    setattr(message, field.name, given)
    return message


def extreme(rng: random.Random) -> Callable[[FieldDescriptor], Any]:
    """Numbers at the ends of their range, texts that look like paths, and identities of odd lengths."""

    def value(field: FieldDescriptor) -> Any:
        kind = field.cpp_type
        if kind == FieldDescriptor.CPPTYPE_STRING:
            return rng.choice(BLOBS if field.type == FieldDescriptor.TYPE_BYTES else TEXTS)
        if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return rng.choice((0.0, -1.0, 1e308, float("inf"), float("nan")))
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        bits = 64 if kind in (FieldDescriptor.CPPTYPE_UINT64, FieldDescriptor.CPPTYPE_INT64) else 32
        unsigned = kind in (FieldDescriptor.CPPTYPE_UINT64, FieldDescriptor.CPPTYPE_UINT32)
        number = rng.choice(NUMBERS) % 2**bits
        return number if unsigned else number - 2 ** (bits - 1)

    return value


class Late:
    """A request that does not come before `end`."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def __iter__(self) -> "Late":
        return self

    def __next__(self) -> bytes:
        self._ended.wait(60.0)
        raise StopIteration

    def end(self) -> None:
        self._ended.set()
