"""How much a request may hold: its fields, before it is decoded; its lists and texts, before a handler sees it."""

from collections.abc import Iterator
from functools import cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from kvstore_service.daemon.front.replies import IDEMPOTENCY_KEY_MAX
from kvstore_service.shared.types import (
    BUILD_BYTES,
    DIGEST_BYTES,
    FINGERPRINT_BYTES,
    PACK_ID_BYTES,
    REASON_LETTERS_MAX,
    StoreError,
)

ITEMS_MAX = 16384  # of a repeated field
FIELDS_MAX = 8 * ITEMS_MAX  # of a request with all that it holds
FIELD_BYTES_MAX = 10 * ITEMS_MAX  # of numbers, or a text
FEW_BYTES = 64 << 10  # whatever so few bytes decode to is little
EXACT = {
    "build": BUILD_BYTES,
    "fingerprint": FINGERPRINT_BYTES,
    "pack_id": PACK_ID_BYTES,
    "pack_ids": PACK_ID_BYTES,
    "parent": PACK_ID_BYTES,
    "token_digest": DIGEST_BYTES,
}
LONGEST = {
    "idempotency_key": IDEMPOTENCY_KEY_MAX, "kind": 64, "name": 64, "parameters": 64, "reason": REASON_LETTERS_MAX
}  # fmt: skip
OTHERS = 128  # ids, tokens of pages and transfers
_VARINT, _BYTES, _FIXED = 0, 2, {1: 8, 5: 4}  # wire types; a fixed one with its bytes
_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def check_size(received: bytes, descriptor: Descriptor) -> None:
    """INVALID_ARGUMENT for a request of so many fields, or so large a one, that it would take many times its size once
    it is decoded: an empty item has two bytes here, some hundred there. What is no message the decoder refuses."""
    if len(received) <= FEW_BYTES:
        return
    for number, _ in enumerate(_fields_of(received, 0, len(received), descriptor), start=1):
        if number > FIELDS_MAX:
            raise StoreError("INVALID_ARGUMENT", f"more than {FIELDS_MAX} fields in one request")


def _fields_of(received: bytes, at: int, end: int, descriptor: Descriptor | None) -> Iterator[None]:
    while at < end:
        yield
        tag, at = _varint(received, at, end)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _varint(received, at, end)
        elif kind == _BYTES:
            length, at = _varint(received, at, end)
            field = descriptor.fields_by_number.get(tag >> 3) if descriptor is not None else None
            if field is not None and field.message_type is not None:
                yield from _fields_of(received, at, min(at + length, end), field.message_type)
            elif length > FIELD_BYTES_MAX:
                raise StoreError("INVALID_ARGUMENT", f"a field of {length} bytes; at most {FIELD_BYTES_MAX}")
            at += length
        else:
            at += _FIXED.get(kind, 0)


def _varint(received: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end:
        byte = received[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80 or shift > 63:
            break
    return value, at


def check(message: Message) -> None:
    """INVALID_ARGUMENT for a list or a text that is too long, or not as long as it has to be."""
    if not _has_lists_or_texts(message.DESCRIPTOR):
        return
    for field, value in message.ListFields():
        nested = field.message_type
        if nested is not None and nested.GetOptions().map_entry:
            values: list[object] = [text for pair in value.items() for text in pair]
        else:
            values = [value] if isinstance(value, str | bytes | Message | int | float) else value
        if len(values) > ITEMS_MAX:
            raise StoreError("INVALID_ARGUMENT", f"{len(values)} {field.name}; at most {ITEMS_MAX}")
        if nested is None and field.type not in _TEXTS:
            continue
        for item in values:
            if isinstance(item, Message):
                check(item)
            elif isinstance(item, str | bytes):
                _check_length(field.name, len(item))


def _check_length(name: str, length: int) -> None:
    if name in EXACT and length not in (0, EXACT[name]):
        raise StoreError("INVALID_ARGUMENT", f"{name} has {length} bytes; write {EXACT[name]}", reason="FIELD_LENGTH")
    most = EXACT.get(name) or LONGEST.get(name, OTHERS)
    if length > most:
        raise StoreError("INVALID_ARGUMENT", f"{name} has {length} letters; at most {most}", reason="FIELD_LENGTH")


@cache
def _has_lists_or_texts(descriptor: Descriptor) -> bool:
    """Whether there is anything to check: windows of thousands of lanes are numbers alone."""
    return any(
        field.type in _TEXTS or field.message_type is not None or field.is_repeated for field in descriptor.fields
    )
