"""Eviction: removes packs, those that an operator names or those that are used least."""

from collections.abc import Callable, Iterator
from functools import partial
from logging import DEBUG, INFO, getLogger

from kvstore_service.daemon.disk.ballast import Ballast
from kvstore_service.daemon.disk.catalog import Catalog
from kvstore_service.daemon.disk.rows import Victim
from kvstore_service.daemon.logs import event
from kvstore_service.daemon.store.events import Events
from kvstore_service.daemon.store.leases import Leases
from kvstore_service.daemon.store.registry import Registry
from kvstore_service.shared.types import PackRow, StoreError

log = getLogger("kvstored.store")

BATCH = 64  # victims that are asked for at a time


class Eviction:
    """Thread-safe. Takes each pack for itself, so no call waits for more than the end of one removal."""

    def __init__(
        self,
        catalog: Catalog,
        registry: Registry,
        leases: Leases,
        ballast: Ballast,
        events: Events,
        count: Callable[[str, int], None],
    ) -> None:
        self._catalog = catalog
        self._registry = registry
        self._leases = leases
        self._ballast = ballast
        self._events = events
        self._count = count
        self.continued: Callable[[bytes], bool] = lambda name: False  # whether an open upload continues the pack

    def evict(self, row: PackRow, reason: str) -> int:
        """Removes the pack with its sidecars; returns the bytes. FAILED_PRECONDITION if it is attached, pinned or
        continued."""
        with self._registry.condemned(row.ref.pack_id):
            return self._remove(row, reason)

    def _remove(self, row: PackRow, reason: str) -> int:
        freed_bytes = self._ballast.behind(lambda: self._catalog.remove_pack(row))
        name = row.ref.pack_id
        self._count("packs_evicted", 1)
        self._count(f"packs_evicted_{reason}", 1)
        self._count("packs_evicted_bytes", freed_bytes)
        self._events.tell("evict", row.tenant, name, freed_bytes, reason)
        level = INFO if reason == "operator" else DEBUG
        event(log, level, "pack evicted", pack_id=name.hex(), bytes=freed_bytes, reason=reason)
        return freed_bytes

    def free(self, wanted_bytes: int, tenant: str | None, packs_max: int) -> int:
        """Evicts what is used least, of one tenant or of all, until so many bytes are free or `packs_max` packs are
        gone. Returns the bytes freed: fewer if the rest is in use."""
        freed_bytes = packs = 0
        while True:
            before = packs
            for row in self._victims(tenant):
                if freed_bytes >= wanted_bytes or packs >= packs_max:
                    return freed_bytes
                if size_bytes := self._take(row):
                    freed_bytes += size_bytes
                    packs += 1
            if packs == before:  # else what those packs continued may go now
                return freed_bytes

    def _victims(self, tenant: str | None) -> Iterator[PackRow]:
        after: Victim | None = None
        while batch := self._ballast.behind(partial(self._catalog.uses.victims, BATCH, tenant, after)):
            yield from (victim.row for victim in batch)
            after = batch[-1]

    def _take(self, row: PackRow) -> int:
        """The bytes of a pack that nobody needs now, or 0."""
        name = row.ref.pack_id
        try:
            with self._registry.condemned(name):
                if self._leases.holds(name) or self.continued(name):
                    return 0
                return self._remove(row, "room")
        except StoreError as error:
            if error.code in ("FAILED_PRECONDITION", "NOT_FOUND", "ABORTED"):  # attached, or somebody was first
                return 0
            raise
