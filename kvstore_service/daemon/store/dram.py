"""The DRAM tier by tenant: who holds how much of it, and how much each may. The data plane keeps to the bounds."""

import threading
from dataclasses import dataclass

from kvstore_service.daemon import native
from kvstore_service.daemon.disk.catalog import Catalog
from kvstore_service.shared.types import StoreError, tenant_of, uid_of


@dataclass(frozen=True)
class DramUse:
    """Bytes of frames; `limit_bytes` 0: no quota. `moved_bytes`: to the tenant's workers since the start."""

    limit_bytes: int = 0
    used_bytes: int = 0
    moved_bytes: int = 0


class Dram:
    """Thread-safe."""

    def __init__(self, catalog: Catalog, plane: native.DataPlane) -> None:
        self._plane = plane
        self._lock = threading.Lock()
        self._quotas: dict[str, int] = {}
        for tenant, quota in catalog.quotas().items():
            if quota.dram_bytes:
                self.set_quota(tenant, quota.dram_bytes)

    def check(self, limit_bytes: int) -> None:
        """INVALID_ARGUMENT for a quota that is too small for several reads at once."""
        least = self._plane.dram_quota_min
        if 0 < limit_bytes < least:
            raise StoreError(
                "INVALID_ARGUMENT", f"a DRAM quota of {limit_bytes} B is too small; set at least {least} B, or none"
            )

    def set_quota(self, tenant: str, limit_bytes: int) -> None:
        """0: none. For a caller that has checked it and made it durable. What the tenant has above it goes."""
        with self._lock:
            with native.errors():
                self._plane.set_dram_quota(uid_of(tenant), limit_bytes)
            self._quotas.pop(tenant, None)
            if limit_bytes:
                self._quotas[tenant] = limit_bytes

    def uses(self) -> dict[str, DramUse]:
        """Of every tenant that holds frames, has moved anything, or is bounded."""
        frame_bytes = self._plane.stats()["frame_bytes"]
        held = {tenant_of(uid): frames * frame_bytes for uid, frames in self._plane.owners().items()}
        moved = {tenant_of(uid): bytes_ for uid, bytes_ in self._plane.moved().items()}
        with self._lock:
            return {
                tenant: DramUse(self._quotas.get(tenant, 0), held.get(tenant, 0), moved.get(tenant, 0))
                for tenant in sorted({*held, *moved, *self._quotas})
            }
