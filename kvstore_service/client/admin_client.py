"""An operator's view of the daemon."""

import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from kvstore_service._proto import admin_service_pb2 as admin_pb
from kvstore_service._proto import admin_service_pb2_grpc as admin_grpc
from kvstore_service.client.call import CHANNEL_OPTIONS, COMMIT_TIMEOUT_S, Client, local_channel
from kvstore_service.client.connection import BrokerConnection
from kvstore_service.shared.settings import default_broker, default_socket
from kvstore_service.shared.types import StoreError

TLS_FILES = ("ca.crt", "client.crt", "client.key")
STREAM_TIMEOUT_S = 23 * 3600.0  # the daemon takes deadlines of a day at most


class AdminClient(Client):
    """An operator's view of the daemon; answers are messages of admin_service.proto."""

    def __init__(self, channel: grpc.Channel, connection: BrokerConnection | None, timeout_s: float) -> None:
        super().__init__(channel, connection, timeout_s)
        self._stub = admin_grpc.AdminServiceStub(self._channel)

    @classmethod
    def connect(cls, socket: str | None = None, broker: str | None = None, timeout_s: float = 10.0) -> "AdminClient":
        """UNAVAILABLE if no daemon answers, PERMISSION_DENIED if it refuses this user."""
        connection = BrokerConnection(broker or default_broker(), f"admin-{os.getpid()}", timeout_s, operator=True)
        return cls(local_channel(socket or default_socket()), connection, timeout_s)

    @classmethod
    def connect_tls(cls, address: str, directory: str | os.PathLike[str], timeout_s: float = 10.0) -> "AdminClient":
        """A daemon's `tcp` address, HOST:PORT; its certificate has to be for HOST. `directory` holds ca.crt, client.crt
        and client.key, and one of the certificate's names stands in the daemon's `tls_subjects`.

        FAILED_PRECONDITION if a file cannot be read; UNAVAILABLE if no daemon answers that knows the certificate."""
        try:
            ca, certificate, key = ((Path(directory) / name).read_bytes() for name in TLS_FILES)
        except OSError as error:
            raise StoreError(
                "FAILED_PRECONDITION", f"{error.filename}: {error.strerror}; the directory holds {', '.join(TLS_FILES)}"
            ) from error
        credentials = grpc.ssl_channel_credentials(ca, key, certificate)
        return cls(grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS), None, timeout_s)

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

    def list_packs(
        self,
        *,
        tenant: str = "",
        damaged: bool = False,
        pinned: bool = False,
        unused: bool = False,
        idle_s: float = 0.0,
    ) -> Iterator[admin_pb.PackSummary]:
        """Every pack for which all that is set holds, page by page, in the order of ids.

        `unused`: attached to no session and not pinned; `idle_s`: last used at least so many seconds ago."""
        request = admin_pb.ListPacksRequest(tenant=tenant, damaged=damaged, pinned=pinned, unused=unused, idle_s=idle_s)
        while True:
            answer = self._call(self._stub.ListPacks, request)
            yield from answer.packs
            request.page_token = answer.next_page_token
            if not request.page_token:
                return

    def packs_beginning(self, digits: str, limit: int = 2) -> list[admin_pb.PackSummary]:
        """The first packs whose id begins with these hex digits."""
        request = admin_pb.ListPacksRequest(beginning=digits, page_size=limit)
        return list(self._call(self._stub.ListPacks, request).packs)

    def packs_named(self, pack_ids: Sequence[bytes]) -> list[admin_pb.PackSummary]:
        """Those of these packs that are stored."""
        if not pack_ids:
            return []
        return list(self._call(self._stub.ListPacks, admin_pb.ListPacksRequest(pack_ids=pack_ids)).packs)

    def verify(
        self, pack_ids: Sequence[bytes] = (), timeout_s: float = STREAM_TIMEOUT_S
    ) -> Iterator[admin_pb.VerifyResponse]:
        """Reads every block of the packs (of all, if none is named) from disk; one answer per pack as it is done."""
        yield from self._streamed(self._stub.Verify, admin_pb.VerifyRequest(pack_ids=pack_ids), timeout_s)

    def retier(
        self, pack_ids: Sequence[bytes] = (), dry_run: bool = False, timeout_s: float = STREAM_TIMEOUT_S
    ) -> Iterator[admin_pb.RetierResponse]:
        """Rewrites the packs (all, if none is named) in an order of their records that is learnt from their use, or
        only says what would come of it; one answer per pack as it is done, `code` 0 where it was, or would be."""
        request = admin_pb.RetierRequest(pack_ids=pack_ids, dry_run=dry_run)
        yield from self._streamed(self._stub.Retier, request, timeout_s)

    def watch(
        self, kinds: Sequence[str] = (), timeout_s: float = STREAM_TIMEOUT_S
    ) -> Iterator[admin_pb.WatchEventsResponse]:
        """What happens from now on: first an answer of kind "watch", then commits, evictions, damage, workers, quotas,
        expired uploads, rewritten packs, drains. A slow reader loses events; `dropped` counts them. DEADLINE_EXCEEDED
        at the end."""
        yield from self._streamed(self._stub.WatchEvents, admin_pb.WatchEventsRequest(kinds=kinds), timeout_s)

    def trace(self, seconds: float, timeout_s: float = STREAM_TIMEOUT_S) -> Iterator[admin_pb.TraceAccessesResponse]:
        """Which extents runs want in the next `seconds`, everybody's: first an answer that names the fields of a
        record, then the records. FAILED_PRECONDITION: somebody traces already."""
        yield from self._streamed(self._stub.TraceAccesses, admin_pb.TraceAccessesRequest(seconds=seconds), timeout_s)

    def _streamed(self, method: Callable[..., Any], request: Any, timeout_s: float) -> Iterator[Any]:
        request_id = secrets.token_hex(8)
        with self._count_lock:
            self.rpc_count += 1
        timeout_s = max(0.0, min(timeout_s, self.deadline_s - time.monotonic()))
        with self._typed_errors(request_id):
            call = method(request, timeout=timeout_s, metadata=self._metadata(request_id))
            try:
                yield from call
            finally:
                call.cancel()  # of a caller that has left before the end

    def explain(self, subject: str = "") -> list[admin_pb.Finding]:
        """Why a prompt (by its last digest), a pack or a session is found or not, and fast or slow;
        "": the latest lookups. NOT_FOUND."""
        return list(self.explained(subject).findings)

    def explained(self, subject: str) -> admin_pb.ExplainResponse:
        """The same of a slot too, SLOT or WORKER/SLOT; for it and for a session's slots also where runs' time went."""
        answer: admin_pb.ExplainResponse
        answer = self._call(self._stub.Explain, admin_pb.ExplainRequest(subject=subject))
        return answer

    def set_quota(self, tenant: str, nvme_bytes: int | None = None, dram_bytes: int | None = None) -> None:
        """Bounds the packs and sidecars of `tenant` (uid-N) on disk, and its packs' frames in DRAM, those that it has
        too; 0: no quota, None: as it is. Durable on return. INVALID_ARGUMENT for a DRAM quota of less than 8 frames."""
        request = admin_pb.SetQuotaRequest(tenant=tenant, nvme_bytes=nvme_bytes, dram_bytes=dram_bytes)
        self._call(self._stub.SetQuota, request)

    def list_quotas(self) -> list[admin_pb.Quota]:
        """Of every tenant that stores something, has some of it in DRAM or has a quota."""
        return list(self._call(self._stub.ListQuotas, admin_pb.ListQuotasRequest()).quotas)

    def list_workers(self) -> list[admin_pb.WorkerSummary]:
        return list(self._call(self._stub.ListWorkers, admin_pb.ListWorkersRequest()).workers)

    def list_uploads(self) -> list[admin_pb.UploadSummary]:
        return list(self._call(self._stub.ListUploads, admin_pb.ListUploadsRequest()).uploads)

    def kill_worker(self, worker: str) -> admin_pb.WorkerSummary:
        """Ends a worker's broker connection, and all that it holds; by id, pid or name."""
        summary: admin_pb.WorkerSummary
        summary = self._call(self._stub.KillWorker, admin_pb.KillWorkerRequest(worker=worker)).worker
        return summary

    def pin(self, pack_ids: Sequence[bytes], ttl_s: float = 0.0) -> None:
        """Protects packs from eviction, durably, for `ttl_s` seconds or, with 0, until they are unpinned.

        All or, if one is NOT_FOUND, none."""
        self._call(self._stub.Pin, admin_pb.PinRequest(pack_ids=pack_ids, ttl_s=ttl_s))

    def unpin(self, pack_ids: Sequence[bytes]) -> None:
        self._call(self._stub.Unpin, admin_pb.UnpinRequest(pack_ids=pack_ids))

    def evict(self, pack_ids: Sequence[bytes], descendants: bool = False) -> list[admin_pb.EvictedPack]:
        """Removes packs with their sidecars, each whole or not at all; one result per pack, `code` 0 where it went.

        Refused (FAILED_PRECONDITION) for a pack that is pinned, attached to a session, or continued by a pack that
        stays; `descendants` evicts those too."""
        return [pack for answer in self.evicting(pack_ids, descendants) for pack in answer.packs]

    def evicting(
        self, pack_ids: Sequence[bytes], descendants: bool = False, timeout_s: float = STREAM_TIMEOUT_S
    ) -> Iterator[admin_pb.EvictResponse]:
        """As `evict`, with an answer for each step, when it is done. Whoever leaves, or whose deadline passes
        (DEADLINE_EXCEEDED), ends it: at most the step that was under way goes beyond what was answered."""
        request = admin_pb.EvictRequest(pack_ids=pack_ids, descendants=descendants)
        yield from self._streamed(self._stub.Evict, request, timeout_s)

    def audit(self) -> list[admin_pb.AuditCheck]:
        """What must be equal, compared: catalogue and files, references, runs, frames, lookups."""
        return list(self._call(self._stub.Audit, admin_pb.AuditRequest(), COMMIT_TIMEOUT_S).checks)

    @property
    def token(self) -> str:
        """What other gRPC clients send as metadata `kvstore-token`; it is valid until `close`."""
        if self._connection is None:
            raise StoreError("FAILED_PRECONDITION", "over TLS the certificate says who calls; there is no token")
        return self._connection.token

    def drain(self) -> None:
        """From now on the daemon refuses new work."""
        self._call(self._stub.Drain, admin_pb.DrainRequest())
