"""A trace of accesses as a file: one structured array, with the fields that the daemon names, for numpy.load."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.lib import format as npy

from kvstore_service._proto import admin_service_pb2 as admin_pb


def write_trace(path: Path, answers: Iterable[admin_pb.TraceAccessesResponse]) -> tuple[int, int]:
    """(records written, records that the daemon has dropped). What came before an error stays in the file. OSError."""
    answers = iter(answers)
    fields = np.dtype([tuple(field) for field in json.loads(next(answers).fields)])
    size_bytes = dropped = 0
    with path.open("wb") as file:
        _begin(file, fields, 0)
        file.flush()  # whoever waits for it sees that the trace is on
        start = file.tell()
        try:
            for answer in answers:
                file.write(answer.accesses)
                size_bytes += len(answer.accesses)
                dropped = answer.dropped
        finally:
            records = size_bytes // fields.itemsize
            file.truncate(start + records * fields.itemsize)
            file.seek(0)
            _begin(file, fields, records)
    return records, dropped


def _begin(file: BinaryIO, fields: np.dtype[np.void], records: int) -> None:
    """The header, as long for any number of records."""
    descr = npy.dtype_to_descr(fields)
    npy.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": (records,)})
