"""The typed client of a node's daemon.

    with StoreClient.connect(name="worker-0") as store:
        memory = store.register_worker(slots=1, window_bytes=..., staging_bytes=..., rings=[RingGeometry(...)])
        session = store.open_session(layout, declared_max_tokens=...)

Every call has a deadline and raises StoreError: NOT_FOUND is a miss, RESOURCE_EXHAUSTED is full (see `violations` and
`retry_after_s`), FAILED_PRECONDITION is another list, build or layout, UNAVAILABLE is draining or gone. No call is made
inside a decode step; `rpc_count` shows it.
"""

import atexit
import contextlib
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc
import numpy as np
from google.rpc import code_pb2, error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from numpy.typing import NDArray

from kvstore_service import memory, wire
from kvstore_service._proto import admin_service_pb2 as admin_pb
from kvstore_service._proto import admin_service_pb2_grpc as admin_grpc
from kvstore_service._proto import store_service_pb2 as pb
from kvstore_service._proto import store_service_pb2_grpc as pb_grpc
from kvstore_service.connection import BrokerConnection
from kvstore_service.settings import default_broker, default_socket
from kvstore_service.types import (
    NO_PARENT,
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
    "NO_PARENT",
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

BEAT_S = 1.0
BEATS_PER_STREAM = 60
COMMIT_TIMEOUT_S = 120.0
VERIFY_TIMEOUT_S = 3600.0


@dataclass
class WorkerMemory:
    """Shared memory of one worker: descriptors that it maps and then closes with `close` (mappings stay valid).

    window: this worker's places. staging: what STORE runs read. rings[i] = (requests, completions); completions can be
    mapped for reading only. Ring 0 carries decode tickets, the others bulk transfers."""

    worker_id: int
    window_fd: int
    window_bytes: int
    staging_fd: int
    staging_bytes: int
    rings: list[tuple[int, int]]
    pack_tokens: int
    extent_blocks: int
    window_kind: str

    def close(self) -> None:
        """Closes the descriptors. Idempotent."""
        fds = [self.window_fd, self.staging_fd, *(fd for ring in self.rings for fd in ring)]
        self.window_fd = self.staging_fd = -1
        self.rings = []
        for fd in fds:
            if fd >= 0:
                os.close(fd)


@dataclass(frozen=True)
class PackImportance:
    """How many records at the front of each segment are worth DRAM: uint32[layers, lanes]."""

    pack: PackRef
    hot_records: NDArray[np.uint32]


class _Client:
    """Broker connection, channel, and the one place where gRPC's errors become StoreErrors."""

    def __init__(self, socket: str, broker: str, name: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._connection = BrokerConnection(broker, name, timeout_s)
        # A connection of its own: a shared one may still be backing off from a daemon that was gone.
        options = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.insecure_channel(f"unix:{socket}", options=options)
        self._count_lock = threading.Lock()
        self._closed = False
        self.rpc_count = 0
        _clients.add(self)

    def require_serving(self) -> None:
        """UNAVAILABLE unless the daemon answers and takes new work."""
        request = health_pb2.HealthCheckRequest(service="")
        answer = self._call(health_pb2_grpc.HealthStub(self._channel).Check, request)
        if answer.status != health_pb2.HealthCheckResponse.SERVING:
            raise StoreError("UNAVAILABLE", "the daemon is draining")

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Ends the connection; the daemon then frees all that this client held. Idempotent."""
        if not self._closed:
            self._closed = True
            self._channel.close()
            self._connection.close()

    def _metadata(self, request_id: str) -> tuple[tuple[str, str], ...]:
        return (("kvstore-token", self._connection.token), ("kvstore-request-id", request_id))

    def _call(self, method: Callable[..., Any], request: Any, timeout_s: float | None = None) -> Any:
        """One call with a deadline. Mutations carry a fresh idempotency key."""
        request_id = secrets.token_hex(8)
        with self._count_lock:
            self.rpc_count += 1
        if "idempotency_key" in request.DESCRIPTOR.fields_by_name:
            request.idempotency_key = secrets.token_hex(16)
        with self._typed_errors(request_id):
            return method(request, timeout=timeout_s or self._timeout_s, metadata=self._metadata(request_id))

    @contextlib.contextmanager
    def _typed_errors(self, request_id: str) -> Iterator[None]:
        if self._closed:
            raise StoreError("FAILED_PRECONDITION", "the client is closed")
        try:
            yield
        except grpc.RpcError as error:
            raise _store_error(error, request_id) from error


_clients: "weakref.WeakSet[_Client]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A channel that is open when the interpreter ends can hold it up."""
    for client in list(_clients):
        client.close()


class StoreClient(_Client):
    """A decode worker's view of the daemon. Thread-safe; the worker lives in the daemon until `close`."""

    def __init__(self, socket: str, broker: str, name: str, timeout_s: float) -> None:
        super().__init__(socket, broker, name, timeout_s)
        self._stub = pb_grpc.StoreServiceStub(self._channel)
        self._beating = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="kvstore-heartbeat", daemon=True)
        self._last_beat_s = time.monotonic()
        self.draining = False
        self._heart.start()

    @classmethod
    def connect(
        cls, socket: str | None = None, broker: str | None = None, name: str = "", timeout_s: float = 10.0
    ) -> "StoreClient":
        """Joins the node's daemon. UNAVAILABLE if none answers, PERMISSION_DENIED if it refuses this user."""
        return cls(socket or default_socket(), broker or default_broker(), name or f"pid-{os.getpid()}", timeout_s)

    def __enter__(self) -> "StoreClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._beating.set()
        super().close()
        if self._heart is not threading.current_thread():
            self._heart.join(timeout=2.0)

    @property
    def silence_s(self) -> float:
        """Seconds since the daemon last answered a heartbeat (one is sent every second)."""
        return time.monotonic() - self._last_beat_s

    def _beat(self) -> None:
        while not self._beating.is_set():
            with contextlib.suppress(grpc.RpcError, ValueError):
                answers = self._stub.Heartbeat(
                    self._beats(), timeout=BEAT_S * BEATS_PER_STREAM * 2, metadata=self._metadata("heartbeat")
                )
                for answer in answers:
                    self._last_beat_s = time.monotonic()
                    self.draining = answer.draining
            self._beating.wait(BEAT_S)

    def _beats(self) -> Iterator[pb.HeartbeatRequest]:
        for _ in range(BEATS_PER_STREAM):
            yield pb.HeartbeatRequest(sent_ns=time.monotonic_ns())
            if self._beating.wait(BEAT_S):
                return

    def register_worker(
        self, slots: int, window_bytes: int, staging_bytes: int, rings: Sequence[RingGeometry], name: str = ""
    ) -> WorkerMemory:
        """Allocates this worker's memory in the daemon; once per client. The caller closes the result."""
        request = pb.RegisterWorkerRequest(
            name=name, slots=slots, window_bytes=window_bytes, staging_bytes=staging_bytes,
            rings=[wire.geometry_to(ring) for ring in rings],
        )  # fmt: skip
        answer = self._call(self._stub.RegisterWorker, request, COMMIT_TIMEOUT_S)
        window_fd, staging_fd, *ring_fds = self._connection.take(answer.transfer)
        pairs = list(zip(ring_fds[::2], ring_fds[1::2], strict=True))
        return WorkerMemory(
            answer.worker_id, window_fd, window_bytes, staging_fd, staging_bytes, pairs,
            answer.pack_tokens, answer.extent_blocks, answer.window_kind,
        )  # fmt: skip

    def open_session(self, layout: Layout, declared_max_tokens: int) -> str:
        """Returns the session's id. RESOURCE_EXHAUSTED at sessions_max."""
        request = pb.OpenSessionRequest(layout=wire.layout_to(layout), declared_max_tokens=declared_max_tokens)
        return str(self._call(self._stub.OpenSession, request).session_id)

    def fork_session(self, session_id: str) -> str:
        """A second session over the same packs, shared with the first. Returns its id."""
        return str(self._call(self._stub.ForkSession, pb.ForkSessionRequest(session_id=session_id)).session_id)

    def close_session(self, session_id: str) -> None:
        """Unbinds its slots and drops its references; committed packs stay."""
        self._call(self._stub.CloseSession, pb.CloseSessionRequest(session_id=session_id))

    def lookup_prefix(self, fingerprint: bytes, candidates: Sequence[PrefixCandidate]) -> list[PackRef]:
        """The longest chain of stored packs that starts at token 0; empty if there is none."""
        request = pb.LookupPrefixRequest(
            fingerprint=fingerprint, candidates=[wire.candidate_to(item) for item in candidates]
        )
        return [wire.ref_of(pack) for pack in self._call(self._stub.LookupPrefix, request).packs]

    def attach_packs(self, session_id: str, packs: Sequence[PackRef]) -> int:
        """Appends committed packs to the session and to slots bound to it. Returns its number of tokens.

        NOT_FOUND, DATA_LOSS (damaged), or FAILED_PRECONDITION (other build or layout, or a gap)."""
        request = pb.AttachPacksRequest(session_id=session_id, packs=[wire.ref_to(ref) for ref in packs])
        return int(self._call(self._stub.AttachPacks, request).tokens)

    def bind_slot(self, session_id: str, slot: int, packs: Sequence[PackRef], windows: NDArray[np.uint64]) -> int:
        """Binds a free slot; `packs` is the list behind the worker's index.

        windows: uint64[layers, lanes, 2] = (byte offset of place 0 in the window, places). Returns the epoch.
        FAILED_PRECONDITION if the session has another list: reload. INVALID_ARGUMENT if a window does not fit."""
        lanes = [pb.LaneWindow(offset=int(offset), places=int(places)) for offset, places in windows.reshape(-1, 2)]
        refs = [wire.ref_to(ref) for ref in packs]
        request = pb.BindSlotRequest(session_id=session_id, slot=slot, packs=refs, windows=lanes)
        return int(self._call(self._stub.BindSlot, request, COMMIT_TIMEOUT_S).epoch)

    def unbind_slot(self, slot: int) -> None:
        """Returns when no ticket or copy of the slot's epoch can store any more."""
        self._call(self._stub.UnbindSlot, pb.UnbindSlotRequest(slot=slot), COMMIT_TIMEOUT_S)

    def reserve_pack(self, session_id: str, packs: Sequence[PackReservation]) -> list[ReservedPack]:
        """Opens uploads for a chain of packs, all or none; one that exists has no upload and names the stored build.

        RESOURCE_EXHAUSTED with a violation of `nvme_bytes` if they do not fit."""
        request = pb.ReservePackRequest(session_id=session_id, packs=[wire.reservation_to(item) for item in packs])
        answer = self._call(self._stub.ReservePack, request, COMMIT_TIMEOUT_S)
        return [
            ReservedPack(wire.ref_of(item.pack), None if item.status.code else item.upload_id) for item in answer.packs
        ]

    def commit_pack(
        self, session_id: str, upload_ids: Sequence[int], timeout_s: float = COMMIT_TIMEOUT_S
    ) -> list[CommittedPack]:
        """Durable on return, one result per upload: committed, `exists` (load the winner's map), or `error`."""
        request = pb.CommitPackRequest(session_id=session_id, upload_ids=upload_ids)
        return [_committed(item) for item in self._call(self._stub.CommitPack, request, timeout_s).packs]

    def abort_pack(self, upload_ids: Sequence[int]) -> None:
        """Removes uploads; one that has ended already needs nothing."""
        self._call(self._stub.AbortPack, pb.AbortPackRequest(upload_ids=upload_ids))

    def seal_tail(self, session_id: str, upload_id: int, timeout_s: float = COMMIT_TIMEOUT_S) -> PackRef:
        """Commits the pack of the oldest tail tokens and appends it to the session and its slots.

        A result with another build than the reserved one is another writer's pack: load its map before selecting."""
        request = pb.SealTailRequest(session_id=session_id, upload_id=upload_id)
        return wire.ref_of(self._call(self._stub.SealTail, request, timeout_s).pack)

    def seal_existing(self, session_id: str, pack: PackRef) -> PackRef:
        """Seals with a pack that another writer stored: appends it to the session and its slots. Load its map first."""
        self.attach_packs(session_id, [pack])
        return pack

    def put_sidecar(self, key: SidecarKey, content: bytes) -> None:
        """Durable on return. The first content of a key stays. FAILED_PRECONDITION for another build."""
        transfer = self._connection.offer("kvstore-sidecar", content)
        request = pb.PutSidecarRequest(key=wire.sidecar_key_to(key), transfer=transfer, size=len(content))
        self._call(self._stub.PutSidecar, request, COMMIT_TIMEOUT_S)

    def get_sidecar(self, key: SidecarKey) -> bytes | None:
        """None if there is none. DATA_LOSS if its checksum fails."""
        try:
            _, content = self._fetch(key)
        except StoreError as error:
            if error.code == "NOT_FOUND":
                return None
            raise
        return content

    def get_map(self, pack: PackRef) -> NDArray[np.uint16]:
        """Record -> token within the pack: uint16[layers, lanes, tokens]. NOT_FOUND, DATA_LOSS."""
        shape, content = self._fetch(SidecarKey(pack.pack_id, pack.build, "map"))
        return np.frombuffer(content, np.uint16).reshape(shape)

    def _fetch(self, key: SidecarKey) -> tuple[list[int], bytes]:
        request = pb.GetSidecarRequest(key=wire.sidecar_key_to(key))
        answer = self._call(self._stub.GetSidecar, request, COMMIT_TIMEOUT_S)
        (fd,) = self._connection.take(answer.transfer)
        with memory.Owned(fd):
            return list(answer.shape), memory.read(fd)

    def hint_importance(self, session_id: str, hints: Sequence[PackImportance]) -> None:
        """Asks to keep the records at the front of these packs' segments in DRAM; returns at once."""
        packs = [
            pb.PackImportance(pack=wire.ref_to(hint.pack), hot_records=hint.hot_records.reshape(-1).tolist())
            for hint in hints
        ]
        self._call(self._stub.HintImportance, pb.HintImportanceRequest(session_id=session_id, packs=packs))


class AdminClient(_Client):
    """An operator's view of the daemon; answers are messages of admin_service.proto."""

    def __init__(self, socket: str, broker: str, name: str, timeout_s: float) -> None:
        super().__init__(socket, broker, name, timeout_s)
        self._stub = admin_grpc.AdminServiceStub(self._channel)

    @classmethod
    def connect(cls, socket: str | None = None, broker: str | None = None, timeout_s: float = 10.0) -> "AdminClient":
        """UNAVAILABLE if no daemon answers, PERMISSION_DENIED if it refuses this user."""
        return cls(socket or default_socket(), broker or default_broker(), f"admin-{os.getpid()}", timeout_s)

    def __enter__(self) -> "AdminClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def get_status(self) -> admin_pb.GetStatusResponse:
        response: admin_pb.GetStatusResponse = self._call(self._stub.GetStatus, admin_pb.GetStatusRequest())
        return response

    def get_config(self) -> admin_pb.GetConfigResponse:
        response: admin_pb.GetConfigResponse = self._call(self._stub.GetConfig, admin_pb.GetConfigRequest())
        return response

    def list_sessions(self) -> list[admin_pb.SessionSummary]:
        return list(self._call(self._stub.ListSessions, admin_pb.ListSessionsRequest()).sessions)

    def describe_session(self, session_id: str) -> admin_pb.DescribeSessionResponse:
        request = admin_pb.DescribeSessionRequest(session_id=session_id)
        response: admin_pb.DescribeSessionResponse = self._call(self._stub.DescribeSession, request)
        return response

    def list_packs(self) -> Iterator[admin_pb.PackSummary]:
        """Every pack, page by page."""
        token = ""
        while True:
            answer = self._call(self._stub.ListPacks, admin_pb.ListPacksRequest(page_token=token))
            yield from answer.packs
            token = answer.next_page_token
            if not token:
                return

    def verify(
        self, pack_ids: Sequence[bytes] = (), timeout_s: float = VERIFY_TIMEOUT_S
    ) -> Iterator[admin_pb.VerifyResponse]:
        """Reads every block of the packs (of all, if none is named) from disk; one answer per pack as it is done."""
        request_id = secrets.token_hex(8)
        with self._count_lock:
            self.rpc_count += 1
        with self._typed_errors(request_id):
            request = admin_pb.VerifyRequest(pack_ids=pack_ids)
            yield from self._stub.Verify(request, timeout=timeout_s, metadata=self._metadata(request_id))

    def pin(self, pack_ids: Sequence[bytes]) -> None:
        """Protects packs from eviction, durably; all or, if one is NOT_FOUND, none."""
        self._call(self._stub.Pin, admin_pb.PinRequest(pack_ids=pack_ids))

    def unpin(self, pack_ids: Sequence[bytes]) -> None:
        self._call(self._stub.Unpin, admin_pb.UnpinRequest(pack_ids=pack_ids))

    def evict(self, pack_ids: Sequence[bytes], descendants: bool = False) -> list[admin_pb.EvictedPack]:
        """Removes packs with their sidecars, each whole or not at all; one result per pack, `code` 0 where it went.

        Refused (FAILED_PRECONDITION) for a pack that is pinned, attached to a session, or continued by a pack that
        stays; `descendants` evicts those too."""
        request = admin_pb.EvictRequest(pack_ids=pack_ids, descendants=descendants)
        return list(self._call(self._stub.Evict, request, COMMIT_TIMEOUT_S).packs)

    def audit(self) -> list[admin_pb.AuditCheck]:
        """What must be equal, compared: catalogue and files, references, runs, frames, lookups."""
        return list(self._call(self._stub.Audit, admin_pb.AuditRequest(), COMMIT_TIMEOUT_S).checks)

    @property
    def token(self) -> str:
        """What other gRPC clients send as metadata `kvstore-token`; it is valid until `close`."""
        return self._connection.token

    def drain(self) -> None:
        """From now on the daemon refuses new work."""
        self._call(self._stub.Drain, admin_pb.DrainRequest())


def _committed(item: pb.CommittedPack) -> CommittedPack:
    code = code_pb2.Code.Name(item.status.code)
    if code in ("OK", "ALREADY_EXISTS"):
        return CommittedPack(wire.ref_of(item.pack), exists=code == "ALREADY_EXISTS")
    return CommittedPack(None, error=StoreError(code, item.status.message))


def _store_error(error: grpc.RpcError, request_id: str) -> StoreError:
    """gRPC's error with what google.rpc's details add to it."""
    retry_after_s: float | None = None
    violations: list[Violation] = []
    status = rpc_status.from_call(error) if isinstance(error, grpc.Call) else None
    for detail in status.details if status is not None else ():
        quota, retry = error_details_pb2.QuotaFailure(), error_details_pb2.RetryInfo()
        if detail.Unpack(quota):
            violations.extend(Violation(item.subject, item.description) for item in quota.violations)
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    code = error.code().name if isinstance(error, grpc.Call) else "UNKNOWN"
    message = error.details() if isinstance(error, grpc.Call) else str(error)
    return StoreError(code, message or code, retry_after_s, violations, request_id)
