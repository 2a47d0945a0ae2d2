"""State: what all calls of the store share, and what holds for each of them.

Every call of a worker runs under that worker's lock and after a check that it is still there, so its release, which
takes the same lock, finds nothing half done.
"""

import logging
import resource
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging import ERROR, WARNING

from kvstore_service.daemon import native
from kvstore_service.daemon.config import Config, machine_bytes
from kvstore_service.daemon.disk.catalog import Catalog
from kvstore_service.daemon.disk.cost import Microseconds
from kvstore_service.daemon.disk.open_packs import OpenPacks
from kvstore_service.daemon.disk.uses import BATCH_ROWS
from kvstore_service.daemon.disk.verifier import Verifier
from kvstore_service.daemon.logs import event
from kvstore_service.daemon.store.dram import Dram
from kvstore_service.daemon.store.events import Events
from kvstore_service.daemon.store.eviction import Eviction
from kvstore_service.daemon.store.leases import Leases
from kvstore_service.daemon.store.lookups import Lookups
from kvstore_service.daemon.store.registry import Binding, Limits, Registry, Worker
from kvstore_service.daemon.store.room import Room
from kvstore_service.daemon.store.uploads import Uploads
from kvstore_service.shared.types import HASH_BLOCK_TOKENS, PackRef, PackRow, SidecarKey, StoreError

IDLE_PACKS_MAX = 4096
DAMAGED_LOGGED_MAX = 100  # at a start
COUNTED = (
    "commit_exists", "commits", "files_quarantined", "leftovers_removed", "lookup_damaged", "lookup_errors",
    "lookup_hits", "lookup_misses", "lookup_tokens_found", "lookups", "packs_evicted", "packs_evicted_bytes",
    "packs_evicted_operator", "packs_evicted_room", "packs_retiered", "reserve_exists", "reserve_in_progress",
    "uploads_expired", "uses_lost",
)  # fmt: skip

log = logging.getLogger("kvstored.store")


