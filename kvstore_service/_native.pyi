"""The native data plane of the daemon (csrc/store, csrc/core). KV bytes are touched here and nowhere else.

Errors are `NativeError`; its `code` is the name of a gRPC status code (DATA_LOSS, INVALID_ARGUMENT,
FAILED_PRECONDITION, RESOURCE_EXHAUSTED, NOT_FOUND, UNAVAILABLE, INTERNAL), set where the error arises.
Every call releases the GIL while it waits or works; all of them may be called from any thread. A copy thread that
does not answer within 5 s is UNAVAILABLE.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES: int
HASH_BLOCK_TOKENS: int
PACK_TOKENS_MAX: int
PACK_VERSION: int
RING_VERSION: int
SAMPLED_RUNS: int  # of a segment that `run_samples` knows
SAMPLED_EVERY: int  # of so many runs one is, behind the first SAMPLED_RUNS
WINDOW_KINDS: tuple[str, ...]  # the best one first
TIER_POLICIES: tuple[str, ...]  # which frames of DRAM go; the best one first
ACCESS_FIELDS: tuple[tuple[str, str], ...]  # of an access as `drain_accesses` has it, for numpy.dtype
DEVICE_WINDOW_KINDS: tuple[str, ...]  # of those, the ones whose memory the data plane allocates on a device

class NativeError(RuntimeError):
    code: str

class KindSpec:
    """A kind of record: `record_bytes` is a multiple of 64 and at most 4096; dtype as `Dtype` in csrc/core/pack.h."""

    def __init__(self, lanes: int, d: int, dtype: int, record_bytes: int) -> None: ...
    lanes: int
    d: int
    dtype: int
    record_bytes: int

class PackSpec:
    """What a pack's header says. `pack_id`, `parent`, `fingerprint`: 32 bytes; `build`: 16 bytes.

    `tokens` is a multiple of HASH_BLOCK_TOKENS, at most PACK_TOKENS_MAX; extent_blocks is 1..16."""

    def __init__(
        self,
        pack_id: bytes,
        build: bytes,
        parent: bytes,
        fingerprint: bytes,
        layers: int,
        kinds: Sequence[KindSpec],
        tokens: int,
        extent_blocks: int,
        record_order: int = 0,
    ) -> None: ...
    pack_id: bytes
    build: bytes
    parent: bytes
    fingerprint: bytes
    layers: int
    kinds: list[KindSpec]
    tokens: int
    extent_blocks: int
    record_order: int
    file_bytes: int
    def segment_bytes(self, kind: int) -> int: ...

class RingGeometry:
    def __init__(self, tickets: int, runs_max: int, pairs_max: int) -> None: ...
    tickets: int
    runs_max: int
    pairs_max: int
    requests_bytes: int
    completions_bytes: int

def pull_window_bytes(window_bytes: int) -> int:
    """Memory of a window of kind pull (csrc/core/pull.h)."""

def crc32c(data: bytes) -> int: ...
def block_crcs(build: bytes, first_block: int, blocks: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """The checksum of each 4 KiB block as a pack's table has it; `first_block` counts from the file's start."""

def crc32c_portable(data: bytes) -> int:
    """The same without special instructions."""

def io_shim_set(rules: Sequence[tuple[str, str, int, int, int]]) -> None:
    """Only in test builds (HEADGATE_IO_SHIM): what disk calls suffer from now on, and counting starts anew.

    A rule is (site or "*", action, nth, times, value): the nth to (nth + times - 1)-th operation of the site suffers.
    fail: ends with errno `value`; shorten: transfers and reports `value` bytes; tear: transfers `value` bytes and
    reports all; delay: comes `value` microseconds later. INVALID_ARGUMENT for an unknown site or action."""

def io_shim_counts() -> dict[str, tuple[int, int]]:
    """Only in test builds: {site: (operations, of them with a fault)} since the last `io_shim_set`; every site."""

def copy_shim_set(
    stopped: bool = False,
    delay_us: int = 0,
    delay_random: bool = False,
    fail_every: int = 0,
    reorder: bool = False,
    seed: int = 0,
    only_thread: int = -1,
    dawdle_us: int = 0,
) -> None:
    """Only in test builds, for every data plane in the process: stop the copy threads' serving, or that of
    `only_thread` (no tickets, copies or heartbeats, as if the daemon were stopped; they still run commands such as
    remove_worker), delay each run before its first copy (exactly delay_us, or uniformly up to it), end every n-th run
    in ERROR/INTERNAL after half of its copies, begin the runs of a ticket in random order, dawdle up to dawdle_us while
    frames are held that are copied from."""

def alloc_shim_set(nth: int = 0, times: int = 1, strange: bool = False) -> None:
    """Only in test builds: allocations [nth, nth + times) of the copy threads, counted from now and from 1, throw
    std::bad_alloc, or with `strange` an exception that nothing expects. nth 0: none."""

def alloc_shim_count() -> int:
    """Only in test builds: allocations of the copy threads since the last `alloc_shim_set`."""

class TierPolicy:
    """One of TIER_POLICIES by itself. A frame is among its owner's, and, unless that one is alone, among everybody's
    (owner -1); each is a domain that a victim is chosen in. INVALID_ARGUMENT for another name, and for a frame
    that was not admitted."""

    def __init__(self, name: str, frames: int) -> None: ...
    def admit(self, frame: int, key: int, weight: int = 0, owner: int = 0, alone: bool = False) -> None:
        """`key` names the extent; `weight` (0..7): so many times it is passed over unused."""
    def use(self, frames: Sequence[int]) -> None: ...
    def weigh(self, frame: int, weight: int) -> None: ...
    def remove(self, frame: int) -> None: ...
    def victim(self, owner: int = -1, pinned: Sequence[int] = (), looks: int = 1024) -> int | None:
        """For a read that somebody waits for: wears down uses and weights. After `looks` the frame last passed over
        goes. None also after 1024 looks at pinned ones; the next call looks behind them."""
    def coldest(self, owner: int = -1, pinned: Sequence[int] = (), weight: int = 1) -> int | None:
        """For what nobody waits for: only a frame without use and below that weight, and nothing wears down."""

def replay(policy: str, frames: int, keys: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """For each access, by the extent's key, whether a tier of one owner, empty at first, would have had it: 0 or 1.
    INVALID_ARGUMENT for a policy that is none, or no frames."""

class FairRounds:
    """The fair rounds of a copy thread, by themselves: leaves under owners. `next` is 2**32 - 1 if none has work."""

    def add(self, owner: int) -> int:
        """A new leaf of an owner; it rests."""
    def wake(self, leaf: int) -> None: ...
    def rest(self, leaf: int) -> None: ...
    def charge(self, leaf: int, bytes: int) -> None: ...
    def next(self) -> int: ...

class Moves:
    """When a copy thread leaves its worker's core, by itself."""

    def move(self, now_ns: int) -> bool:
        """It is in the way: whether it moves now."""

