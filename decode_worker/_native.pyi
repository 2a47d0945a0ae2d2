"""The worker's native side: ring producer (csrc/ring) and CPU kernels (csrc/cpu). All calls release the GIL."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from decode_worker.kernels.state import HeadState

DLPack = Any  # a capsule of a tensor (torch.utils.dlpack.to_dlpack), or the tensor

RUN_DTYPE: np.dtype[np.void]  # of struct Run in csrc/core/ring.h
PULL_LINE_BYTES: int
REQUESTS_HEADER_BYTES: int  # before the tickets
BLOCK_BYTES: int  # of packs: no record straddles two
OP_GATHER: int
OP_RANGE: int
OP_STORE: int
OP_PROMOTE: int  # a hint: nothing is answered
OP_PROBE: int  # lines into the window, to test it (csrc/core/probe.h)
OP_CANCEL: int  # arg = an earlier ticket of this ring; its open runs end in ERROR/ABORTED
STATUS_NONE: int  # not terminal
STATUS_OK: int
STATUS_MISS: int
STATUS_ERROR: int
STATUS_STALE: int
STATUS_POISON: int
FAULT_INVALID_ARGUMENT: int  # why a run ended in ERROR
FAULT_NOT_FOUND: int
FAULT_RESOURCE_EXHAUSTED: int
FAULT_FAILED_PRECONDITION: int
FAULT_ABORTED: int
FAULT_INTERNAL: int
FAULT_UNAVAILABLE: int
FAULT_DATA_LOSS: int
FAULT_NAMES: dict[int, str]  # as gRPC calls them
FAULT_TAIL_FULL: int  # of a step's row
FAULT_NOT_POSTED: int
DTYPE_FLOAT32: int
DTYPE_BFLOAT16: int
DTYPE_FLOAT16: int
DTYPE_UINT8: int
DTYPE_INT8: int
DTYPE_INT4: int

class RingError(RuntimeError): ...
class NoCredit(RingError): ...  # the oldest ticket has not been consumed or collected yet
class RingTimeout(RingError): ...  # the deadline passed; the ring is poisoned and final
class RingPoisoned(RingError): ...

class RingProducer:
    """One worker thread's end of a ring. Maps both memories (completions read-only);
    the fds may be closed afterwards."""

    tickets: int
    runs_max: int
    pairs_max: int
    poisoned: bool
    in_flight: int  # tickets posted and not yet collected
    def has_room_for_hint(self) -> bool:
        """At once, and half of the ring is left to tickets that somebody waits for."""
    def __init__(self, requests_fd: int, completions_fd: int) -> None:
        """Reads the geometry from the header that the daemon wrote; RingError if magic or version differ."""
    def post(
        self,
        op: int,
        step: int,
        layer: int,
        runs: NDArray[np.void],
        pairs: NDArray[np.uint32],
        timeout_us: int = 2_000_000,
    ) -> int:
        """Posts one ticket: runs (RUN_DTYPE; first_pair counts from 0 within `pairs`), pairs uint32[n, 2] (record,
        place), each run's pairs sorted by record. Returns its sequence (from 1).

        Waits up to `timeout_us` until the daemon has consumed the ticket whose area this one takes. Raises NoCredit
        (after that, or at once if this caller has not collected that ticket), RingPoisoned, ValueError (limits)."""
    def poll(self, seq: int) -> NDArray[np.uint32]:
        """uint32[runs, 2] (status, aux) of a ticket in flight; status 0 where not done yet. Never blocks. A run's
        result, once seen, stays.

        RingPoisoned unless every result was seen before the poison; ValueError if the ticket is not in flight."""
    def wait(self, seq: int, timeout_us: int, spin_us: int = 30) -> NDArray[np.uint32]:
        """Like poll, but until every run is terminal; the ticket is then collected (its cells read). At the deadline
        poisons the ring and raises RingTimeout. Spins, then sleeps on the futex; a signal's handler may end it."""
    def round_trips(
        self,
        op: int,
        layer: int,
        runs: NDArray[np.void],
        pairs: NDArray[np.uint32],
        rounds: int,
        timeout_us: int,
        spin_us: int,
    ) -> NDArray[np.uint64]:
        """ns[rounds] from post to answer, one ticket after the other, without what Python costs. RingError: a run
        failed."""
    def begin_steps(self) -> None:
        """Of a ring that was registered as a device's (RingPoisoned, RuntimeError for another one): the device may post
        from here on. Before each launch, and again before 3/4 of the worker's wait have passed without an answer."""
    def end_steps(self) -> None:
        """The device has ended what was launched. Without it the daemon polls until it believes the mark no longer."""
    requests: NDArray[np.uint8]
    """The memory that this side writes, and `completions`, read-only: for a device that posts and waits by itself.
    Both are gone once the ring is closed; RingPoisoned then."""
    completions: NDArray[np.uint8]
    layout: dict[str, int]
    """Byte offsets in `requests` (poison, tickets, runs, pairs) and `completions` (daemon_poison, consumed, cells), and
    the strides between tickets; ticket t uses place t % tickets. Structs are those of csrc/core/ring.h."""
    def poison(self) -> None: ...
    def heartbeat_ns(self) -> int: ...
    def close(self) -> None: ...