class State:
    """The parts of a running store, each thread-safe."""

    def __init__(self, config: Config, catalog: Catalog, plane: native.DataPlane, disk_cost: Microseconds) -> None:
        self.config = config
        self.disk_cost = disk_cost
        self.catalog = catalog
        self.plane = plane
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.open_packs = OpenPacks(plane, catalog, min(IDLE_PACKS_MAX, descriptors // 4))
        self.verifier = Verifier(catalog, config.verify_bytes_per_s)
        catalog.on_gone = self.open_packs.retire
        catalog.on_damaged = self._damaged
        users = len(config.allow_uids)
        self.registry = Registry(
            Limits.shared(users, config.sessions_max, config.slots_max, config.worker_bytes_max, machine_bytes())
        )
        self.events = Events()
        self.lookups = Lookups()
        self.leases = Leases(config.lease_s)
        self.ballast = catalog.ballast
        self.ballast.take_on()
        self.eviction = Eviction(catalog, self.registry, self.leases, self.ballast, self.events, self.count)
        self.dram = Dram(catalog, plane)
        self.room = Room(catalog, self.eviction, config, self._next_seals)
        self.uploads = Uploads(plane, catalog, self.open_packs, self.room, self.leases, self.ballast, config)
        self.eviction.continued = self.uploads.continues
        self.draining = threading.Event()
        self._tenant_keys: dict[str, bytes] = {}
        self._counts = Counter(dict.fromkeys(COUNTED, 0))
        self._lookups_under_way = 0
        self._counts_lock = threading.Lock()
        self._started_s = time.monotonic()
        for row, reason in catalog.damaged(DAMAGED_LOGGED_MAX):
            event(log, ERROR, "pack damaged", pack_id=row.ref.pack_id.hex(), file=row.file, reason=reason)
        self.count("leftovers_removed", catalog.removed)
        self.count("files_quarantined", catalog.quarantined)

    @contextmanager
    def acting(self, worker: Worker, new: bool = False) -> Iterator[None]:
        """A worker's call; `new` ones are refused while draining."""
        if new and self.draining.is_set():
            raise StoreError("UNAVAILABLE", "the daemon is draining", retry_after_s=5.0, reason="DRAINING")
        with worker.lock:
            if worker.gone:
                raise StoreError("UNAUTHENTICATED", "the worker's broker connection has ended", reason="TOKEN_UNKNOWN")
            yield

    def served(self, name: bytes, worker: Worker) -> PackRow | None:
        """None also for a damaged pack, which is counted: it has to be written again like one that is not there."""
        try:
            row = self.catalog.pack(name)
            if row is not None and row.tenant == worker.tenant:
                self.open_packs.check(row)
                return row
        except StoreError:
            self.count("lookup_damaged")
        return None

    def stored(self, name: bytes, worker: Worker) -> PackRow | None:
        """Like `served`, but a damaged pack too, and without a look at its file."""
        try:
            row = self.catalog.any_pack(name)
        except StoreError:
            return None
        return row if row.tenant == worker.tenant else None

    def probe(self, rows: Iterable[PackRow]) -> StoreError | None:
        """Opens each file that can be served, so that all damage that this shows is marked. The first error."""
        first = None
        for row in rows:
            try:
                if self.catalog.pack(row.ref.pack_id) is not None:
                    self.open_packs.probe(row)
            except StoreError as error:
                first = first or error
        return first

    def row(self, ref: PackRef, worker: Worker) -> PackRow:
        """The pack that a worker means: NOT_FOUND, DATA_LOSS, or FAILED_PRECONDITION for another build."""
        return self.keyed_row(SidecarKey(ref.pack_id, ref.build, ""), worker)

    def keyed_row(self, key: SidecarKey, worker: Worker) -> PackRow:
        row = self.catalog.pack(key.pack_id)
        if row is None or row.tenant != worker.tenant:
            raise StoreError("NOT_FOUND", f"pack {key.pack_id.hex()} is not stored", reason="PACK_NOT_STORED")
        if row.ref.build != key.build:
            raise StoreError(
                "FAILED_PRECONDITION",
                f"pack {key.pack_id.hex()} has build {row.ref.build.hex()}",
                reason="BUILD_DIFFERS",
            )
        self.open_packs.check(row)
        return row

    def _damaged(self, row: PackRow, reason: str) -> None:
        self.verifier.suspect(row)
        self.events.tell("damage", row.tenant, row.ref.pack_id, row.file_bytes, reason)

    def use(self, names: Sequence[bytes]) -> None:
        """The packs are used now."""
        with self._forgetting(BATCH_ROWS):
            self.catalog.uses.touch(names, time.time())

    def keep_uses(self) -> None:
        """Writes how packs were used since the last time."""
        with self._forgetting(BATCH_ROWS):
            self.catalog.uses.write()

    def weigh(self, importance: Mapping[bytes, float]) -> None:
        """From 0 to 1 by pack id."""
        with self._forgetting(len(importance)):
            self.catalog.uses.set_importance(importance)

    @contextmanager
    def _forgetting(self, packs: int) -> Iterator[None]:
        """What only orders evictions may be lost: on a full disk packs are found and hinted all the same."""
        try:
            yield
        except sqlite3.Error as error:
            self.count("uses_lost", packs)
            event(log, WARNING, "uses of packs not kept", error=error)

    def _next_seals(self) -> Counter[str]:
        """Bytes, by tenant, of the pack that each bound session may seal next."""
        sizes: Counter[str] = Counter()
        for session in self.registry.all():
            left = min(self.config.pack_tokens, session.declared_max_tokens - session.tokens)
            if session.slots and left >= HASH_BLOCK_TOKENS:
                tokens = left - left % HASH_BLOCK_TOKENS
                sizes[session.worker.tenant] += native.file_bytes(session.layout, tokens, self.config.extent_blocks)
        return sizes

    def tenant_key(self, worker: Worker) -> bytes:
        if worker.tenant not in self._tenant_keys:
            self._tenant_keys[worker.tenant] = self.catalog.tenant_key(worker.tenant)
        return self._tenant_keys[worker.tenant]

    def release_packs(self, binding: Binding) -> None:
        while binding.packs:
            self.open_packs.release(binding.packs.pop())

    def count(self, name: str, by: int = 1) -> None:
        with self._counts_lock:
            self._counts[name] += by

    def begin_lookup(self) -> None:
        with self._counts_lock:
            self._counts["lookups"] += 1
            self._lookups_under_way += 1

    def end_lookup(self, outcome: str) -> None:
        """outcome: the counter of lookups that end so."""
        with self._counts_lock:
            self._counts[outcome] += 1
            self._lookups_under_way -= 1

    def lookups_begun(self) -> tuple[int, int]:
        """As counted when they began, and by their outcomes and what is under way, at one moment."""
        with self._counts_lock:
            ended = sum(self._counts[f"lookup_{outcome}"] for outcome in ("hits", "misses", "errors"))
            return self._counts["lookups"], ended + self._lookups_under_way

    def counts(self) -> dict[str, int]:
        with self._counts_lock:
            return {**self._counts, "sidecars_dropped": self.catalog.sidecars_dropped}

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._started_s


def registered(worker: Worker) -> int:
    if worker.native_id is None:
        raise StoreError("FAILED_PRECONDITION", "register the worker's memory first", reason="NOT_REGISTERED")
    return worker.native_id


def served(worker: Worker) -> int:
    native_id = registered(worker)
    if not worker.served:
        raise StoreError(
            "FAILED_PRECONDITION",
            "the worker's rings are not served: map window, staging and requests, then call ServeRings",
            reason="RINGS_NOT_SERVED",
        )
    return native_id
