"""One worker and one data plane in a process: memories, a ring, random packs, and what they should hold."""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from decode_worker import _native as worker_native
from kvstore_service import _native as store_native
from tests.support import shim_build

CANARY = 0xC5
OK, ERROR, STALE = worker_native.STATUS_OK, worker_native.STATUS_ERROR, worker_native.STATUS_STALE
INVALID_ARGUMENT, ABORTED = worker_native.FAULT_INVALID_ARGUMENT, worker_native.FAULT_ABORTED
RESOURCE_EXHAUSTED, INTERNAL = worker_native.FAULT_RESOURCE_EXHAUSTED, worker_native.FAULT_INTERNAL
UNAVAILABLE, DATA_LOSS = worker_native.FAULT_UNAVAILABLE, worker_native.FAULT_DATA_LOSS
NO_PAIRS = np.zeros((0, 2), np.uint32)
NO_GRADES = np.zeros(0, np.uint8)
WAIT_US = 20_000_000


def memfd(name: str, size: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd


def mapped(fd: int, size: int) -> NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(fd, size), np.uint8)


def run(slot: int, epoch: int, **fields: int) -> NDArray[np.void]:
    one = np.zeros(1, worker_native.RUN_DTYPE)
    one["slot"], one["slot_epoch"] = slot, epoch
    for name, value in fields.items():
        one[name] = value
    return one


