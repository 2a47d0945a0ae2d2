"""Operation: what an operator sees and does, over all tenants."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from kvstore_service.daemon import native
from kvstore_service.daemon.disk.rows import ListedPack, PackFilter, Quota
from kvstore_service.daemon.disk.uses import FOREVER_S
from kvstore_service.daemon.store import audit
from kvstore_service.daemon.store.dram import DramUse
from kvstore_service.daemon.store.eviction import BATCH, BATCH_BYTES, Outcome, enough
from kvstore_service.daemon.store.registry import NO_WORKERS, Worker
from kvstore_service.daemon.store.retier import Retier, Retiered
from kvstore_service.daemon.store.room import Bound
from kvstore_service.daemon.store.state import State
from kvstore_service.daemon.store.uploads import DescribedUpload
from kvstore_service.shared.types import PACK_ID_BYTES, PackRow, StoreError, uid_of

AUDIT_LOOKS = 4
AUDIT_PAUSE_S = 0.05
TRACE_S_MAX = 3600.0
TRACE_TURN_S = 0.1


@dataclass(frozen=True)
class DescribedPack:
    """A stored pack with what an operator wants to know of it; `references`: sessions that it is attached to."""

    row: PackRow
    references: int
    sidecars: list[str]
    pinned: bool
    damaged: bool
    last_used_s: float


@dataclass(frozen=True)
class EvictedPack:
    pack_id: bytes
    freed_bytes: int
    error: StoreError | None = None


@dataclass(frozen=True)
class TenantUse:
    """What a tenant has of both tiers and how much it may; `room` None: nothing on disk and no bound on it."""

    tenant: str
    room: Bound | None
    dram: DramUse


class Operation:
    """Pins, evicts, verifies, audits, counts."""

    def __init__(self, state: State, retier: Retier) -> None:
        self._state = state
        self._retier = retier
        self._setting_quotas = threading.Lock()

    def drain(self) -> None:
        """Refuses new work from now on; what is open goes on."""
        self._state.draining.set()
        self._state.events.tell("drain", detail=f"{len(self._state.registry.all())} sessions open")

    def pin(self, pack_ids: Sequence[bytes], pinned: bool, ttl_s: float = 0.0) -> None:
        """All or none, for `ttl_s` seconds or, with 0, until they are unpinned. NOT_FOUND."""
        if not 0 <= ttl_s < math.inf:
            raise StoreError("INVALID_ARGUMENT", f"ttl_s {ttl_s}: seconds, or 0 for ever")
        self._state.catalog.uses.pin(pack_ids, pinned, time.time() + ttl_s if ttl_s else FOREVER_S)

    @contextmanager
    def accesses(self, seconds: float) -> Iterator[Iterator[tuple[bytes, int]]]:
        """(records of native.ACCESS_FIELDS, how many are dropped so far) turn by turn, of what runs want from now on.
        INVALID_ARGUMENT; FAILED_PRECONDITION if another one listens."""
        if not 0 < seconds <= TRACE_S_MAX:
            raise StoreError("INVALID_ARGUMENT", f"seconds {seconds}: above 0, at most {TRACE_S_MAX:g}")
        plane = self._state.plane
        with native.errors():
            plane.trace_accesses(math.ceil(seconds))
        try:
            yield self._access_turns(time.monotonic() + seconds)
        finally:
            plane.end_accesses()

    def _access_turns(self, end_s: float) -> Iterator[tuple[bytes, int]]:
        while (left_s := end_s - time.monotonic()) > 0:
            time.sleep(min(left_s, TRACE_TURN_S))
            with native.errors():
                drained = self._state.plane.drain_accesses()
            yield drained

    def to_evict(self, pack_ids: Sequence[bytes], descendants: bool, require_active: Callable[[], None]) -> list[bytes]:
        """The packs named, once each, and with `descendants` those that continue them; packs come before those that
        they continue. `require_active` raises once nobody waits for it."""
        first_tokens: dict[bytes, int] = {}
        for name in pack_ids:
            with suppress(StoreError):  # `evict` says so
                first_tokens[name] = self._state.catalog.any_pack(name).ref.first_token
            for row in self._state.catalog.descendants(name) if descendants else ():
                require_active()
                first_tokens[row.ref.pack_id] = row.ref.first_token
        unknown = [name for name in dict.fromkeys(pack_ids) if name not in first_tokens]
        return unknown + sorted(first_tokens, key=lambda name: -first_tokens[name])

    def evict(self, pack_ids: Sequence[bytes]) -> Iterator[list[EvictedPack]]:
        """Removes packs, in the order of `to_evict`, each as a whole, or says why not; a step at a time, at the end of
        which everything that was said is done."""
        for first in range(0, len(pack_ids), BATCH):
            rows: list[PackRow] = []
            missing: list[EvictedPack] = []
            for name in pack_ids[first : first + BATCH]:
                try:
                    rows.append(self._state.catalog.any_pack(name))
                except StoreError as error:
                    missing.append(EvictedPack(name, 0, error))
            if missing:
                yield missing
            while rows:
                step = enough(rows, BATCH_BYTES)
                del rows[: len(step)]
                yield [_evicted(*pair) for pair in zip(step, self._state.eviction.evict(step, "operator"), strict=True)]

    def audit(self) -> list[audit.Check]:
        """Compares what must be equal; see `kvstore_service.daemon.store.audit`."""
        state = self._state
        parts = audit.Audited(
            state.catalog, state.uploads, state.open_packs, state.registry, state.plane, state.lookups_begun,
            lambda: self._retier.under_way,
        )  # fmt: skip
        return audit.read(parts, AUDIT_LOOKS, lambda: time.sleep(AUDIT_PAUSE_S))

    def packs_named_or_all(self, pack_ids: Sequence[bytes]) -> tuple[int, Iterator[PackRow]]:
        """The packs named, or all, and how many that are; NOT_FOUND."""
        if pack_ids:
            return len(pack_ids), iter([self._state.catalog.any_pack(name) for name in pack_ids])
        return self._state.catalog.totals().packs, self._state.catalog.listing.every_pack()

    def verify(self, row: PackRow) -> tuple[list[int], str]:
        """Reads every block of the pack from disk, and its sidecars: (bad blocks, error). A pack whose bytes are not
        what was committed is served no more, a sidecar goes."""
        return self._state.verifier.verify(row)

    def retier(self, row: PackRow, dry_run: bool) -> Retiered:
        """Rewrites the pack in an order that is learnt from its use, or says why not; waits until that is done."""
        return self._retier.retier(row, dry_run)

    def counters(self) -> dict[str, int]:
        """Of the data plane and of the store, since the start."""
        totals = self._state.catalog.totals()
        gauges = {
            "packs": totals.packs,
            "pack_bytes": totals.pack_bytes,
            "stored_bytes": totals.stored_bytes,
            "packs_damaged": totals.damaged,
            "uploads_reserved": self._state.uploads.open_count(),
            "sessions": len(self._state.registry.all()),
            "events_dropped": self._state.events.dropped(),
            "draining": int(self._state.draining.is_set()),
        }
        return {**self._state.plane.stats(), **self._state.counts(), **gauges}

    def users(self) -> dict[int, dict[str, int]]:
        """What each user id holds; {name: value} for all names of `registry.users`, dram_bytes and stored_bytes."""
        users = self._state.registry.users()
        stored = {uid_of(name): totals.stored_bytes for name, totals in self._state.catalog.totals_by_tenant().items()}
        dram = {uid_of(name): use.used_bytes for name, use in self._state.dram.uses().items()}
        return {
            uid: {
                **users.get(uid, NO_WORKERS),
                "user_dram_bytes": dram.get(uid, 0),
                "user_stored_bytes": stored.get(uid, 0),
            }
            for uid in {*users, *stored, *dram}
        }

    def packs(
        self, wanted: PackFilter, unused: bool, after: bytes, limit: int
    ) -> tuple[list[DescribedPack], bytes | None]:
        """In the order of ids, and where the next page begins. `unused`: attached to no session and not pinned."""
        listed, following = self._state.catalog.listing.page(wanted, after, limit)
        described = [self._described(item) for item in listed]
        return [item for item in described if not (unused and (item.references or item.pinned))], following

    def named(self, pack_ids: Sequence[bytes]) -> list[DescribedPack]:
        """Those of them that are stored."""
        found = []
        for name in pack_ids:
            with suppress(StoreError):
                found.append(self._described(self._state.catalog.listing.listed(name)))
        return found

    def beginning(self, text: str, limit: int) -> list[DescribedPack]:
        """Packs whose id begins so, in hex digits."""
        return [self.described(row) for row in beginning(self._state, text, limit)]

    def set_quota(self, tenant: str, nvme_bytes: int | None, dram_bytes: int | None) -> None:
        """0: none; None: as it is. Durable on return, and what is above a DRAM quota is gone. INVALID_ARGUMENT."""
        uid_of(tenant)
        self._state.dram.check(dram_bytes or 0)
        with self._setting_quotas:
            before = self._state.catalog.quotas().get(tenant, Quota())
            nvme = before.nvme_bytes if nvme_bytes is None else nvme_bytes or None
            dram = before.dram_bytes if dram_bytes is None else dram_bytes or None
            self._state.catalog.set_quota(tenant, Quota(nvme, dram))
            self._state.room.set_quota(tenant, nvme or 0)
            self._state.dram.set_quota(tenant, dram or 0)
        self._state.events.tell("quota", tenant, size_bytes=nvme or 0, detail=f"DRAM {dram or 'unbounded'}")

    def quotas(self) -> list[TenantUse]:
        """Of every tenant that stores, has set aside, holds frames or is bounded."""
        room = {bound.tenant or "": bound for bound in self._state.room.bounds()}
        dram = self._state.dram.uses()
        return [TenantUse(tenant, room.get(tenant), dram.get(tenant, DramUse())) for tenant in sorted({*room, *dram})]

    def workers(self) -> list[Worker]:
        return self._state.registry.workers()

    def find_worker(self, text: str) -> Worker:
        """By its id or, if nobody has that, its pid, or its name: what it calls itself hides nobody else. NOT_FOUND, or
        FAILED_PRECONDITION if several are meant."""
        workers = self.workers()
        found: list[Worker] = []
        for name_of in (lambda w: str(w.native_id or ""), lambda w: str(w.pid), lambda w: w.name):
            found = found or [worker for worker in workers if text and name_of(worker) == text]
        if not found:
            raise StoreError("NOT_FOUND", f"no worker has the id, pid or name {text!r}; see kvctl workers")
        if len(found) > 1:
            names = ", ".join(f"{worker.native_id or 'none'} (pid {worker.pid})" for worker in found)
            raise StoreError(
                "FAILED_PRECONDITION", f"{len(found)} workers are called {text!r}; name one by id: {names}"
            )
        return found[0]

    def uploads(self) -> list[DescribedUpload]:
        return self._state.uploads.described()

    def described(self, row: PackRow) -> DescribedPack:
        return self._described(self._state.catalog.listing.listed(row.ref.pack_id))

    def _described(self, item: ListedPack) -> DescribedPack:
        references = self._state.registry.references(item.row.ref.pack_id)
        return DescribedPack(item.row, references, list(item.sidecars), item.pinned, item.damaged, item.last_used_s)


def _evicted(row: PackRow, outcome: Outcome) -> EvictedPack:
    name = row.ref.pack_id
    return EvictedPack(name, outcome) if isinstance(outcome, int) else EvictedPack(name, 0, outcome)


def beginning(state: State, text: str, limit: int) -> list[PackRow]:
    """The first packs whose id begins so, in hex digits."""
    first = int(text.ljust(2 * PACK_ID_BYTES, "0"), 16)
    after = (first - 1).to_bytes(PACK_ID_BYTES, "big") if first else b""
    found, _ = state.catalog.listing.page(PackFilter(), after, limit)
    return [item.row for item in found if item.row.ref.pack_id.hex().startswith(text)]
