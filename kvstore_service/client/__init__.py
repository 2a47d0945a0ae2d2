"""The typed client of a node's daemon.

    with StoreClient.connect(name="worker-0") as store:
        memory = store.register_worker(slots=1, window_bytes=..., staging_bytes=..., rings=[RingGeometry(...)])
        ...  # map it
        store.serve_rings()
        session = store.open_session(layout, declared_max_tokens=...)

Every call has a deadline and raises StoreError: NOT_FOUND is a miss, RESOURCE_EXHAUSTED is full (see `violations` and
`retry_after_s`), FAILED_PRECONDITION is another list, build or layout, UNAVAILABLE is draining or gone. No call is made
inside a decode step; `rpc_count` shows it.
"""

from kvstore_service.client.admin_client import AdminClient
from kvstore_service.client.store_client import PackImportance, StoreClient, WorkerMemory
from kvstore_service.shared.types import (
    HASH_BLOCK_TOKENS,
    LEARNT,
    NO_PARENT,
    RECORD_ORDERS,
    CommittedPack,
    KindSpec,
    Layout,
    PackRef,
    PackReservation,
    PrefixCandidate,
    ReservedPack,
    RingGeometry,
    SidecarKey,
    StoreError,
    Violation,
    parse_size,
)

__all__ = [
    "HASH_BLOCK_TOKENS",
    "LEARNT",
    "NO_PARENT",
    "RECORD_ORDERS",
    "AdminClient",
    "CommittedPack",
    "KindSpec",
    "Layout",
    "PackImportance",
    "PackRef",
    "PackReservation",
    "PrefixCandidate",
    "ReservedPack",
    "RingGeometry",
    "SidecarKey",
    "StoreClient",
    "StoreError",
    "Violation",
    "WorkerMemory",
    "parse_size",
]
