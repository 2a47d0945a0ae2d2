"""The nouns that daemon and client share: packs, layouts, sizes and errors. Imports nothing of ours but a constant."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore_service._native import HASH_BLOCK_TOKENS as HASH_BLOCK_TOKENS

PACK_ID_BYTES = 32
BUILD_BYTES = 16
FINGERPRINT_BYTES = 32
DIGEST_BYTES = 32
REASON_LETTERS_MAX = 512
NO_PARENT = bytes(PACK_ID_BYTES)
# By number: RecordOrder of proto/kvstore/v1, where each is explained.
RECORD_ORDERS = ("unspecified", "token", "pack", "cluster", "chunk", "importance", "learnt")
LEARNT = RECORD_ORDERS.index("learnt")  # the store's own, which no writer may name

_UID_END = 1 << 32
_SIZE_END = 1 << 63  # what files, SQLite and messages can count
_UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}


@dataclass(frozen=True)
class Violation:
    """One exceeded limit of a RESOURCE_EXHAUSTED error (google.rpc.QuotaFailure)."""

    subject: str
    description: str


class StoreError(Exception):
    """A refused call. `code` is the name of a gRPC status code, such as `NOT_FOUND`; `reason` tells causes apart that
    share a code, such as `DRAINING` (google.rpc.ErrorInfo), and is the code itself where there is one cause only."""

    def __init__(
        self,
        code: str,
        message: str,
        retry_after_s: float | None = None,
        violations: Sequence[Violation] = (),
        request_id: str = "",
        reason: str = "",
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.reason = reason or code
        self.message = message
        self.retry_after_s = retry_after_s
        self.violations = tuple(violations)
        self.request_id = request_id

    def __reduce__(self) -> tuple[type["StoreError"], tuple[object, ...]]:
        """Errors cross process borders (a Ray actor's calls) with all their fields."""
        return StoreError, (
            self.code, self.message, self.retry_after_s, self.violations, self.request_id, self.reason,
        )  # fmt: skip


def tenant_of(uid: int) -> str:
    return f"uid-{uid}"


def uid_of(tenant: str) -> int:
    """INVALID_ARGUMENT for what is not uid-N."""
    found = re.fullmatch(r"uid-([0-9]{1,10})", tenant)
    if found is None or int(found[1]) >= _UID_END:
        raise StoreError("INVALID_ARGUMENT", f"tenant {tenant!r}; write uid-N, N below {_UID_END}")
    return int(found[1])


@dataclass(frozen=True)
class KindSpec:
    """A kind of record; `dtype` as `Dtype` in csrc/core/pack.h (1 float32, 2 bfloat16, 3 float16)."""

    lanes: int
    d: int
    dtype: int
    record_bytes: int


@dataclass(frozen=True)
class Layout:
    """The shape that all packs of a session share. `fingerprint`: 32 bytes, the model's identity."""

    fingerprint: bytes
    layers: int
    kinds: tuple[KindSpec, ...]


@dataclass(frozen=True, slots=True)
class PackRef:
    """One committed pack as a session uses it: identity, file build and the tokens that it covers."""

    pack_id: bytes
    build: bytes
    first_token: int
    tokens: int

    @property
    def end(self) -> int:
        return self.first_token + self.tokens


@dataclass(frozen=True, slots=True)
class PackRow:
    """A committed pack."""

    ref: PackRef
    parent: bytes
    layout: Layout
    tenant: str
    file_bytes: int
    created_s: float = field(default_factory=time.time)
    record_order: int = 0

    @property
    def file(self) -> str:
        return pack_file(self.ref.pack_id, self.ref.build)


def pack_file(pack_id: bytes, build: bytes) -> str:
    """The name of a pack's file under packs/."""
    return f"{pack_id.hex()}-{build.hex()}.pack"


@dataclass(frozen=True)
class PrefixCandidate:
    """A possible pack of a prompt; `token_digest` is the worker's word for its tokens and what their KV was computed
    under (decode_worker/engine/prefix.py)."""

    first_token: int
    tokens: int
    token_digest: bytes


@dataclass(frozen=True)
class PackReservation:
    """A pack to be written. An empty `parent` continues from the reservation before it. record_order: an
    index of RECORD_ORDERS, which the store keeps and says."""

    first_token: int
    tokens: int
    token_digest: bytes
    parent: bytes = b""
    record_order: int = 0


@dataclass(frozen=True)
class ReservedPack:
    """What became of a reservation: an upload of one's own, or one of two reasons for having none.

    `exists`: the pack is stored, and `pack` is the one to attach. `retry_after_s`: another worker is writing it;
    reserve it again then, until it exists or its upload is yours."""

    pack: PackRef
    upload_id: int | None
    retry_after_s: float | None = None

    @property
    def exists(self) -> bool:
        return self.upload_id is None and self.retry_after_s is None


@dataclass(frozen=True)
class CommittedPack:
    """`pack` is what the store holds now; `exists`: another commit had won and `pack` has its build.

    `error` is set, and nothing was stored, if this item failed."""

    pack: PackRef | None
    exists: bool = False
    error: StoreError | None = None


@dataclass(frozen=True)
class SidecarKey:
    """Index data that belongs to one build of a pack. `parameters`: digest of what it depends on."""

    pack_id: bytes
    build: bytes
    kind: str
    parameters: bytes = b""


@dataclass(frozen=True)
class RingGeometry:
    """Limits of one ring: tickets in flight (a power of two), runs and pairs per ticket.

    device: one posts, which cannot wake the daemon; the worker's host marks when it may (RingProducer.begin_steps)."""

    tickets: int
    runs_max: int
    pairs_max: int
    device: bool = False


def parse_size(text: str | int) -> int:
    """Bytes from `8GiB`, `512 MB` or a plain number. ValueError says what is accepted."""
    size_bytes: float = 0
    if isinstance(text, int):
        size_bytes = text
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
        units = {unit.lower(): factor for unit, factor in _UNITS.items()}
        if match is None or match[2].lower() not in units:
            raise ValueError(f"{text!r} is no size; write a number with B, KiB, MiB, GiB, TiB, KB, MB, GB or TB")
        size_bytes = float(match[1]) * units[match[2].lower()]
    if size_bytes >= _SIZE_END:
        raise ValueError(f"{text!r} is too large; write less than {format_size(_SIZE_END)}")
    return int(size_bytes)


def format_size(size_bytes: int) -> str:
    """The shortest exact unit where there is one (`8GiB`), else two decimals (`1.50GiB`)."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = _UNITS[unit]
        if size_bytes >= factor:
            exact = size_bytes % factor == 0
            return f"{size_bytes // factor}{unit}" if exact else f"{size_bytes / factor:.2f}{unit}"
    return f"{size_bytes}B"


def printable(text: str) -> str:
    """One line for a log or a terminal: what would start another one, or tell it something, as its escape."""
    return text if text.isprintable() else "".join(x if x.isprintable() else ascii(x)[1:-1] for x in text)
