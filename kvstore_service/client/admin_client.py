"""An operator's view of the daemon."""

import os
import secrets
from collections.abc import Iterator, Sequence

from kvstore_service._proto import admin_service_pb2 as admin_pb
from kvstore_service._proto import admin_service_pb2_grpc as admin_grpc
from kvstore_service.client.call import COMMIT_TIMEOUT_S, Client
from kvstore_service.shared.settings import default_broker, default_socket

VERIFY_TIMEOUT_S = 3600.0


class AdminClient(Client):
    """An operator's view of the daemon; answers are messages of admin_service.proto."""

    def __init__(self, socket: str, broker: str, name: str, timeout_s: float) -> None:
        super().__init__(socket, broker, name, timeout_s, operator=True)
        self._stub = admin_grpc.AdminServiceStub(self._channel)

    @classmethod
    def connect(cls, socket: str | None = None, broker: str | None = None, timeout_s: float = 10.0) -> "AdminClient":
        """UNAVAILABLE if no daemon answers, PERMISSION_DENIED if it refuses this user."""
        return cls(socket or default_socket(), broker or default_broker(), f"admin-{os.getpid()}", timeout_s)

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
