"""Operation: what an operator sees and does, over all tenants."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore_service.daemon import native
from kvstore_service.daemon.disk.catalog import FOREVER_S, ListedPack, PackFilter
from kvstore_service.daemon.store import audit
from kvstore_service.daemon.store.state import State
from kvstore_service.shared.types import PackRow, StoreError

AUDIT_LOOKS = 4
AUDIT_PAUSE_S = 0.05


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


class Operation:
    """Pins, evicts, verifies, audits, counts."""

    def __init__(self, state: State) -> None:
        self._state = state

    def drain(self) -> None:
        """Refuses new work from now on; what is open goes on."""
        self._state.draining.set()
        self._state.events.tell("drain", detail=f"{len(self._state.registry.all())} sessions open")

    def pin(self, pack_ids: Sequence[bytes], pinned: bool, ttl_s: float = 0.0) -> None:
        """All or none, for `ttl_s` seconds or, with 0, until they are unpinned. NOT_FOUND."""
        if not 0 <= ttl_s < math.inf:
            raise StoreError("INVALID_ARGUMENT", f"ttl_s {ttl_s}: seconds, or 0 for ever")
        self._state.catalog.pin(pack_ids, pinned, time.time() + ttl_s if ttl_s else FOREVER_S)

    def evict(self, pack_ids: Sequence[bytes], descendants: bool) -> list[EvictedPack]:
        """Removes each pack as a whole or says why not; packs go before those that they continue."""
        rows: dict[bytes, PackRow] = {}
        results: list[EvictedPack] = []
        for name in dict.fromkeys(pack_ids):
            try:
                rows[name] = self._state.catalog.any_pack(name)
            except StoreError as error:
                results.append(EvictedPack(name, 0, error))
                continue
            if descendants:
                rows.update((row.ref.pack_id, row) for row in self._state.catalog.descendants(name))
        for row in sorted(rows.values(), key=lambda row: -row.ref.first_token):
            try:
                results.append(EvictedPack(row.ref.pack_id, self._state.eviction.evict(row, "operator")))
            except StoreError as error:
                results.append(EvictedPack(row.ref.pack_id, 0, error))
        return results

    def audit(self) -> list[audit.Check]:
        """Compares what must be equal; see `kvstore_service.daemon.store.audit`."""
        state = self._state
        parts = audit.Audited(state.catalog, state.uploads, state.open_packs, state.registry, state.plane, state.counts)
        return audit.read(parts, AUDIT_LOOKS, lambda: time.sleep(AUDIT_PAUSE_S))

    def packs_to_verify(self, pack_ids: Sequence[bytes]) -> list[PackRow]:
        """The packs named, or all; NOT_FOUND."""
        return [self._state.catalog.any_pack(name) for name in pack_ids] if pack_ids else self._state.catalog.packs()

    def verify(self, row: PackRow) -> tuple[list[int], str]:
        """Reads every block of the pack from disk: (bad blocks, error). A pack with either is served no more."""
        try:
            with self._state.open_packs.using(row) as handle, native.errors():
                bad_blocks = self._state.plane.verify_pack(handle)
        except StoreError as error:
            return [], error.message
        if bad_blocks:
            self._state.catalog.mark_damaged(row, f"{len(bad_blocks)} bad blocks")
        return bad_blocks, ""

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
            "draining": int(self._state.draining.is_set()),
        }
        return {**self._state.plane.stats(), **self._state.counts(), **gauges}

    def users(self) -> dict[int, dict[str, int]]:
        """What each user id holds."""
        return self._state.registry.users()

    def packs(self, after: bytes, limit: int) -> list[DescribedPack]:
        """In the order of ids."""
        listed, _ = self._state.catalog.page(PackFilter(), after, limit)
        return [self._described(item) for item in listed]

    def described(self, row: PackRow) -> DescribedPack:
        return self._described(self._state.catalog.listed(row.ref.pack_id))

    def _described(self, item: ListedPack) -> DescribedPack:
        references = self._state.registry.references(item.row.ref.pack_id)
        return DescribedPack(item.row, references, list(item.sidecars), item.pinned, item.damaged)
