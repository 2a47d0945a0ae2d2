"""Room on the disk tier: who has how much of it, what is set aside, and when packs have to go for it.

Stored bytes are the catalogue's totals, those set aside are counted here; both are read under one lock, so a bound is
never exceeded. Packs are evicted outside of it.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from kvstore_service.daemon.config import Config
from kvstore_service.daemon.disk.ballast import free_bytes
from kvstore_service.daemon.disk.catalog import Catalog
from kvstore_service.daemon.store.eviction import Eviction
from kvstore_service.shared.types import StoreError, Violation

TRIES = 16  # to take what was freed before others do
PACKS_PER_TURN = 256  # that one reservation, or one turn of the upkeep, evicts at most
SEALS_SHARE = 1 / 16  # of a bound, kept at most for the next seals of running generations


@dataclass(frozen=True)
class Bound:
    """A limit and what there is of it. `tenant` None: the whole store."""

    subject: str
    tenant: str | None
    limit_bytes: int
    stored_bytes: int
    promised_bytes: int
    seals_bytes: int

    @property
    def used_bytes(self) -> int:
        return self.stored_bytes + self.promised_bytes

    def lacks(self, wanted_bytes: int, seal: bool) -> int:
        """Bytes that have to go before so many fit; not above 0 if they do."""
        return self.used_bytes + wanted_bytes + (0 if seal else self.seals_bytes) - self.limit_bytes


class Room:
    """Thread-safe."""

    def __init__(
        self, catalog: Catalog, eviction: Eviction, config: Config, seals: Callable[[], Mapping[str, int]]
    ) -> None:
        """`seals`: bytes, by tenant, of the packs that bound sessions will seal next."""
        self._catalog = catalog
        self._eviction = eviction
        self._config = config
        self._seals = seals
        self._lock = threading.Lock()
        self._promised: Counter[str] = Counter()
        self._quotas = {name: quota.nvme_bytes for name, quota in catalog.quotas().items() if quota.nvme_bytes}

    def promise(self, tenant: str, wanted_bytes: int, seal: bool = False, evict: bool = True) -> None:
        """Sets bytes aside until `unpromise`, evicting for them if need be. RESOURCE_EXHAUSTED names the bound.

        `seal`: for a generation that runs; it may use what is kept for such. Without `evict` nothing goes for it."""
        evict = evict and self._config.on_full == "evict"
        making = False
        for _ in range(TRIES):
            with self._lock:
                short = [bound for bound in self._bounds(tenant) if bound.lacks(wanted_bytes, seal) > 0]
                if not short:
                    self._promised[tenant] += wanted_bytes
                    return
            making = evict and self._make(short[0], wanted_bytes, seal)
            if not making:
                break
        raise _refused(short[0], wanted_bytes, seal, evict, making)

    def _make(self, bound: Bound, wanted_bytes: int, seal: bool) -> bool:
        """Whether packs have gone for it."""
        fits = bound.lacks(wanted_bytes, seal) <= bound.stored_bytes
        return fits and self._eviction.free(bound.lacks(wanted_bytes, seal), bound.tenant, PACKS_PER_TURN) > 0

    def unpromise(self, tenant: str, size_bytes: int) -> None:
        with self._lock:
            self._unpromise(tenant, size_bytes)

    def _unpromise(self, tenant: str, size_bytes: int) -> None:
        self._promised[tenant] -= size_bytes
        if not self._promised[tenant]:
            del self._promised[tenant]

    @contextmanager
    def storing(self) -> Iterator[Callable[[str, int], None]]:
        """While rows are written for what was promised: nobody sees it in both sums or in none. Yields `unpromise`."""
        with self._lock:
            yield self._unpromise

    @contextmanager
    def still(self) -> Iterator[int]:
        """Bytes set aside, while nothing is added or stored. Who needs another lock as well takes this one first."""
        with self._lock:
            yield self._promised.total()

    def relieve(self) -> None:
        """Evicts from the high down to the low watermark, a step at a time."""
        if self._config.on_full != "evict":
            return
        with self._lock:
            bounds = [self._whole(), *(self._quota(tenant) for tenant in self._quotas)]
        for bound in bounds:
            if bound.used_bytes > self._config.evict_high * bound.limit_bytes:
                excess_bytes = bound.used_bytes - int(self._config.evict_low * bound.limit_bytes)
                self._eviction.free(excess_bytes, bound.tenant, PACKS_PER_TURN)

    def clear_disk(self, wanted_bytes: int) -> None:
        """Evicts where the disk itself, whatever the bounds, has no room for so many bytes and the ballast; nothing
        where all that is stored would not be enough. RESOURCE_EXHAUSTED."""
        short_bytes = self._short_bytes(wanted_bytes)
        if self._config.on_full != "evict" or short_bytes <= 0:
            return
        if short_bytes <= self._catalog.totals().stored_bytes and self._free(short_bytes):
            return
        self.require_disk(wanted_bytes)  # others may have made room meanwhile

    def require_disk(self, wanted_bytes: int) -> None:
        """RESOURCE_EXHAUSTED where the disk itself has no room for so many bytes and the ballast; nothing goes."""
        if self._short_bytes(wanted_bytes) > 0:
            free = free_bytes(self._catalog.packs_dir)
            raise full("disk", f"{free} B are free on the disk; {wanted_bytes} B more do not fit")

    def _short_bytes(self, wanted_bytes: int) -> int:
        return wanted_bytes + self._catalog.ballast.owed_bytes() - free_bytes(self._catalog.packs_dir)

    def _free(self, wanted_bytes: int) -> bool:
        """Whether so many bytes of packs are gone, which is told apart from what the disk says: it may lag behind."""
        left_bytes = wanted_bytes
        for _ in range(TRIES):
            freed_bytes = self._eviction.free(left_bytes, None, PACKS_PER_TURN)
            left_bytes -= freed_bytes
            if left_bytes <= 0 or not freed_bytes:
                break
        return left_bytes <= 0

    def set_quota(self, tenant: str, limit_bytes: int) -> None:
        """0: none. For a caller that has made it durable."""
        with self._lock:
            self._quotas.pop(tenant, None)
            if limit_bytes:
                self._quotas[tenant] = limit_bytes

    def bounds(self) -> list[Bound]:
        """Every tenant's that stores, has set aside or is bounded; `limit_bytes` 0: no quota."""
        with self._lock:
            tenants = {*self._catalog.totals_by_tenant(), *self._promised, *self._quotas}
            return [self._quota(tenant) for tenant in sorted(tenants)]

    def _bounds(self, tenant: str) -> list[Bound]:
        return [*([self._quota(tenant)] if tenant in self._quotas else []), self._whole()]

    def _whole(self) -> Bound:
        limit = self._config.nvme_bytes
        seals = min(sum(self._seals().values()), int(limit * SEALS_SHARE))
        stored = self._catalog.totals().stored_bytes
        return Bound("nvme_bytes", None, limit, stored, self._promised.total(), seals)

    def _quota(self, tenant: str) -> Bound:
        limit = self._quotas.get(tenant, 0)
        seals = min(self._seals().get(tenant, 0), int(limit * SEALS_SHARE))
        stored = self._catalog.totals_of(tenant).stored_bytes
        return Bound(f"quota of {tenant}", tenant, limit, stored, self._promised[tenant], seals)


def _refused(bound: Bound, wanted_bytes: int, seal: bool, evicting: bool, making: bool) -> StoreError:
    """`making`: packs have gone for it, but there was more to evict than one call does, or others took their room."""
    kept = f", {bound.seals_bytes} B kept for running generations" if bound.seals_bytes and not seal else ""
    why = "; what is stored is pinned or in use" if evicting and bound.stored_bytes else ""
    why = "; room is being made, ask again" if making else why
    return full(
        bound.subject,
        f"{bound.stored_bytes} B stored and {bound.promised_bytes} B reserved of {bound.limit_bytes} B{kept}; "
        f"{wanted_bytes} B more do not fit{why}",
    )


def full(subject: str, description: str) -> StoreError:
    """RESOURCE_EXHAUSTED with the figures, and when to try again."""
    reason = "QUOTA_EXCEEDED" if subject.startswith("quota") else "NO_ROOM"
    return StoreError(
        "RESOURCE_EXHAUSTED",
        description,
        retry_after_s=5.0,
        violations=[Violation(subject, description)],
        reason=reason,
    )