def _levels() -> list[int]:
    """The dispatch levels that this machine has: 0 scalar, 1 AVX2, 2 AVX-512. For tests."""

def _set_level(level: int) -> None: ...

# --- CPU kernels ---
# Window memory is a writable uint8 array; lanes are addressed by byte offset. dtype: 1 float32, 2 bfloat16.

def attend(
    query: NDArray[np.float32],  # [B, H * g, d]
    window: NDArray[np.uint8],
    held: Sequence[
        tuple[  # of one or two kinds of records
            NDArray[np.uint64],  # [B, H] byte offset of place 0
            NDArray[np.int32],  # [B, H, R, 2] (first place, count), R at most 3; count 0 is skipped
            NDArray[np.int32],  # [B, H, K] places
            NDArray[np.int32],  # [B, H] how many of them count
            int,  # dtype
            int,  # record_bytes
        ]
    ],
    scale: float,
    threads: int,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Softmax attention of each query head over the records at ranges and places of its KV head.

    Returns the output [B, H * g, d], zero over nothing, and the log of the sum of exp(score) [B, H * g], -inf over
    nothing. Both are the same bits whatever `threads` is."""

def store_token(
    window: NDArray[np.uint8],
    base: NDArray[np.uint64],  # [B, H]
    place: NDArray[np.int32],  # [B, H]; -1 stores nothing
    key: NDArray[np.float32],  # [B, H, d]
    value: NDArray[np.float32],
    dtype: int,
    record_bytes: int,
) -> None: ...
def similarity(
    query: NDArray[np.float32],  # [B, H, g, d]
    label: NDArray[np.float32],  # [B, H, g, d]
    weights: NDArray[np.float32],  # [H, g]
    cos_floor: float,
) -> NDArray[np.float64]:
    """docs/qsac.md step 3, [B, H]; NaN where a norm is zero (a NaN is never above tau)."""

def hash_encode(
    x: NDArray[np.float32],  # [n, d]
    projection: NDArray[np.float32],  # [d, 256]
    centre: NDArray[np.float32],  # [d]
) -> NDArray[np.uint64]:  # [n, 4]; bit j of the 256 is bit j % 64 of word j // 64
    ...
def hash_select(
    query_codes: NDArray[np.uint64],  # [g, 4]
    codes: list[NDArray[np.uint64]],  # per pack [n, 4], in record order; packs from record 0 on without a gap
    maps: list[NDArray[np.uint16]],  # per pack [n], record -> token within the pack
    low: int,
    high: int,  # tokens [low, high) only
    k: int,
    unit: int = 1,
    threads: int = 1,
) -> NDArray[np.int32]:
    """The k units (of `unit` records in a row) of least Hamming distance, summed over g; a unit's is its nearest
    record's. Ties go to the lower token, of units of more than one record to the lower id. Sorted by id; fewer if
    there are fewer. ValueError if a pack does not hold whole units."""

PROBE_BYTES: int  # of a line
PROBE_LINES_MAX: int  # of a run

def probe_lines(seed: int, first_line: int, count: int) -> NDArray[np.uint32]:
    """What a PROBE delivers to these lines of a window: uint32[count, 16]."""

def pull_layout(window_bytes: int) -> tuple[int, int, int]:
    """The memory of a window of kind pull (csrc/core/pull.h): the byte where its lines begin, their number, all
    bytes."""

def gpu_uuid(cuda_library: str, gpu: int) -> str:
    """Of the GPU of this number: the same in every process. RuntimeError: no driver, no such GPU."""

class ImportedWindow:
    """A window in a device's memory, imported from the daemon's descriptor, which the caller keeps."""

    def __init__(self, fd: int, size_bytes: int, for_rdma: bool, cuda_library: str, gpu: int) -> None:
        """for_rdma: as it was made. RuntimeError: no driver, no such GPU, or nothing of this size."""
    address: int  # on the device, of byte 0; RuntimeError once closed
    def close(self) -> None:
        """Idempotent."""

# --- a decode step (decode_worker/kernels/base.py is the contract) over the tensors of a HeadState ---

class Step:
    def __init__(
        self,
        state: HeadState,
        select: Callable[..., NDArray[np.int32]],  # (layer, slot, head, query, low, high, k, unit) -> ids, ascending
        projection: NDArray[np.float32] | None,  # [layers, H, d, 256]: selects by hash, and never asks `select`
        rings: list[RingProducer],  # of one geometry, 8 at most, which share each ticket's runs
        window: NDArray[np.uint8],
        *,
        reuses: bool,
        keeps: bool,
        whole: bool,
        stamp: int,
        cos_floor: float,
        kinds: Sequence[
            tuple[int, int]
        ],  # (dtype, record_bytes) of the worker's records, then of packs' if another one
        scale: float,
        threads: int,
        stale_fails: bool,
        wait_us: int,
        ahead_steps: int,
        ahead_records_max: int,
    ) -> None:
        """Works in place on the tensors of `state`, which must not be replaced; ValueError for what cannot be."""
    def extend(
        self,
        slot: int,
        first: int,
        order: NDArray[np.uint16],  # [layers, H, tokens]
        codes: NDArray[Any] | None,  # uint64[layers, H, tokens, 4]
    ) -> None: ...
    def clear(self, slot: int) -> None: ...
    def begin(self, slots: DLPack, positions: DLPack, rows: int, step: int) -> None:
        """slots, positions: int32, kept until the next call."""
    def plan(self, layer: int, query: DLPack, kind: int) -> tuple[bytes, bytes]:
        """`look_up` without posting: runs (RUN_DTYPE) and pairs (uint32[n, 2])."""
    def commit(self, layer: int, statuses: NDArray[np.uint32] | None) -> None: ...
    def look_up(self, layer: int, query: DLPack, kind: int) -> None: ...
    def look_ahead(self, layer: int, query: DLPack) -> None: ...
    def plan_ahead(self, layer: int, query: DLPack) -> tuple[bytes, bytes]:
        """`look_ahead` without posting."""
    def arrive(self, layer: int, key: DLPack, value: DLPack) -> None: ...
    def append(self, layer: int, key: DLPack, value: DLPack) -> None: ...
    def await_ticket(self, layer: int) -> None: ...
    def attend(self, layer: int, query: DLPack, out: DLPack, lse: DLPack) -> None: ...
    def settle(self, timeout_us: int) -> None: ...

# --- products (csrc/cpu/products.h): tensors of torch, read and written where they are ---

class Matrix:
    def __init__(self, weights: Tensor, scales: Tensor | None = None, bias: Tensor | None = None) -> None:
        """weights: float32, bfloat16 or int8 [out, in]; scales: float32 [out], of int8 only; bias: float32 [out]."""

class ProductsLayer:
    """One layer's float32 norms and its matrices; qkv: rows of q, k, v; gate_up: rows of gate, then of up."""

    def __init__(
        self,
        *,
        attention_norm: Tensor,
        qkv: Matrix,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        output: Matrix,
        mlp_norm: Tensor,
        gate_up: Matrix,
        down: Matrix,
    ) -> None: ...

class Products:
    """decode_worker.kernels.products.Products over fixed tensors. ValueError for shapes that do not fit each other."""

    def __init__(
        self,
        *,
        embedding: Matrix,
        layers: list[ProductsLayer],
        final_norm: Tensor,
        head: Matrix,
        tokens: Tensor,
        positions: Tensor,
        query: Tensor,
        next_query: Tensor,
        key: Tensor,
        value: Tensor,
        attention: Tensor,
        logits: Tensor,
        frequencies: Tensor,  # float32, of every rotated pair
        rotation_factor: float,
        norm_eps: float,
        positions_max: int,
        threads: int,
    ) -> None: ...
    def embed(self, rows: int) -> None: ...
    def layer(self, layer: int, rows: int, speculate: bool) -> None: ...
    def peek(self, layer: int, rows: int) -> None: ...
    def finish(self, rows: int) -> None: ...
