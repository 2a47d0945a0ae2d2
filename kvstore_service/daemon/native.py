"""The data plane as the daemon sees it: native classes, and the one place where native errors become StoreErrors."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from kvstore_service import _native
from kvstore_service._native import (
    ACCESS_FIELDS,
    BLOCK_BYTES,
    DEVICE_WINDOW_KINDS,
    DISK_COST,
    PACK_TOKENS_MAX,
    TIER_POLICIES,
    WINDOW_KINDS,
    DataPlane,
    PackSpec,
    RingGeometry,
    measure_disk,
    through_blocks,
)
from kvstore_service.shared import types
from kvstore_service.shared.types import BUILD_BYTES, NO_PARENT, Layout, StoreError

__all__ = [
    "ACCESS_FIELDS",
    "BLOCK_BYTES",
    "DEVICE_WINDOW_KINDS",
    "DISK_COST",
    "PACK_TOKENS_MAX",
    "PULL",
    "TIER_POLICIES",
    "WINDOW_KINDS",
    "DataPlane",
    "PackSpec",
    "RingGeometry",
    "errors",
    "file_bytes",
    "measure_disk",
    "memory_bytes",
    "pack_spec",
    "ring_geometry",
    "through_blocks",
]


PULL = "pull"  # the kind whose worker reads frames itself


@contextmanager
def errors() -> Iterator[None]:
    try:
        yield
    except _native.NativeError as error:
        raise StoreError(error.code, str(error)) from error


def pack_spec(
    pack_id: bytes, build: bytes, parent: bytes, layout: Layout, tokens: int, extent_blocks: int, record_order: int = 0
) -> PackSpec:
    kinds = [_native.KindSpec(kind.lanes, kind.d, kind.dtype, kind.record_bytes) for kind in layout.kinds]
    with errors():
        return PackSpec(
            pack_id, build, parent, layout.fingerprint, layout.layers, kinds, tokens, extent_blocks, record_order
        )


@lru_cache(maxsize=1024)
def file_bytes(layout: Layout, tokens: int, extent_blocks: int) -> int:
    """Of a pack of this shape."""
    build = bytes(BUILD_BYTES)
    return pack_spec(NO_PARENT, build, NO_PARENT, layout, tokens, extent_blocks).file_bytes


def memory_bytes(kind: str, window_bytes: int) -> int:
    """Of a window of a kind in the host's memory."""
    return _native.pull_window_bytes(window_bytes) if kind == PULL else window_bytes


def ring_geometry(ring: types.RingGeometry) -> RingGeometry:
    """INVALID_ARGUMENT for a ring that cannot be."""
    with errors():
        return RingGeometry(ring.tickets, ring.runs_max, ring.pairs_max)
