"""An array as a sidecar's content: header, the array in NumPy's format, CRC-32 of both.

The index of a pack is [layers, heads, records, ...] and follows its records to another order. What does not go by
record, such as the labels of a session, has a header of its own and stays as it is.
"""

import io
import math
import struct
import zlib
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

MAGIC = b"HDGINDEX"
MAGIC_WITHOUT_RECORDS = b"HDGARRAY"
VERSION = 1
_HEADER = struct.Struct("<8sI32s")
_CRC = struct.Struct("<I")
_ARRAY_HEADER_MAX = 1 << 17  # of NumPy's, whose length has 16 bits
_PIECE_BYTES = 1 << 20  # of an array, that are moved while no other thread of Python runs


class IndexFormatError(ValueError):
    """A sidecar is damaged, is no index, or was made with other parameters."""


def save(parameters: bytes, data: NDArray[Any], by_record: bool = True) -> bytes:
    """`parameters`: 32-byte digest of what the array was computed with."""
    body = io.BytesIO()
    body.write(_HEADER.pack(MAGIC if by_record else MAGIC_WITHOUT_RECORDS, VERSION, parameters))
    np.save(body, data, allow_pickle=False)
    with body.getbuffer() as content:
        end = _CRC.pack(zlib.crc32(content))
    body.write(end)
    return body.getvalue()


def load(blob: bytes) -> tuple[bytes, NDArray[Any]]:
    """(parameters, the array, which is read only and lies in `blob`). IndexFormatError if it is damaged or of another
    version."""
    content, end = memoryview(blob)[: -_CRC.size], blob[-_CRC.size :]
    if len(blob) < _HEADER.size + _CRC.size or _CRC.unpack(end)[0] != zlib.crc32(content):
        raise IndexFormatError("the index sidecar is damaged: its checksum is wrong")
    magic, version, parameters = _HEADER.unpack_from(content)
    if magic not in (MAGIC, MAGIC_WITHOUT_RECORDS) or version != VERSION:
        raise IndexFormatError(f"the index sidecar has format version {version}, expected {VERSION}")
    return parameters, _array(content[_HEADER.size :])


def is_by_record(blob: bytes) -> bool:
    """Of one that `load` takes."""
    return blob.startswith(MAGIC)


def _array(content: memoryview) -> NDArray[Any]:
    """Nothing is allocated for what a header claims: whoever may write sidecars writes that."""
    file = io.BytesIO(content[:_ARRAY_HEADER_MAX])
    try:
        npy.read_magic(file)
        shape, fortran_order, dtype = npy.read_array_header_1_0(file)
        if dtype.hasobject or fortran_order or math.prod(shape) * dtype.itemsize != len(content) - file.tell():
            raise IndexFormatError("the index sidecar holds another array than its header says")
        return np.frombuffer(content, dtype, offset=file.tell()).reshape(shape)
    except IndexFormatError:
        raise
    except Exception as error:  # a parser's, of any kind, or that of a shape or dtype that no array can have
        raise IndexFormatError(f"the index sidecar holds no array: {type(error).__name__}") from None


def reordered(data: NDArray[Any], records: NDArray[np.integer[Any]]) -> NDArray[Any]:
    """`data`, [layers, heads, tokens, ...] by record, with record i taken from records[layer, head, i].

    Piece by piece: an index may have a GiB, and other threads are not to wait for all of it."""
    moved = np.empty((*records.shape, *data.shape[3:]), data.dtype)
    step = max(1, _PIECE_BYTES // max(1, math.prod(data.shape[3:]) * data.itemsize))
    for layer, head in np.ndindex(*records.shape[:2]):
        for first in range(0, records.shape[2], step):
            piece = slice(first, first + step)
            moved[layer, head, piece] = data[layer, head].take(records[layer, head, piece], axis=0)
    return moved
