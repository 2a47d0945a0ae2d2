"""A decode worker's view of the daemon."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from google.rpc import code_pb2
from numpy.typing import NDArray

from kvstore_service._proto import store_service_pb2 as pb
from kvstore_service._proto import store_service_pb2_grpc as pb_grpc
from kvstore_service.client.call import COMMIT_TIMEOUT_S, Client, local_channel
from kvstore_service.client.connection import BrokerConnection
from kvstore_service.shared import memory, wire
from kvstore_service.shared.settings import default_broker, default_socket
from kvstore_service.shared.types import (
    REASON_LETTERS_MAX,
    CommittedPack,
    Layout,
    PackRef,
    PackReservation,
    PrefixCandidate,
    ReservedPack,
    RingGeometry,
    SidecarKey,
    StoreError,
)


@dataclass
class WorkerMemory:
    """Shared memory of one worker: descriptors that it maps before `StoreClient.serve_rings` and then closes with
    `close` (mappings stay valid).

    window: this worker's places. staging: what STORE runs read. rings[i] = (requests, completions); completions can be
    mapped for reading only. Ring 0 carries decode tickets, the others bulk transfers. arena: of a window of kind pull
    what its answers name (csrc/core/pull.h), for reading only; else -1. gpu: the UUID of the one that the window lies
    in; empty: in none."""

    worker_id: int
    window_fd: int
    window_bytes: int
    staging_fd: int
    staging_bytes: int
    rings: list[tuple[int, int]]
    pack_tokens: int
    extent_blocks: int
    window_kind: str
    arena_fd: int = -1
    gpu: str = ""

    def close(self) -> None:
        """Closes the descriptors. Idempotent."""
        fds = [self.window_fd, self.staging_fd, self.arena_fd, *(fd for ring in self.rings for fd in ring)]
        self.window_fd = self.staging_fd = self.arena_fd = -1
        self.rings = []
        for fd in fds:
            if fd >= 0:
                os.close(fd)


@dataclass(frozen=True)
class PackImportance:
    """How many records at the front of each segment are worth DRAM: uint32[layers, lanes]."""

    pack: PackRef
    hot_records: NDArray[np.uint32]


class StoreClient(Client):
    """A decode worker's view of the daemon. Thread-safe; the worker lives in the daemon until `close`."""

    _connection: BrokerConnection

    def __init__(
        self, socket: str, broker: str, name: str, timeout_s: float, broker_timeout_s: float | None = None
    ) -> None:
        connection = BrokerConnection(broker, name, broker_timeout_s or timeout_s)
        super().__init__(local_channel(socket), connection, timeout_s)
        self._stub = pb_grpc.StoreServiceStub(self._channel)

    @classmethod
    def connect(
        cls,
        socket: str | None = None,
        broker: str | None = None,
        name: str = "",
        timeout_s: float = 10.0,
        broker_timeout_s: float | None = None,
    ) -> "StoreClient":
        """Joins the node's daemon. UNAVAILABLE if none answers, PERMISSION_DENIED if it refuses this user.

        `broker_timeout_s`: of hello and of handing descriptors over (default: timeout_s)."""
        name = name or f"pid-{os.getpid()}"
        return cls(socket or default_socket(), broker or default_broker(), name, timeout_s, broker_timeout_s)

    def register_worker(
        self,
        slots: int,
        window_bytes: int,
        staging_bytes: int,
        rings: Sequence[RingGeometry],
        name: str = "",
        wait_ms: int = 0,
        window_kinds: Sequence[str] = (),
    ) -> WorkerMemory:
        """Allocates this worker's memory in the daemon, until `unregister_worker`. The caller closes the result.

        window_kinds: those that this worker can map (default: shm); it gets the best that the daemon has, or
        FAILED_PRECONDITION.

        wait_ms: how long this worker waits for one ticket (0: the daemon's default);
        the daemon fails a run before that."""
        request = pb.RegisterWorkerRequest(
            name=name, slots=slots, window_bytes=window_bytes, staging_bytes=staging_bytes, wait_ms=wait_ms,
            rings=[wire.geometry_to(ring) for ring in rings], window_kinds=window_kinds,
        )  # fmt: skip
        answer = self._call(self._stub.RegisterWorker, request, COMMIT_TIMEOUT_S)
        window_fd, staging_fd, *ring_fds = self._connection.take(answer.transfer)
        arena_fd = ring_fds.pop() if len(ring_fds) % 2 else -1
        pairs = list(zip(ring_fds[::2], ring_fds[1::2], strict=True))
        return WorkerMemory(
            answer.worker_id, window_fd, window_bytes, staging_fd, staging_bytes, pairs,
            answer.pack_tokens, answer.extent_blocks, answer.window_kind, arena_fd, answer.gpu,
        )  # fmt: skip

    def serve_rings(self) -> None:
        """Says that this worker has mapped its window, staging memory and requests: they cannot be mapped for writing
        again, nor their pages given back. Before this, nothing of the rings is looked at. Idempotent.

        FAILED_PRECONDITION if nothing is registered; any error ends the registration."""
        self._call(self._stub.ServeRings, pb.ServeRingsRequest(), COMMIT_TIMEOUT_S)

    def unregister_worker(self, reason: str) -> None:
        """Gives this worker's memory back to the daemon, whose log says why; it may register anew.

        FAILED_PRECONDITION while a slot is bound."""
        request = pb.UnregisterWorkerRequest(reason=reason[:REASON_LETTERS_MAX])
        self._call(self._stub.UnregisterWorker, request, COMMIT_TIMEOUT_S)

    def open_session(self, layout: Layout, declared_max_tokens: int) -> str:
        """Returns the session's id. RESOURCE_EXHAUSTED at sessions_max."""
        request = pb.OpenSessionRequest(layout=wire.layout_to(layout), declared_max_tokens=declared_max_tokens)
        return str(self._call(self._stub.OpenSession, request).session_id)

    def fork_session(self, session_id: str) -> str:
        """A second session over the same packs, shared with the first. Returns its id."""
        return str(self._call(self._stub.ForkSession, pb.ForkSessionRequest(session_id=session_id)).session_id)

    def close_session(self, session_id: str, timeout_s: float | None = None) -> None:
        """Unbinds its slots and drops its references; committed packs stay."""
        self._call(self._stub.CloseSession, pb.CloseSessionRequest(session_id=session_id), timeout_s)

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

    def reserve_pack(
        self, session_id: str, packs: Sequence[PackReservation], compete: bool = False
    ) -> list[ReservedPack]:
        """Opens uploads for a chain of packs. One that exists has none and names the stored build; nor has one that
        another worker is writing (`retry_after_s`), unless `compete`: then the first commit wins.

        RESOURCE_EXHAUSTED, and no upload at all, with a violation of `nvme_bytes` if they do not fit."""
        request = pb.ReservePackRequest(
            session_id=session_id, packs=[wire.reservation_to(item) for item in packs], compete=compete
        )
        return [_reserved(item) for item in self._call(self._stub.ReservePack, request, COMMIT_TIMEOUT_S).packs]

    def commit_pack(
        self, session_id: str, upload_ids: Sequence[int], timeout_s: float = COMMIT_TIMEOUT_S
    ) -> list[CommittedPack]:
        """Durable on return, one result per upload: committed, `exists` (load the winner's map), or `error`."""
        request = pb.CommitPackRequest(session_id=session_id, upload_ids=upload_ids)
        return [_committed(item) for item in self._call(self._stub.CommitPack, request, timeout_s).packs]

    def abort_pack(self, upload_ids: Sequence[int], timeout_s: float | None = None) -> None:
        """Removes uploads; one that has ended already needs nothing."""
        self._call(self._stub.AbortPack, pb.AbortPackRequest(upload_ids=upload_ids), timeout_s)

    def seal_tail(self, session_id: str, upload_id: int, timeout_s: float = COMMIT_TIMEOUT_S) -> PackRef:
        """Commits the pack of the oldest tail tokens and appends it to the session and its slots.

        A result with another build than the reserved one is another writer's pack: load its map before selecting."""
        request = pb.SealTailRequest(session_id=session_id, upload_id=upload_id)
        return wire.ref_of(self._call(self._stub.SealTail, request, timeout_s).pack)

    def seal_existing(self, session_id: str, pack: PackRef) -> PackRef:
        """Seals with a pack that another writer stored: appends it to the session and its slots. Load its map first."""
        self.attach_packs(session_id, [pack])
        return pack

    def put_sidecar(self, key: SidecarKey, content: bytes, replace: bool = False) -> None:
        """Durable on return. The first content of a key stays, unless it is to be replaced. FAILED_PRECONDITION for
        another build."""
        transfer = self._connection.offer("kvstore-sidecar", content)
        request = pb.PutSidecarRequest(
            key=wire.sidecar_key_to(key), transfer=transfer, size=len(content), replace=replace
        )
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


def _reserved(item: pb.ReservedPack) -> ReservedPack:
    if item.status.code == code_pb2.ABORTED:
        return ReservedPack(wire.ref_of(item.pack), None, item.status.retry_after_ms / 1e3)
    return ReservedPack(wire.ref_of(item.pack), None if item.status.code else item.upload_id)


def _committed(item: pb.CommittedPack) -> CommittedPack:
    code = code_pb2.Code.Name(item.status.code)
    if code in ("OK", "ALREADY_EXISTS"):
        return CommittedPack(wire.ref_of(item.pack), exists=code == "ALREADY_EXISTS")
    return CommittedPack(None, error=StoreError(code, item.status.message))
