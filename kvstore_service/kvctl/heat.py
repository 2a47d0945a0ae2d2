"""kvctl heat: a trace of accesses as a picture, a cell for each layer and KV head."""

import argparse
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore_service.client import AdminClient
from kvstore_service.kvctl.output import Output
from kvstore_service.shared.accesses import EXTENT_OF_RUN, joined
from kvstore_service.shared.types import StoreError

SIDE_PX = 1024  # of the picture, about, at most; a cell has 16 pixels a side, or fewer where there are many
CELL_PX = 16
CELLS_MAX = 1 << 22
COLDEST = 64  # of 765: the colour of what was wanted once
AT_ONCE = 1 << 20  # records
FIELDS = (*EXTENT_OF_RUN, "wanted", "records", "hit")


def heat(client: AdminClient | None, output: Output, arguments: argparse.Namespace) -> int:
    """Needs no daemon."""
    counts = count_extents(Path(arguments.trace), arguments.misses)
    layers, heads = counts.shape
    cell = cell_px(layers, heads)
    hottest = int(counts.argmax())
    peak = {"layer": hottest // heads, "head": hottest % heads, "extents": int(counts.max())}
    what = "extents that came from disk" if arguments.misses else "extents that runs wanted"
    legend = (
        f"{what}: layers 0 to {layers - 1} from top to bottom, KV heads 0 to {heads - 1} from left to right, "
        f"{cell}x{cell} pixels each; black 0, then red, yellow, white {peak['extents']} "
        f"(layer {peak['layer']}, head {peak['head']})"
    )
    try:
        Path(arguments.picture).write_bytes(png(picture(counts, cell), legend))
    except OSError as error:
        raise StoreError("FAILED_PRECONDITION", f"{arguments.picture}: {error.strerror}; choose another file") from None
    if output.as_json:
        shape = {"layers": layers, "heads": heads, "cell_px": cell, "extents": int(counts.sum()), "peak": peak}
        output.values("", shape)
    else:
        output.console.print(f"{arguments.picture}: {legend}", soft_wrap=True)
    return 0


def count_extents(trace: Path, misses: bool) -> NDArray[np.int64]:
    """Records of the trace by layer and lane, [layers, lanes]; with `misses` only what DRAM had not."""
    try:
        accesses = np.load(trace, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise StoreError("NOT_FOUND", f"{trace}: {error.strerror or error}; name a file of kvctl trace") from None
    except (ValueError, EOFError, zipfile.BadZipFile):
        accesses = None
    if not isinstance(accesses, np.ndarray) or accesses.ndim != 1 or not _is_of_traces(accesses.dtype):
        raise StoreError("INVALID_ARGUMENT", f"{trace} is no trace; kvctl trace writes one")
    if not len(accesses):
        raise StoreError("INVALID_ARGUMENT", f"{trace} holds no access: nothing ran while it was taken")
    layers, lanes = int(accesses["layer"].max()) + 1, int(accesses["lane"].max()) + 1
    if layers * lanes > CELLS_MAX:
        raise StoreError("INVALID_ARGUMENT", f"{trace}: {layers} layers of {lanes} heads; at most {CELLS_MAX} cells")
    counts = np.zeros(layers * lanes, np.int64)
    for first in range(0, len(accesses), AT_ONCE):
        part = joined(accesses[first : first + AT_ONCE])
        part = part[part["hit"] == 0] if misses else part
        cells = part["layer"].astype(np.int64) * lanes + part["lane"]
        counts += np.bincount(cells, minlength=len(counts))
    return counts.reshape(layers, lanes)


def _is_of_traces(fields: np.dtype[np.void]) -> bool:
    return set(FIELDS) <= set(fields.names or ()) and all(fields[name].kind == "u" for name in FIELDS)


def cell_px(layers: int, heads: int) -> int:
    return max(1, min(CELL_PX, SIDE_PX // max(layers, heads)))


def picture(counts: NDArray[np.int64], cell: int) -> NDArray[np.uint8]:
    """uint8[layers * cell, heads * cell, 3]: black is none; from red over yellow to white, by the most."""
    most = max(1, int(counts.max()))
    shade = np.where(counts > 0, COLDEST + (765 - COLDEST) * counts // most, 0)
    colours = np.stack([np.clip(shade - 255 * part, 0, 255) for part in range(3)], axis=2).astype(np.uint8)
    return colours.repeat(cell, axis=0).repeat(cell, axis=1)


def png(pixels: NDArray[np.uint8], description: str) -> bytes:
    """Of uint8[height, width, 3]; the same bytes for the same pixels."""
    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # each begins with its filter: none
    rows[:, 1:] = pixels.reshape(height, -1)

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
        + chunk(b"tEXt", b"Description\0" + description.encode("latin-1", "replace"))
        + chunk(b"IDAT", zlib.compress(rows.tobytes(), 9))
        + chunk(b"IEND", b"")
    )
