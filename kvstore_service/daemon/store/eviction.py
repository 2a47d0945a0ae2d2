"""Eviction: removes packs, those that an operator names or those that are used least."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from logging import DEBUG, INFO, getLogger
from pathlib import Path

from kvstore_service.daemon.disk.ballast import Ballast
from kvstore_service.daemon.disk.catalog import Catalog
from kvstore_service.daemon.disk.rows import Victim
from kvstore_service.daemon.logs import event
from kvstore_service.daemon.store.events import Events
from kvstore_service.daemon.store.leases import Leases
from kvstore_service.daemon.store.registry import Registry
from kvstore_service.shared.types import PackRow, StoreError

log = getLogger("kvstored.store")

BATCH = 64  # packs that one transaction removes: others wait for the catalogue no longer than that takes
BATCH_BYTES = 256 << 20  # of their files, which take time to unlink

Outcome = int | StoreError  # the bytes that are free, or why the pack stays


class Eviction:
    """Thread-safe. Takes few packs at a time, so no call waits for more than the end of one such step."""

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

    def evict(self, rows: Sequence[PackRow], reason: str) -> list[Outcome]:
        """Removes the packs of one step (see `enough`) with their sidecars, those that stay excepted: attached, pinned,
        continued by others, or gone already."""
        with self._registry.condemned([row.ref.pack_id for row in rows]) as spared:
            outcomes, files = self._forget(rows, spared)
        self._catalog.remove_files(files)
        self._tell(rows, outcomes, reason)
        return outcomes

    def _forget(self, rows: Sequence[PackRow], spared: Mapping[bytes, StoreError]) -> tuple[list[Outcome], list[Path]]:
        going = [row for row in rows if row.ref.pack_id not in spared]
        removed, files = self._ballast.behind(lambda: self._catalog.remove_packs(going)) if going else ([], [])
        left = iter(removed)
        return [spared[row.ref.pack_id] if row.ref.pack_id in spared else next(left) for row in rows], files

    def _tell(self, rows: Sequence[PackRow], outcomes: Sequence[Outcome], reason: str) -> None:
        gone = [(row, size) for row, size in zip(rows, outcomes, strict=True) if isinstance(size, int)]
        if not gone:
            return
        freed_bytes = sum(size for _, size in gone)
        self._count("packs_evicted", len(gone))
        self._count(f"packs_evicted_{reason}", len(gone))
        self._count("packs_evicted_bytes", freed_bytes)
        for row, size in gone:
            name = row.ref.pack_id
            self._events.tell("evict", row.tenant, name, size, reason)
            event(log, DEBUG, "pack evicted", pack_id=name.hex(), bytes=size, reason=reason)
        level = INFO if reason == "operator" else DEBUG
        event(log, level, "packs evicted", packs=len(gone), bytes=freed_bytes, reason=reason)

    def free(self, wanted_bytes: int, tenant: str | None, packs_max: int) -> int:
        """Evicts what is used least, of one tenant or of all, until so many bytes are free or `packs_max` packs are
        gone. Returns the bytes freed: fewer if the rest is in use."""
        freed_bytes = packs = 0
        while True:
            before = packs
            for batch in self._victims(tenant):
                while batch and freed_bytes < wanted_bytes and packs < packs_max:
                    step = enough(batch[: packs_max - packs], wanted_bytes - freed_bytes)
                    batch = batch[len(step) :]
                    gone = self._take(step)
                    freed_bytes += sum(gone)
                    packs += len(gone)
                if freed_bytes >= wanted_bytes or packs >= packs_max:
                    return freed_bytes
            if packs == before:  # else what those packs continued may go now
                return freed_bytes

    def _victims(self, tenant: str | None) -> Iterator[list[PackRow]]:
        after: Victim | None = None
        while batch := self._ballast.behind(partial(self._catalog.uses.victims, BATCH, tenant, after)):
            yield [victim.row for victim in batch]
            after = batch[-1]

    def _take(self, rows: Sequence[PackRow]) -> list[int]:
        """The bytes of each of these packs that nobody needed, and that are gone."""
        rows = [row for row in rows if not self._needed(row.ref.pack_id)]  # finders would wait for what is condemned
        with self._registry.condemned([row.ref.pack_id for row in rows]) as spared:
            free = [row for row in rows if row.ref.pack_id not in spared and not self._needed(row.ref.pack_id)]
            outcomes, files = self._forget(free, {})
        self._catalog.remove_files(files)
        self._tell(free, outcomes, "room")
        return [size for size in outcomes if isinstance(size, int)]  # of the others somebody was first

    def _needed(self, name: bytes) -> bool:
        return self._leases.holds(name) or self.continued(name)


def enough(rows: Sequence[PackRow], wanted_bytes: int) -> list[PackRow]:
    """The first of `rows`, at least one, whose files have so many bytes, but no more than one step takes."""
    chosen: list[PackRow] = []
    size_bytes = 0
    for row in rows[:BATCH]:
        if chosen and (size_bytes >= wanted_bytes or size_bytes + row.file_bytes > BATCH_BYTES):
            break
        chosen.append(row)
        size_bytes += row.file_bytes
    return chosen
