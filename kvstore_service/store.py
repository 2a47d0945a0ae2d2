"""The store: joins catalogue, sessions and the data plane. One method per call of the service.

Every call of a worker runs under that worker's lock and after a check that it is still there, so its release, which
takes the same lock, finds nothing half done.
"""

import logging
import os
import resource
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from logging import DEBUG, ERROR, INFO, WARNING

import numpy as np
from numpy.typing import NDArray

from kvstore_service import audit, memory, native, sidecars
from kvstore_service.catalog import Catalog
from kvstore_service.config import Config
from kvstore_service.logs import event
from kvstore_service.packs import OpenPacks
from kvstore_service.sessions import Binding, Session, Sessions, Worker
from kvstore_service.types import (
    FINGERPRINT_BYTES,
    NO_PARENT,
    CommittedPack,
    Layout,
    PackRef,
    PackReservation,
    PackRow,
    PrefixCandidate,
    ReservedPack,
    RingGeometry,
    SidecarKey,
    StoreError,
)
from kvstore_service.uploads import Uploads, pack_id

WORKERS_MAX = 64
RINGS_MAX = 64
IDLE_PACKS_MAX = 4096
CANDIDATES_MAX = 16384
CHAINS_MAX = 8
AUDIT_LOOKS = 4
COUNTED = (
    "commit_exists", "commits", "leftovers_removed", "lookup_damaged", "lookup_errors", "lookup_hits", "lookup_misses",
    "lookup_tokens_found", "lookups", "packs_evicted", "packs_evicted_bytes", "reserve_exists",
)  # fmt: skip
AUDIT_PAUSE_S = 0.05

log = logging.getLogger("kvstored.store")


@dataclass(frozen=True)
class Registered:
    """A worker's memory. `descriptors`, the caller's: window, staging, then (requests, completions) of each ring."""

    worker_id: int
    descriptors: list[int]


@dataclass(frozen=True)
class DescribedPack:
    """A stored pack with what an operator wants to know of it; `references`: sessions that it is attached to."""

    row: PackRow
    references: int
    sidecars: list[str]
    pinned: bool
    damaged: bool


@dataclass(frozen=True)
class EvictedPack:
    pack_id: bytes
    freed_bytes: int
    error: StoreError | None = None