DISK_COST: tuple[float, float, float]
"""Microseconds of a busy disk for a request, a KiB of it, and each piece of memory beyond its first: defaults."""

def measure_disk(directory: str) -> tuple[float, float, float]:
    """The same, by reads of an unlinked file in `directory`: some 30 ms. RESOURCE_EXHAUSTED on a full disk, UNAVAILABLE
    where a call fails, FAILED_PRECONDITION without O_DIRECT."""

def through_blocks(disk_cost: tuple[float, float, float]) -> int:
    """Blocks that cost less to read through than a second request does; at most 16."""

class DataPlane:
    """Frames, packs, rings, windows and the copy threads of one daemon."""

    def __init__(
        self,
        dram_bytes: int,
        io_depth: int,
        copy_threads: int,
        spin_us: int = 30,
        extent_blocks: int = 4,
        window: str = "shm",
        cuda_library: str = "libcuda.so.1",
        gdr_library: str = "libgdrapi.so.2",
        gpu: int = 0,
        arena_bytes: int = 0,
        tier_policy: str = "lfu",
        disk_cost: tuple[float, float, float] = ...,
        learn_bytes: int = 0,
    ) -> None:
        """Allocates frames (anonymous huge-page memory), starts `copy_threads` threads, each with its own io_uring.

        A frame holds one extent of `extent_blocks` blocks (1..16); frames are carved from `dram_bytes` (which is never
        exceeded). Packs of another extent_blocks are not opened. `window`, where windows lie, is of WINDOW_KINDS, or
        auto, all kinds that work here. `arena_bytes`, part of dram_bytes: what an owner whose workers pull gets for
        itself; 0: nobody can. FAILED_PRECONDITION for one that does not; `cuda_library`, `gdr_library` and
        `gpu` are what those in a device's memory need. `tier_policy`, what leaves DRAM first, is of TIER_POLICIES. No
        more than `through_blocks(disk_cost)` between blocks that are wanted are read through rather than make a second
        request. `learn_bytes`: most memory for samples of runs, of all open packs; 0: none are taken."""
    window_kinds: list[str]
    """What there is, the best one first."""
    windows_refused: list[tuple[str, str]]
    """Of `auto`: the kinds that do not work here, and why."""
    window_gpu: str
    """The UUID of the GPU that windows in a device's memory lie in; empty without any."""
    def window_pinned_bytes(self, kind: str) -> int:
        """The host's memory that each window of this kind holds pinned."""

    def close(self) -> None:
        """Poisons every ring, ends the threads, closes files and mappings. Idempotent."""

    # packs
    def create_upload(self, path: str, spec: PackSpec) -> int:
        """A new file at `path` (must not exist; O_DIRECT) that STORE runs of the owning worker fill.
        Returns its id (u32).

        A STORE run is OK when its blocks are written (volatile); they are durable after `finish_upload`. Kind 0 brings
        its u16 map behind the records; other kinds have none. Behind that may stand grades, `pair_count` of them: a u8
        for each block of the records, by which DRAM keeps what has just been written. INVALID_ARGUMENT for a map that
        is no permutation, and for a block of nothing but zeros: it could not be told from a lost write. The caller
        makes the directory entry durable (fsync of the directory)."""
    def upload_missing(self, upload: int) -> int:
        """Number of segments that no STORE has filled yet."""
    def finish_upload(self, upload: int) -> int:
        """Writes the checksum table, then the header, each made durable with fdatasync before the next.

        Returns 0, or the id of the pack, opened, of which DRAM holds blocks already. FAILED_PRECONDITION while a
        segment is missing. The upload ends only on success; after an error call `abort_upload`."""
    def abort_upload(self, upload: int) -> None:
        """Waits for the upload's I/O in flight, closes and unlinks its file."""
    def open_pack(self, path: str, owner: int = 0) -> int:
        """Checks header and CRC table (DATA_LOSS), opens with O_DIRECT, returns a handle (u32). Its frames count as
        those of `owner` (a uid).

        FAILED_PRECONDITION: another pack version, another extent_blocks, or a file system without O_DIRECT."""
    def close_pack(self, pack: int) -> None:
        """Drops its frames and closes it. FAILED_PRECONDITION while a slot is bound to it.

        Reads in flight keep its frames for up to 5 s of this call, and without it after that."""
    def pack_spec(self, pack: int) -> PackSpec: ...
    def copy_map(self, pack: int, to_fd: int) -> None:
        """Writes record -> token within the pack, uint16[layers, lanes, tokens], to a descriptor; verified (DATA_LOSS).
        Takes no memory that grows with the pack."""
    def verify_pack(self, pack: int) -> list[int]:
        """Reads every block from disk and returns the numbers of those whose CRC is wrong."""
    def pack_damaged(self, pack: int) -> bool:
        """Whether a gather or a read ahead has met a block that fails its check, or an early end of the file."""
    def run_samples(self, pack: int) -> NDArray[np.uint64] | None:
        """Which of the latest sampled GATHER runs wanted each record, uint64[layers, lanes of kind 0, tokens], a bit
        each, SAMPLED_RUNS of a segment; a run that comes in portions may be several. None: the pack was opened when
        samples of others took `learn_bytes`."""
    def rewrite_segment(
        self, pack: int, upload: int, kind: int, layer: int, lane: int, order: NDArray[np.uint16]
    ) -> None:
        """Reads a segment, checks it, and writes it into an upload of the same pack that no worker owns, with record
        order[i] of the source as record i, and its map likewise; of a kind other than 0, as it is, `order` is empty.

        DATA_LOSS: the source fails its check. FAILED_PRECONDITION: a block would be all zero, or the segment is there.
        RESOURCE_EXHAUSTED, UNAVAILABLE: the disk. After an error the segment is missing as before."""
    def warm(self, pack: int, hot_records: NDArray[np.uint32], owner: int = 0) -> None:
        """Hints that the first hot_records[layer, lane] records of each segment of kind 0 are likely to be wanted.

        They are read in the background into free or colder frames, weighted against eviction; returns at once. A hint
        never fails: an owner (uid; 0 is the daemon) with more than 4 MiB of them queued is not heard
        (`hints_dropped`)."""

    # workers
    def add_worker(
        self,
        window_fd: int,
        window_bytes: int,
        staging_fd: int,
        staging_bytes: int,
        slots: int,
        owner: int,
        wait_ms: int = 0,
        window: str = "",
    ) -> int:
        """Maps a worker's memory (fds are duplicated). Returns the worker's id.

        window: one of `window_kinds`, or empty for the best. One in a device's memory is made here, and needs no
        `window_fd`; RESOURCE_EXHAUSTED if the device has no more. One of kind pull has the memory of
        `pull_window_bytes`; as long as an owner has such workers its packs are cached in its arena alone.
        RESOURCE_EXHAUSTED: no arena is left, UNAVAILABLE: runs do not make room for it within 5 s.

        `owner` (u32, its uid): copy threads and disk are shared fairly by bytes among owners, then among an owner's
        workers. `wait_ms` (0: 2000) is how long the worker waits for a ticket: a run that has waited 3/4 of it ends in
        ERROR/UNAVAILABLE (GATHER since its ticket was taken, RANGE and STORE since its ring last got on)."""
    def window_descriptor(self, worker: int) -> int:
        """A new descriptor by which a worker imports its window in a device's memory, the caller's; -1 for another."""
    def arena_descriptor(self, worker: int) -> int:
        """A new descriptor of the arena of a worker that pulls, the caller's; -1 for another. It cannot be mapped for
        writing, grown or shrunk."""
    def add_ring(
        self, worker: int, requests_fd: int, completions_fd: int, geometry: RingGeometry, device: bool = False
    ) -> int:
        """Formats both headers. Returns the ring's index in the worker.

        device: one posts, which can wake nobody; the daemon polls the ring while the worker says that it steps."""
    def serve_rings(self, worker: int) -> None:
        """Gives the rings added so far to copy threads, each to the least loaded one.

        From here on one waits in the kernel for whoever gives pages of the worker's memory back, so nobody may be able
        to. After an error the worker can only be removed."""
    def remove_worker(self, worker: int) -> None:
        """Poisons its rings, unbinds, aborts its uploads. Nothing is stored into its memory any more when it returns.

        The memory is unmapped, unless the disk holds a transfer for more than a second: then after that."""
    def give_back_arenas(self) -> None:
        """Those that reads were in flight to when their owner's last worker was removed; waits a second for each."""
    def own_upload(self, worker: int, upload: int) -> None:
        """Only this worker's STORE runs may fill the upload."""
    def bind(self, worker: int, slot: int, packs: Sequence[int], windows: NDArray[np.uint64], record_bytes: int) -> int:
        """Binds a free slot to packs (record ids continue from pack to pack) and window places.

        windows: uint64[layers, lanes, 2] = (byte offset of place 0 in the window, number of places), for kind 0;
        checked against the window's size. All packs share layers, kinds and fingerprint.
        Returns the slot's new epoch (u32)."""
    def extend(self, worker: int, slot: int, pack: int) -> int:
        """Appends a pack to a bound slot (a sealed tail); its epoch stays.
        Returns the session's new number of records."""
    def unbind(self, worker: int, slot: int) -> None:
        """Returns only when no ticket or copy of the slot's epoch can still store."""

    # bounds
    @property
    def dram_quota_min(self) -> int:
        """Bytes: the least quota, eight frames."""
    def set_dram_quota(self, owner: int, bytes: int) -> None:
        """Bounds the frames of the owner's packs; 0: no bound. At its bound an owner takes the place of its own frames
        only. On return what it has above the bound is gone, but for frames that runs use: they go with those.

        INVALID_ARGUMENT below dram_quota_min."""
    def owners(self) -> dict[int, int]:
        """Frames by owner, of all that have some."""
    def moved(self) -> dict[int, int]:
        """Bytes that went to each owner's workers since the start, of all that had some."""

    # figures
    def stats(self) -> dict[str, int]:
        """Counters since the start: tickets, runs, runs_ok, runs_error, runs_stale, records_copied, bytes_copied,
        extent_hits, extent_misses, nvme_read_bytes, nvme_read_ops, nvme_write_bytes, crc_errors, frames, frames_used,
        frames_pinned (by a run or a read under way), frame_bytes, evictions, promotes_dropped, packs_open,
        uploads_open, workers, rings, bound_slots, wakes, sleeps, store_bytes, warm_bytes (read ahead by `warm`, part of
        nvme_read_bytes), seed_bytes (put into DRAM as they were written), hints_dropped (their owner had hinted too
        much), runs_late (given up at their deadline), runs_starved (waits for a frame or for planning memory), portions
        (plans made), worker_faults (unexpected exceptions; those of a ring cost its worker its registration),
        calls_late (commands that a copy thread did not end within 5 s)."""
    def census(self) -> dict[str, int]:
        """Both sides of what must add up, counted in different places: runs = runs_ended + runs_in_flight,
        blocks_landed = blocks_valid + blocks_evicted (4 KiB blocks of frames), frames_used = frames_held =
        frames_of_owners; owners_miscounted = 0."""
    def histograms(self) -> dict[str, tuple[list[int], list[int], int]]:
        """{name: (upper bounds in us, counts, sum in us)}; one count more than bounds, for what took longer.

        ticket_gather, ticket_range, ticket_store: from the moment a ticket is taken to its last cell.
        read_decode, read_bulk, read_ahead: single disk reads."""
    def trace_accesses(self, seconds: int) -> None:
        """From now on, for so many seconds, the extents that runs want are kept for `drain_accesses`.
        FAILED_PRECONDITION: somebody traces already."""
    def drain_accesses(self) -> tuple[bytes, int]:
        """(records of ACCESS_FIELDS since the last call, how many were dropped so far, because more than 131,072 were
        waiting). FAILED_PRECONDITION: nobody traces."""
    def end_accesses(self) -> None:
        """Gives back all that tracing takes. Idempotent."""
    def waits(
        self, worker: int, slot: int, lanes: int = 8
    ) -> tuple[dict[str, dict[str, int]], list[tuple[int, int, int, int, int]]]:
        """Where the time of a slot's runs went since it was bound, in all. FAILED_PRECONDITION: it is not bound.

        {"gather": ..., "range": ..., "store": of the worker's STORE runs}, each {queue_ns (from its ticket's taking
        on, for its turns), pins_ns (planning, frames, planning memory), disk_ns (its transfers, or another's read of
        the same blocks), copy_ns, commit_ns (fence, cell, wake), slowest_ns (one run, without its commit), runs,
        failed, extent_hits, extent_misses, read_bytes, moved_bytes}; and of the lanes whose runs waited longest for
        disk and frames (layer, lane, runs that did, ns in all, ns of the slowest)."""
    def drain_trace(self) -> NDArray[np.uint64]:
        """Copy times of tickets since the last call (a bounded ring of the latest 4096), uint64[n, 6]:
        (worker << 16 | ring, seq, step << 16 | layer, seen_ns, first_copy_ns or 0, done_ns), CLOCK_MONOTONIC."""
