"""How long every text and every bytes field of a request may be, checked before a handler sees it."""

from functools import cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from kvstore_service.daemon.front.replies import IDEMPOTENCY_KEY_MAX
from kvstore_service.shared.types import BUILD_BYTES, DIGEST_BYTES, FINGERPRINT_BYTES, PACK_ID_BYTES, StoreError

ITEMS_MAX = 16384  # of a repeated message
EXACT = {
    "build": BUILD_BYTES,
    "fingerprint": FINGERPRINT_BYTES,
    "pack_id": PACK_ID_BYTES,
    "pack_ids": PACK_ID_BYTES,
    "parent": PACK_ID_BYTES,
    "token_digest": DIGEST_BYTES,
}
LONGEST = {"idempotency_key": IDEMPOTENCY_KEY_MAX, "kind": 64, "name": 64, "parameters": 64}
OTHERS = 128  # ids, tokens of pages and transfers
_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def check(message: Message) -> None:
    """INVALID_ARGUMENT for a field that is set and too long, or not as long as it has to be."""
    if not _has_texts(message.DESCRIPTOR):
        return
    for field, value in message.ListFields():
        nested = field.message_type
        if nested is not None and nested.GetOptions().map_entry:
            values: list[object] = [text for pair in value.items() for text in pair]
        else:
            values = [value] if isinstance(value, str | bytes | Message | int | float) else value
        if len(values) > ITEMS_MAX and nested is not None:
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
def _has_texts(descriptor: Descriptor) -> bool:
    """Whether there is anything to check: windows of thousands of lanes are numbers alone."""
    return any(field.type in _TEXTS or (field.message_type is not None) for field in descriptor.fields)
