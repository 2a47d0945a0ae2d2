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


class IndexFormatError(ValueError):
    """A sidecar is damaged, is no index, or was made with other parameters."""


def save(parameters: bytes, data: NDArray[Any], by_record: bool = True) -> bytes:
    """`parameters`: 32-byte digest of what the array was computed with."""
    body = io.BytesIO()
    body.write(_HEADER.pack(MAGIC if by_record else MAGIC_WITHOUT_RECORDS, VERSION, parameters))
    np.save(body, data, allow_pickle=False)
    content = body.getvalue()
    return content + _CRC.pack(zlib.crc32(content))


def load(blob: bytes) -> tuple[bytes, NDArray[Any]]:
    """(parameters, the array, which is read only). IndexFormatError if it is damaged or of another version."""
    content, end = blob[: -_CRC.size], blob[-_CRC.size :]
    if len(blob) < _HEADER.size + _CRC.size or _CRC.unpack(end)[0] != zlib.crc32(content):
        raise IndexFormatError("the index sidecar is damaged: its checksum is wrong")
    magic, version, parameters = _HEADER.unpack_from(content)
    if magic not in (MAGIC, MAGIC_WITHOUT_RECORDS) or version != VERSION:
        raise IndexFormatError(f"the index sidecar has format version {version}, expected {VERSION}")
    return parameters, _array(content[_HEADER.size :])


def is_by_record(blob: bytes) -> bool:
    """Of one that `load` takes."""
    return blob.startswith(MAGIC)


def _array(content: bytes) -> NDArray[Any]:
    """Nothing is allocated for what a header claims: whoever may write sidecars writes that."""
    file = io.BytesIO(content)
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
    """`data`, [layers, heads, tokens, ...] by record, with record i taken from records[layer, head, i]."""
    layers, heads = np.ogrid[: records.shape[0], : records.shape[1]]
    return data[layers[..., None], heads[..., None], records]