class Store:
    """Thread-safe. Takes over `plane` and closes it."""

    def __init__(self, config: Config, catalog: Catalog, plane: native.DataPlane) -> None:
        self._config = config
        self._catalog = catalog
        self._plane = plane
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._packs = OpenPacks(plane, catalog, min(IDLE_PACKS_MAX, descriptors // 4))
        self._uploads = Uploads(plane, catalog, config.nvme_bytes, config.pack_tokens, config.extent_blocks)
        self.sessions = Sessions(config.sessions_max, config.slots_max, WORKERS_MAX)
        self.draining = threading.Event()
        self._tenant_keys: dict[str, bytes] = {}
        self._counts = Counter(dict.fromkeys(COUNTED, 0))
        self._counts_lock = threading.Lock()
        self._started_s = time.monotonic()
        for row in catalog.damaged.values():
            event(log, ERROR, "pack damaged", pack_id=row.ref.pack_id.hex(), file=row.file)
        for name in catalog.removed:
            event(log, WARNING, "unfinished file removed", file=name)
        self._count("leftovers_removed", len(catalog.removed))

    def close(self) -> None:
        """Releases every worker; what was committed stays."""
        for worker in self.sessions.workers():
            self.worker_gone(worker)
        self._uploads.close()
        self._plane.close()
        self._catalog.close()

    # workers

    def admit(self, uid: int, pid: int, name: str) -> Worker:
        """A new peer of the broker; its token authenticates its calls."""
        return self.sessions.add_worker(uid, pid, name)

    def register_worker(
        self, worker: Worker, slots: int, window_bytes: int, staging_bytes: int, rings: Sequence[RingGeometry]
    ) -> Registered:
        """Creates and serves the worker's memory. Completions can be written by nobody else afterwards."""
        with self._acting(worker, new=True):
            if worker.native_id is not None:
                raise StoreError(
                    "FAILED_PRECONDITION", "registered already; connect to the broker again for new memory"
                )
            _check_memory(slots, window_bytes, staging_bytes, rings)
            self.sessions.grant_slots(worker, slots)
            descriptors: list[int] = []
            try:
                descriptors.append(memory.create("kvstore-window", window_bytes))
                descriptors.append(memory.create("kvstore-staging", staging_bytes))
                with native.errors():
                    worker.native_id = self._plane.add_worker(
                        descriptors[0], window_bytes, descriptors[1], staging_bytes, slots, owner=worker.uid
                    )
                    for geometry in rings:
                        descriptors.extend(self._add_ring(worker.native_id, geometry))
                for fd in descriptors[:2]:
                    memory.add_seals(fd, memory.F_SEAL_SEAL)
            except BaseException:
                for fd in descriptors:
                    os.close(fd)
                self._forget_memory(worker)
                self.sessions.grant_slots(worker, 0)
                raise
            worker.rings = tuple(rings)
            event(log, INFO, "worker registered", name=worker.name, pid=worker.pid, worker=worker.native_id)
            return Registered(worker.native_id, descriptors)

    def _add_ring(self, native_id: int, geometry: RingGeometry) -> list[int]:
        shape = native.ring_geometry(geometry)
        requests = memory.create("kvstore-requests", shape.requests_bytes)
        try:
            completions = memory.create("kvstore-completions", shape.completions_bytes)
            try:
                self._plane.add_ring(native_id, requests, completions, shape)
                memory.add_seals(requests, memory.F_SEAL_SEAL)
                memory.add_seals(completions, memory.F_SEAL_FUTURE_WRITE | memory.F_SEAL_SEAL)
            except BaseException:
                os.close(completions)
                raise
        except BaseException:
            os.close(requests)
            raise
        return [requests, completions]

    def _forget_memory(self, worker: Worker) -> None:
        if worker.native_id is not None:
            with native.errors():
                self._plane.remove_worker(worker.native_id)
            worker.native_id = None

    def worker_gone(self, worker: Worker) -> None:
        """Frees all that a worker held. Idempotent; its token is void from the first moment."""
        self.sessions.remove_worker(worker)
        with worker.lock:
            if worker.gone:
                return
            worker.gone = True
            level = DEBUG if worker.native_id is None else INFO  # an operator's visit is worth no line
            try:
                self._forget_memory(worker)
            finally:
                self._uploads.forget(worker)
                for binding in worker.bound.values():
                    self._release(binding)
                worker.bound.clear()
                for session in list(worker.sessions.values()):
                    self.sessions.close(session)
        event(log, level, "worker released", name=worker.name, pid=worker.pid)

    # sessions

    def open_session(self, worker: Worker, layout: Layout, declared_max_tokens: int) -> Session:
        with self._acting(worker, new=True):
            if len(layout.fingerprint) != FINGERPRINT_BYTES or layout.layers < 1 or not layout.kinds:
                raise StoreError(
                    "INVALID_ARGUMENT", f"a layout has a fingerprint of {FINGERPRINT_BYTES} bytes, layers and kinds"
                )
            native.pack_spec(NO_PARENT, bytes(16), NO_PARENT, layout, 256, self._config.extent_blocks)
            return self.sessions.open(worker, layout, declared_max_tokens)

    def fork_session(self, worker: Worker, session_id: str) -> Session:
        """A session with the same packs; they are shared, not copied."""
        with self._acting(worker, new=True):
            origin = self.sessions.of(worker, session_id)
            fork = self.sessions.open(worker, origin.layout, origin.declared_max_tokens)
            self.sessions.append(fork, list(origin.packs))
            return fork

    def close_session(self, worker: Worker, session_id: str) -> None:
        with self._acting(worker):
            session = self.sessions.of(worker, session_id)
            for slot in list(session.slots):
                self._unbind(worker, slot)
            self.sessions.close(session)

    def lookup_prefix(self, worker: Worker, fingerprint: bytes, candidates: Sequence[PrefixCandidate]) -> list[PackRef]:
        """The longest chain of whole packs from token 0, over candidates that may overlap (different pack sizes)."""
        self._count("lookups")
        try:
            longest = self._longest(worker, fingerprint, candidates)
        except BaseException:
            self._count("lookup_errors")
            raise
        self._count("lookup_hits" if longest else "lookup_misses")
        return longest

    def _longest(self, worker: Worker, fingerprint: bytes, candidates: Sequence[PrefixCandidate]) -> list[PackRef]:
        if len(candidates) > CANDIDATES_MAX:
            raise StoreError("INVALID_ARGUMENT", f"{len(candidates)} candidates; at most {CANDIDATES_MAX}")
        key = self._tenant_key(worker)
        ending: defaultdict[int, list[list[PackRef]]] = defaultdict(list, {0: [[]]})
        for item in sorted(candidates, key=lambda item: item.first_token):
            for chain in ending.get(item.first_token, []):
                parent = chain[-1].pack_id if chain else NO_PARENT
                row = self._served(pack_id(key, parent, fingerprint, item.token_digest), worker)
                if row is not None and row.ref.tokens == item.tokens and len(ending[row.ref.end]) < CHAINS_MAX:
                    ending[row.ref.end].append([*chain, row.ref])
        longest = ending[max(ending)][0]
        self._count("lookup_tokens_found", longest[-1].end if longest else 0)
        return longest

    def attach(self, worker: Worker, session_id: str, refs: Sequence[PackRef]) -> int:
        """Appends committed packs to the session, and to the slots that it is bound to. Returns its tokens."""
        with self._acting(worker):
            session = self.sessions.of(worker, session_id)
            rows = [self._row(ref, worker) for ref in refs]
            self._check_chain(session, rows)
            for row in rows:
                self._append(session, row)
            return session.tokens

    def _check_chain(self, session: Session, rows: Sequence[PackRow]) -> None:
        end, parent = session.tokens, session.packs[-1].ref.pack_id if session.packs else NO_PARENT
        for row in rows:
            if (row.ref.first_token, row.parent) != (end, parent):
                raise StoreError("FAILED_PRECONDITION", f"pack {row.ref.pack_id.hex()} does not continue token {end}")
            if row.layout != session.layout:
                raise StoreError("FAILED_PRECONDITION", f"pack {row.ref.pack_id.hex()} has another layout")
            end, parent = row.ref.end, row.ref.pack_id
        if end > session.declared_max_tokens:
            raise StoreError("FAILED_PRECONDITION", f"{end} tokens; the session declared {session.declared_max_tokens}")

    def _append(self, session: Session, row: PackRow) -> None:
        worker = session.worker
        self.sessions.append(session, [row])
        try:
            self._row(row.ref, worker)  # it may have been evicted just before
            for slot in sorted(session.slots):
                handle = self._packs.acquire(row)
                try:
                    with native.errors():
                        self._plane.extend(_registered(worker), slot, handle)
                except BaseException:
                    self._packs.release(row)
                    raise
                worker.bound[slot].packs.append(row)
        except BaseException:
            self.sessions.retract(session)
            raise

    # slots

    def bind(
        self, worker: Worker, session_id: str, slot: int, refs: Sequence[PackRef], windows: NDArray[np.uint64]
    ) -> Binding:
        """Binds a slot to the session's packs; `refs` is the list that the worker's index was built from.

        windows: uint64[layers * lanes, 2] = (byte offset of place 0, places)."""
        with self._acting(worker):
            session = self.sessions.of(worker, session_id)
            kind = session.layout.kinds[0]
            if [(ref.pack_id, ref.build) for ref in refs] != [
                (row.ref.pack_id, row.ref.build) for row in session.packs
            ]:
                raise StoreError("FAILED_PRECONDITION", "the list of packs is not the session's; load its maps again")
            if windows.shape != (session.layout.layers * kind.lanes, 2):
                raise StoreError("INVALID_ARGUMENT", f"{len(windows)} windows; one per layer and lane is needed")
            if slot in worker.bound:
                raise StoreError("FAILED_PRECONDITION", f"slot {slot} is bound; unbind it first")
            binding = Binding(session, [], 0)
            try:
                handles = []
                for row in session.packs:
                    handles.append(self._packs.acquire(row))
                    binding.packs.append(row)
                shaped = windows.reshape(session.layout.layers, kind.lanes, 2)
                with native.errors():
                    binding.epoch = self._plane.bind(_registered(worker), slot, handles, shaped, kind.record_bytes)
            except BaseException:
                self._release(binding)
                raise
            worker.bound[slot] = binding
            session.slots.add(slot)
            return binding

    def unbind(self, worker: Worker, slot: int) -> None:
        """Returns when nothing of the slot's epoch can store any more."""
        with self._acting(worker):
            self._unbind(worker, slot)

    def _unbind(self, worker: Worker, slot: int) -> None:
        if slot not in worker.bound:
            raise StoreError("NOT_FOUND", f"slot {slot} is not bound")
        with native.errors():
            self._plane.unbind(_registered(worker), slot)
        binding = worker.bound.pop(slot)
        binding.session.slots.discard(slot)
        self._release(binding)

    def _release(self, binding: Binding) -> None:
        while binding.packs:
            self._packs.release(binding.packs.pop())

    # packs

    def reserve(self, worker: Worker, session_id: str, items: Sequence[PackReservation]) -> list[ReservedPack]:
        with self._acting(worker, new=True):
            _registered(worker)
            session = self.sessions.of(worker, session_id)
            reserved = self._uploads.reserve(session, items, self._tenant_key(worker))
            self._count("reserve_exists", sum(pack.exists for pack in reserved))
            return reserved

    def commit(self, worker: Worker, session_id: str, upload_ids: Sequence[int]) -> list[CommittedPack]:
        """Durable on return; per item an error, the commit, or the winner of an earlier one."""
        with self._acting(worker):
            self.sessions.of(worker, session_id)
            committed = self._uploads.commit(worker, upload_ids)
            self._count("commit_exists", sum(item.exists for item in committed))
            self._count("commits", sum(item.error is None and not item.exists for item in committed))
            return committed

    def abort(self, worker: Worker, upload_ids: Sequence[int]) -> None:
        with self._acting(worker):
            self._uploads.abort(worker, upload_ids)

    def seal_tail(self, worker: Worker, session_id: str, upload_id: int) -> Session:
        """Commits the pack of the oldest tail tokens and appends what the store then holds to session and slots.

        If another commit won, that is the winner's build: the worker loads its map before it selects from it."""
        with self._acting(worker):
            session = self.sessions.of(worker, session_id)
            row = self._uploads.row(worker, upload_id)
            self._check_chain(session, [row])
            (sealed,) = self.commit(worker, session_id, [upload_id])
            if sealed.error is not None:
                raise sealed.error
            assert sealed.pack is not None
            self._append(session, self._row(sealed.pack, worker))
            return session

    def hint_importance(self, worker: Worker, session_id: str, hints: Sequence[tuple[PackRef, Sequence[int]]]) -> None:
        """Reads ahead the records at the front of each segment, [layers * lanes] counts per pack."""
        with self._acting(worker):
            layout = self.sessions.of(worker, session_id).layout
            shape = (layout.layers, layout.kinds[0].lanes)
            for ref, hot_records in hints:
                row = self._row(ref, worker)
                if row.layout != layout or len(hot_records) != shape[0] * shape[1]:
                    raise StoreError("INVALID_ARGUMENT", f"hot_records has one count per layer and lane, {shape}")
                with self._packs.using(row) as handle, native.errors():
                    self._plane.warm(handle, np.array(hot_records, np.uint32).reshape(shape), worker.uid)

    def put_sidecar(self, worker: Worker, key: SidecarKey, content: bytes) -> None:
        with self._acting(worker):
            self._keyed_row(key, worker)
            if len(content) > sidecars.SIDECAR_BYTES_MAX or not key.kind or key.kind == "map":
                raise StoreError(
                    "INVALID_ARGUMENT", f"a sidecar has a kind other than map and at most 1 GiB: {key.kind!r}"
                )
            size_bytes = sidecars.file_bytes(len(content))
            self._uploads.promise(size_bytes)
            try:
                sidecars.write(self._catalog, key, content)
            finally:
                self._uploads.unpromise(size_bytes)

    def get_sidecar(self, worker: Worker, key: SidecarKey) -> bytes:
        """NOT_FOUND if nobody has put it. Kind "map": the pack's record -> token map, u16[layers, lanes, tokens]."""
        row = self._keyed_row(key, worker)
        if key.kind != "map":
            return sidecars.read(self._catalog, key)
        with self._packs.using(row) as handle, native.errors():
            return np.ascontiguousarray(self._plane.read_map(handle)).tobytes()

    def map_shape(self, name: bytes) -> tuple[int, int, int]:
        row = self._catalog.any_pack(name)
        return row.layout.layers, row.layout.kinds[0].lanes, row.ref.tokens

    # operation

    def drain(self) -> None:
        """Refuses new work from now on; what is open goes on."""
        self.draining.set()

    def pin(self, pack_ids: Sequence[bytes], pinned: bool) -> None:
        """All or none. NOT_FOUND."""
        self._catalog.pin(pack_ids, pinned)

    def evict(self, pack_ids: Sequence[bytes], descendants: bool) -> list[EvictedPack]:
        """Removes each pack as a whole or says why not; packs go before those that they continue."""
        rows: dict[bytes, PackRow] = {}
        results: list[EvictedPack] = []
        for name in dict.fromkeys(pack_ids):
            try:
                rows[name] = self._catalog.any_pack(name)
            except StoreError as error:
                results.append(EvictedPack(name, 0, error))
                continue
            if descendants:
                rows.update((row.ref.pack_id, row) for row in self._catalog.descendants(name))
        for row in sorted(rows.values(), key=lambda row: -row.ref.first_token):
            try:
                results.append(EvictedPack(row.ref.pack_id, self._evict(row)))
            except StoreError as error:
                results.append(EvictedPack(row.ref.pack_id, 0, error))
        return results

    def _evict(self, row: PackRow) -> int:
        with self.sessions.condemned(row.ref.pack_id):
            freed_bytes = self._catalog.remove_pack(row)
            self._packs.retire(row)
        self._count("packs_evicted")
        self._count("packs_evicted_bytes", freed_bytes)
        event(log, INFO, "pack evicted", pack_id=row.ref.pack_id.hex(), bytes=freed_bytes)
        return freed_bytes

    def audit(self) -> list[audit.Check]:
        """Compares what must be equal; see `kvstore_service.audit`."""
        parts = audit.Audited(self._catalog, self._uploads, self._packs, self.sessions, self._plane, self._called)
        return audit.read(parts, AUDIT_LOOKS, lambda: time.sleep(AUDIT_PAUSE_S))

    def _called(self) -> dict[str, int]:
        with self._counts_lock:
            return dict(self._counts)

    def packs_to_verify(self, pack_ids: Sequence[bytes]) -> list[PackRow]:
        """The packs named, or all; NOT_FOUND."""
        return [self._catalog.any_pack(name) for name in pack_ids] if pack_ids else self._catalog.packs()

    def verify(self, row: PackRow) -> tuple[list[int], str]:
        """Reads every block of the pack from disk: (bad blocks, error). A pack with either is served no more."""
        try:
            with self._packs.using(row) as handle, native.errors():
                bad_blocks = self._plane.verify_pack(handle)
        except StoreError as error:
            return [], error.message
        if bad_blocks:
            self._catalog.mark_damaged(row, f"{len(bad_blocks)} bad blocks")
        return bad_blocks, ""

    def counters(self) -> dict[str, int]:
        """Of the data plane and of the store, since the start."""
        packs, pack_bytes, stored_bytes = self._catalog.totals()
        gauges = {
            "packs": packs,
            "pack_bytes": pack_bytes,
            "stored_bytes": stored_bytes,
            "packs_damaged": len(self._catalog.damaged),
            "uploads_reserved": self._uploads.open_count(),
            "sessions": len(self.sessions.all()),
            "draining": int(self.draining.is_set()),
        }
        return {**self._plane.stats(), **self._called(), **gauges}

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._started_s

    def packs(self, after: bytes, limit: int) -> list[DescribedPack]:
        """In the order of ids."""
        return [self.described(row) for row in self._catalog.packs(after, limit)]

    def described(self, row: PackRow) -> DescribedPack:
        name = row.ref.pack_id
        return DescribedPack(
            row, self.sessions.references(name), self._catalog.sidecar_kinds(name),
            self._catalog.is_pinned(name), name in self._catalog.damaged,
        )  # fmt: skip

    @contextmanager
    def _acting(self, worker: Worker, new: bool = False) -> Iterator[None]:
        """A worker's call; `new` ones are refused while draining."""
        if new and self.draining.is_set():
            raise StoreError("UNAVAILABLE", "the daemon is draining", retry_after_s=5.0)
        with worker.lock:
            if worker.gone:
                raise StoreError("UNAUTHENTICATED", "the worker's broker connection has ended")
            yield

    def _served(self, name: bytes, worker: Worker) -> PackRow | None:
        """None also for a damaged pack, which is counted: it has to be written again like one that is not there."""
        try:
            row = self._catalog.pack(name)
            if row is not None and row.tenant == worker.tenant:
                self._packs.check(row)
                return row
        except StoreError:
            self._count("lookup_damaged")
        return None

    def _row(self, ref: PackRef, worker: Worker) -> PackRow:
        """The pack that a worker means: NOT_FOUND, DATA_LOSS, or FAILED_PRECONDITION for another build."""
        return self._keyed_row(SidecarKey(ref.pack_id, ref.build, ""), worker)

    def _keyed_row(self, key: SidecarKey, worker: Worker) -> PackRow:
        row = self._catalog.pack(key.pack_id)
        if row is None or row.tenant != worker.tenant:
            raise StoreError("NOT_FOUND", f"pack {key.pack_id.hex()} is not stored")
        if row.ref.build != key.build:
            raise StoreError("FAILED_PRECONDITION", f"pack {key.pack_id.hex()} has build {row.ref.build.hex()}")
        self._packs.check(row)
        return row

    def _tenant_key(self, worker: Worker) -> bytes:
        if worker.tenant not in self._tenant_keys:
            self._tenant_keys[worker.tenant] = self._catalog.tenant_key(worker.tenant)
        return self._tenant_keys[worker.tenant]

    def _count(self, name: str, by: int = 1) -> None:
        with self._counts_lock:
            self._counts[name] += by


def _registered(worker: Worker) -> int:
    if worker.native_id is None:
        raise StoreError("FAILED_PRECONDITION", "register the worker's memory first")
    return worker.native_id


def _check_memory(slots: int, window_bytes: int, staging_bytes: int, rings: Sequence[RingGeometry]) -> None:
    if slots < 1 or window_bytes < 1 or staging_bytes < 1 or not 1 <= len(rings) <= RINGS_MAX:
        raise StoreError(
            "INVALID_ARGUMENT", f"a worker has slots, window and staging bytes, and 1 to {RINGS_MAX} rings"
        )
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    shapes = [native.ring_geometry(ring) for ring in rings]
    ring_bytes = sum(shape.requests_bytes + shape.completions_bytes for shape in shapes)
    if window_bytes + staging_bytes + ring_bytes > machine_bytes:
        raise StoreError(
            "RESOURCE_EXHAUSTED", f"window, staging and rings exceed the machine's {machine_bytes} B of memory"
        )
