"""The worker's native side: ring producer (csrc/ring) and CPU kernels (csrc/cpu). All calls release the GIL."""

import numpy as np
from numpy.typing import NDArray

RUN_DTYPE: np.dtype[np.void]  # of struct Run in csrc/core/ring.h
OP_GATHER: int
OP_RANGE: int
OP_STORE: int
OP_PROMOTE: int  # a hint: nothing is answered
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
DTYPE_FLOAT32: int
DTYPE_BFLOAT16: int
DTYPE_FLOAT16: int
DTYPE_UINT8: int

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
    base: NDArray[np.uint64],  # [B, H] byte offset of place 0
    ranges: NDArray[np.int32],  # [B, H, R, 2] (first place, count); count 0 is skipped
    places: NDArray[np.int32],  # [B, H, K]
    counts: NDArray[np.int32],  # [B, H] how many of `places` count
    dtype: int,
    record_bytes: int,
    scale: float,
    threads: int,
) -> NDArray[np.float32]:
    """Softmax attention of each query head over the records at ranges and places of its KV head.

    Returns [B, H * g, d]."""

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
) -> NDArray[np.float32]:
    """docs/qsac.md step 3, [B, H]; NaN where a norm is zero (a NaN is never above tau)."""

def hash_encode(
    x: NDArray[np.float32],  # [n, d]
    projection: NDArray[np.float32],  # [d, 256]
    centre: NDArray[np.float32],  # [d]
) -> NDArray[np.uint64]:  # [n, 4]; bit j of the 256 is bit j % 64 of word j // 64
    ...
def hash_select(
    query_codes: NDArray[np.uint64],  # [g, 4]
    codes: list[NDArray[np.uint64]],  # per pack [n, 4], in record order
    maps: list[NDArray[np.uint16]],  # per pack [n], record -> token within the pack
    first: list[int],  # per pack, its first record = token
    low: int,
    high: int,  # tokens [low, high) only
    k: int,
) -> NDArray[np.int32]:
    """The k records of least summed Hamming distance, ties to the lower id; sorted by id; fewer if there are fewer."""

def delta(
    wanted: NDArray[np.int32],  # sorted record ids
    held: NDArray[np.int32],  # sorted record ids
    held_places: NDArray[np.int32],
    free_places: NDArray[np.int32],
) -> tuple[NDArray[np.int32], NDArray[np.uint32], int]:
    """Places of `wanted` (kept ones keep theirs, new ones take free places in order), the pairs uint32[m, 2] to fetch,
    sorted by record, and how many free places were used; used = -1 and no pairs if `free_places` does not suffice."""