def spec(
    rng: np.random.Generator,
    layers: int,
    lanes: int,
    record_bytes: int,
    tokens: int,
    extent_blocks: int = 4,
    pack_id: bytes | None = None,
    native: ModuleType = store_native,
) -> store_native.PackSpec:
    return native.PackSpec(
        pack_id=pack_id or rng.bytes(32),
        build=rng.bytes(16),
        parent=bytes(32),
        fingerprint=bytes([7]) * 32,
        layers=layers,
        kinds=[native.KindSpec(lanes, record_bytes // 4, 2, record_bytes)],
        tokens=tokens,
        extent_blocks=extent_blocks,
    )


@dataclass
class Pack:
    handle: int
    path: Path
    spec: store_native.PackSpec
    records: NDArray[np.uint8]  # [layers, lanes, tokens, record_bytes]
    map: NDArray[np.uint16]  # [layers, lanes, tokens]


@dataclass
class Rig:
    directory: Path
    dram_bytes: int = 64 << 20
    io_depth: int = 64
    copy_threads: int = 1
    spin_us: int = 30
    extent_blocks: int = 4
    window_bytes: int = 8 << 20
    staging_bytes: int = 4 << 20
    slots: int = 4
    owner: int = 1000
    wait_ms: int = WAIT_US // 1000
    window_kind: str = "shm"
    plane_windows: str = ""  # of the data plane, if others than the worker's
    window_options: dict[str, str | int] = field(default_factory=dict)  # of the data plane, for windows that need them
    disk_cost: tuple[float, float, float] = store_native.DISK_COST
    beside: Rig | None = None  # another worker of that rig's data plane
    geometry: store_native.RingGeometry = field(
        default_factory=lambda: store_native.RingGeometry(tickets=8, runs_max=64, pairs_max=1 << 16)
    )
    native: ModuleType = store_native  # the build
    tier_policy: ClassVar[str] = store_native.TIER_POLICIES[0]

    def __post_init__(self) -> None:
        if self.beside:
            self.native = self.beside.native
        shape = self.geometry
        self.geometry = self.native.RingGeometry(shape.tickets, shape.runs_max, shape.pairs_max)
        self.plane = (
            self.beside.plane
            if self.beside
            else self.native.DataPlane(
                self.dram_bytes,
                self.io_depth,
                self.copy_threads,
                self.spin_us,
                self.extent_blocks,
                self.plane_windows or self.window_kind,
                tier_policy=self.tier_policy,
                disk_cost=self.disk_cost,
                **self.window_options,
            )
        )
        on_device = self.window_kind in self.native.DEVICE_WINDOW_KINDS
        pulls = self.window_kind == "pull"
        shared_bytes = self.native.pull_window_bytes(self.window_bytes) if pulls else self.window_bytes
        self.window_fd = -1 if on_device else memfd("window", shared_bytes)
        self.staging_fd = memfd("staging", self.staging_bytes)
        self.staging = mapped(self.staging_fd, self.staging_bytes)
        self.worker = self.plane.add_worker(
            self.window_fd,
            self.window_bytes,
            self.staging_fd,
            self.staging_bytes,
            self.slots,
            self.owner,
            self.wait_ms,
            self.window_kind,
        )
        if on_device:
            self.window_fd = self.plane.window_descriptor(self.worker)
        self.fds = [self.window_fd, self.staging_fd]
        self.window = mapped(self.window_fd, self.window_bytes)
        self.window[:] = CANARY
        self.ring = self.add_ring()
        self.opened = 0

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        if self.beside:
            self.plane.remove_worker(self.worker)
        else:
            self.plane.close()
        for fd in self.fds:
            os.close(fd)

    def ring_memory(self, device: bool = False) -> tuple[int, int]:
        g = self.geometry
        requests, completions = (
            memfd("requests", g.requests_bytes),
            memfd("completions", g.completions_bytes),
        )
        self.fds += (requests, completions)
        self.plane.add_ring(self.worker, requests, completions, g, device)
        self.plane.serve_rings(self.worker)
        return requests, completions

    def add_ring(self, device: bool = False) -> worker_native.RingProducer:
        self.request_fd, self.completion_fd = self.ring_memory(device)
        return worker_native.RingProducer(self.request_fd, self.completion_fd)

    def post(self, op: int, layer: int, runs: NDArray[np.void], pairs: NDArray[np.uint32] = NO_PAIRS) -> int:
        return self.ring.post(op, 0, layer, runs, pairs, WAIT_US)

    def ask(self, op: int, layer: int, runs: NDArray[np.void], pairs: NDArray[np.uint32] = NO_PAIRS):
        """Posts and waits; returns uint32[runs, 2]."""
        return self.ring.wait(self.post(op, layer, runs, pairs), WAIT_US)

    def store(
        self, upload: int, layer: int, lane: int, records: NDArray, order: NDArray, kind: int = 0,
        grades: NDArray[np.uint8] = NO_GRADES,
    ):  # fmt: skip
        """STOREs one segment from the start of the staging memory; returns (status, aux)."""
        staged = np.concatenate([records.reshape(-1), order.view(np.uint8), grades])
        self.staging[: staged.size] = staged
        one = run(upload, 0, lane=lane, kind=kind, pair_count=grades.size)
        return tuple(self.ask(worker_native.OP_STORE, layer, one)[0])

    def make_pack(
        self,
        rng: np.random.Generator,
        layers: int = 2,
        lanes: int = 2,
        record_bytes: int = 512,
        tokens: int = 512,
        pack_id: bytes | None = None,
        grades: NDArray[np.uint8] | None = None,
    ) -> Pack:
        """A random pack, stored through the ring, finished and opened. The same `pack_id` again is another build.
        grades: [layers, lanes, blocks]."""
        self.opened += 1
        path = self.directory / f"{self.worker}-{self.opened}.pack"
        what = spec(rng, layers, lanes, record_bytes, tokens, self.extent_blocks, pack_id, self.native)
        upload = self.plane.create_upload(str(path), what)
        self.plane.own_upload(self.worker, upload)
        records = rng.integers(0, 256, (layers, lanes, tokens, record_bytes), np.uint8)
        order = rng.permuted(np.tile(np.arange(tokens, dtype=np.uint16), (layers, lanes, 1)), axis=2)
        for layer in range(layers):
            for lane in range(lanes):
                its = NO_GRADES if grades is None else grades[layer, lane]
                found = self.store(upload, layer, lane, records[layer, lane], order[layer, lane], grades=its)
                assert found == (OK, 0)
        assert self.plane.upload_missing(upload) == 0
        handle = self.plane.finish_upload(upload) or self.plane.open_pack(str(path), self.owner)
        return Pack(handle, path, what, records, order)

    def map_of(self, pack: Pack) -> NDArray[np.uint16]:
        """What the store holds as the pack's map; DATA_LOSS."""
        with open(memfd("map", 0), "w+b", buffering=0) as file:
            self.plane.copy_map(pack.handle, file.fileno())
            file.seek(0)
            return np.frombuffer(file.read(), np.uint16).reshape(pack.map.shape)

    def bind(self, slot: int, packs: list[Pack], places: int, first: int = 4096, gap: int = 4096) -> int:
        """Binds with `places` places per lane, `gap` bytes of canary between lanes; returns the epoch."""
        layers, lanes, _, record_bytes = packs[0].records.shape
        self.windows = np.zeros((layers, lanes, 2), np.uint64)
        self.windows[..., 1] = places
        stride = places * record_bytes + gap
        self.windows[..., 0] = first + np.arange(layers * lanes).reshape(layers, lanes) * stride
        return self.plane.bind(self.worker, slot, [p.handle for p in packs], self.windows, record_bytes)

    def set_faults(self, **rules: bool | int) -> None:
        """copy_shim_set, for all data planes of the build, which is a test build. Without rules: none."""
        self.native.copy_shim_set(**rules)

    def lane(self, layer: int, lane: int, record_bytes: int) -> NDArray[np.uint8]:
        """The window's places of a lane, uint8[places, record_bytes]."""
        offset, places = (int(v) for v in self.windows[layer, lane])
        return self.window[offset : offset + places * record_bytes].reshape(places, record_bytes)


@dataclass
class FaultyRig(Rig):
    """Over the test build. No faults at the start and afterwards: they hold for the whole process."""

    native: ModuleType = field(default_factory=shim_build.native)

    def __post_init__(self) -> None:
        self._forget_faults()
        super().__post_init__()

    def __exit__(self, *_: object) -> None:
        self._forget_faults()
        super().__exit__()

    def _forget_faults(self) -> None:
        self.native.io_shim_set([])
        self.native.alloc_shim_set()
        self.set_faults()


def all_records(packs: list[Pack], layer: int, lane: int) -> NDArray[np.uint8]:
    return np.concatenate([p.records[layer, lane] for p in packs])


def until(condition, seconds: float = 5.0) -> None:
    """Waits for a condition that another thread brings about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.0005)
