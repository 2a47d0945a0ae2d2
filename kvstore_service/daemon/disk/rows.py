"""What the catalogue's rows say, and how they lie in its columns."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvstore_service.shared.types import KindSpec, Layout, PackRef, PackRow, SidecarKey

PACK_COLUMNS = (
    "pack_id, build, parent, fingerprint, tenant, first_token, tokens, layers, kinds, file_bytes, created_s, "
    "record_order"
)
LISTED_COLUMNS = f"{PACK_COLUMNS}, pinned_until_s, damage, last_used_s, importance"
SIDECAR_COLUMNS = "pack_id, build, kind, parameters, file, file_bytes"


@dataclass(frozen=True)
class SidecarRow:
    key: SidecarKey
    file: str
    file_bytes: int


@dataclass(frozen=True)
class Totals:
    """Of one tenant or of all: how many packs, how many of them are damaged, and bytes."""

    packs: int = 0
    pack_bytes: int = 0
    sidecar_bytes: int = 0
    damaged: int = 0

    @property
    def stored_bytes(self) -> int:
        return self.pack_bytes + self.sidecar_bytes


@dataclass(frozen=True)
class Quota:
    """What a tenant may hold; None: no limit of its own."""

    nvme_bytes: int | None = None
    dram_bytes: int | None = None


@dataclass(frozen=True)
class Victim:
    """A pack that may go. `keep_s` orders victims: last use, put off by importance."""

    row: PackRow
    keep_s: float


@dataclass(frozen=True)
class PackFilter:
    """Which packs a listing shows; None: whatever. `used_before_s`: seconds since the epoch."""

    tenant: str | None = None
    damaged: bool | None = None
    pinned: bool | None = None
    used_before_s: float | None = None

    def passes(self, pack: "ListedPack") -> bool:
        return (
            self.tenant in (None, pack.row.tenant)
            and self.damaged in (None, pack.damaged)
            and self.pinned in (None, pack.pinned)
            and (self.used_before_s is None or pack.last_used_s < self.used_before_s)
        )


@dataclass(frozen=True)
class ListedPack:
    row: PackRow
    sidecars: tuple[str, ...]
    pinned: bool
    damaged: bool
    last_used_s: float
    importance: float


def pack_values(row: PackRow) -> tuple[bytes | str | int | float, ...]:
    kinds = json.dumps([[kind.lanes, kind.d, kind.dtype, kind.record_bytes] for kind in row.layout.kinds])
    return (
        row.ref.pack_id, row.ref.build, row.parent, row.layout.fingerprint, row.tenant, row.ref.first_token,
        row.ref.tokens, row.layout.layers, kinds, row.file_bytes, row.created_s,
        row.record_order,
    )  # fmt: skip


def pack_row(values: Sequence[Any]) -> PackRow:
    """From the values of `PACK_COLUMNS`."""
    pack_id, build, parent, fingerprint, tenant, first, tokens, layers, kinds, file_bytes, created_s, order = values
    ref = PackRef(pack_id, build, first, tokens)
    return PackRow(ref, parent, _layout(fingerprint, layers, kinds), sys.intern(tenant), file_bytes, created_s, order)


@lru_cache(maxsize=256)
def _layout(fingerprint: bytes, layers: int, kinds: str) -> Layout:
    return Layout(fingerprint, layers, tuple(KindSpec(*kind) for kind in json.loads(kinds)))
