"""A text file that a user names in a flag."""

from __future__ import annotations

import codecs
from pathlib import Path

from kvstore_service.shared.types import format_size

# More than any context holds; a device or a disk image is not read to its end.
BYTES_MAX = 256 << 20


def read_text(flag: str, path: Path) -> str:
    """Its content, UTF-8 and not empty; ValueError in one line that names the flag otherwise."""
    try:
        with path.open("rb") as file:
            content = file.read(BYTES_MAX + 1)
    except OSError as error:
        raise ValueError(f"{flag} {path}: {error.strerror}; give a text file that can be read") from None
    whole = len(content) <= BYTES_MAX
    try:
        # Cut inside a letter it is too long, not malformed.
        text = codecs.getincrementaldecoder("utf-8")().decode(content, final=whole)
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag} {path}: byte {error.start} is not UTF-8; give a text file") from None
    if "\0" in text:
        raise ValueError(f"{flag} {path}: byte {content.index(0)} is NUL, as in a binary file; give a text file")
    if not whole:
        raise ValueError(f"{flag} {path}: longer than {format_size(BYTES_MAX)}; give a shorter text")
    if not text.strip():
        raise ValueError(f"{flag} {path}: the file is empty; give a file with text")
    return text
