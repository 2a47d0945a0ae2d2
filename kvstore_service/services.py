"""StoreService and AdminService: messages in, one method of the store each, messages out."""

import contextlib
import time
from collections.abc import Iterator

import grpc
import numpy as np
from google.rpc import code_pb2

from kvstore_service import __version__, memory, wire
from kvstore_service._proto import admin_service_pb2 as admin_pb
from kvstore_service._proto import admin_service_pb2_grpc as admin_grpc
from kvstore_service._proto import store_service_pb2 as pb
from kvstore_service._proto import store_service_pb2_grpc as pb_grpc
from kvstore_service.broker import Broker
from kvstore_service.config import Config
from kvstore_service.rpc import caller
from kvstore_service.sessions import Session, Worker
from kvstore_service.store import Store
from kvstore_service.types import CommittedPack, PackRow, ReservedPack, StoreError

PAGE_SIZE_MAX = 1000


class StoreService(pb_grpc.StoreServiceServicer):
    def __init__(self, store: Store, broker: Broker, config: Config) -> None:
        self._store = store
        self._broker = broker
        self._config = config

    def _caller(self, context: grpc.ServicerContext) -> Worker:
        return caller(context, self._store.sessions)

    def RegisterWorker(
        self, request: pb.RegisterWorkerRequest, context: grpc.ServicerContext
    ) -> pb.RegisterWorkerResponse:
        worker = self._caller(context)
        rings = [wire.geometry_of(ring) for ring in request.rings]
        registered = self._store.register_worker(
            worker, request.slots, request.window_bytes, request.staging_bytes, rings
        )
        return pb.RegisterWorkerResponse(
            worker_id=registered.worker_id,
            transfer=self._broker.give(worker.token, registered.descriptors),
            pack_tokens=self._config.pack_tokens,
            extent_blocks=self._config.extent_blocks,
            window_kind=self._config.window,
        )

    def Heartbeat(
        self, request: Iterator[pb.HeartbeatRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.HeartbeatResponse]:
        with contextlib.suppress(grpc.RpcError):  # the call was cut: by the worker's death or by the daemon's end
            for beat in request:
                yield pb.HeartbeatResponse(sent_ns=beat.sent_ns, draining=self._store.draining.is_set())

    def OpenSession(self, request: pb.OpenSessionRequest, context: grpc.ServicerContext) -> pb.OpenSessionResponse:
        layout = wire.layout_of(request.layout)
        session = self._store.open_session(self._caller(context), layout, request.declared_max_tokens)
        return pb.OpenSessionResponse(session_id=session.session_id)

    def ForkSession(self, request: pb.ForkSessionRequest, context: grpc.ServicerContext) -> pb.ForkSessionResponse:
        fork = self._store.fork_session(self._caller(context), request.session_id)
        return pb.ForkSessionResponse(session_id=fork.session_id)

    def CloseSession(self, request: pb.CloseSessionRequest, context: grpc.ServicerContext) -> pb.CloseSessionResponse:
        self._store.close_session(self._caller(context), request.session_id)
        return pb.CloseSessionResponse()

    def LookupPrefix(self, request: pb.LookupPrefixRequest, context: grpc.ServicerContext) -> pb.LookupPrefixResponse:
        candidates = [wire.candidate_of(item) for item in request.candidates]
        packs = self._store.lookup_prefix(self._caller(context), request.fingerprint, candidates)
        return pb.LookupPrefixResponse(packs=[wire.ref_to(ref) for ref in packs])

    def AttachPacks(self, request: pb.AttachPacksRequest, context: grpc.ServicerContext) -> pb.AttachPacksResponse:
        refs = [wire.ref_of(pack) for pack in request.packs]
        return pb.AttachPacksResponse(tokens=self._store.attach(self._caller(context), request.session_id, refs))

    def BindSlot(self, request: pb.BindSlotRequest, context: grpc.ServicerContext) -> pb.BindSlotResponse:
        refs = [wire.ref_of(pack) for pack in request.packs]
        windows = np.array([(lane.offset, lane.places) for lane in request.windows], np.uint64).reshape(-1, 2)
        binding = self._store.bind(self._caller(context), request.session_id, request.slot, refs, windows)
        return pb.BindSlotResponse(epoch=binding.epoch, records=binding.session.tokens)

    def UnbindSlot(self, request: pb.UnbindSlotRequest, context: grpc.ServicerContext) -> pb.UnbindSlotResponse:
        self._store.unbind(self._caller(context), request.slot)
        return pb.UnbindSlotResponse()

    def ReservePack(self, request: pb.ReservePackRequest, context: grpc.ServicerContext) -> pb.ReservePackResponse:
        items = [wire.reservation_of(item) for item in request.packs]
        reserved = self._store.reserve(self._caller(context), request.session_id, items)
        return pb.ReservePackResponse(packs=[_reserved(item) for item in reserved])

    def CommitPack(self, request: pb.CommitPackRequest, context: grpc.ServicerContext) -> pb.CommitPackResponse:
        committed = self._store.commit(self._caller(context), request.session_id, list(request.upload_ids))
        return pb.CommitPackResponse(packs=[_committed(item) for item in committed])

    def AbortPack(self, request: pb.AbortPackRequest, context: grpc.ServicerContext) -> pb.AbortPackResponse:
        self._store.abort(self._caller(context), list(request.upload_ids))
        return pb.AbortPackResponse()

    def SealTail(self, request: pb.SealTailRequest, context: grpc.ServicerContext) -> pb.SealTailResponse:
        session = self._store.seal_tail(self._caller(context), request.session_id, request.upload_id)
        return pb.SealTailResponse(pack=wire.ref_to(session.packs[-1].ref), records=session.tokens)

    def PutSidecar(self, request: pb.PutSidecarRequest, context: grpc.ServicerContext) -> pb.PutSidecarResponse:
        worker = self._caller(context)
        with memory.Owned(self._broker.receive(worker.token, request.transfer)) as offered:
            content = memory.read(offered.fd)
        if len(content) != request.size:
            raise StoreError("INVALID_ARGUMENT", f"size {request.size}; the descriptor holds {len(content)} B")
        self._store.put_sidecar(worker, wire.sidecar_key_of(request.key), content)
        return pb.PutSidecarResponse()

    def GetSidecar(self, request: pb.GetSidecarRequest, context: grpc.ServicerContext) -> pb.GetSidecarResponse:
        worker = self._caller(context)
        content = self._store.get_sidecar(worker, wire.sidecar_key_of(request.key))
        transfer = self._broker.give(worker.token, [memory.of_bytes("kvstore-sidecar", content)])
        shape = self._store.map_shape(request.key.pack_id) if request.key.kind == "map" else ()
        return pb.GetSidecarResponse(transfer=transfer, size=len(content), shape=shape)

    def HintImportance(
        self, request: pb.HintImportanceRequest, context: grpc.ServicerContext
    ) -> pb.HintImportanceResponse:
        hints = [(wire.ref_of(item.pack), list(item.hot_records)) for item in request.packs]
        self._store.hint_importance(self._caller(context), request.session_id, hints)
        return pb.HintImportanceResponse()


class AdminService(admin_grpc.AdminServiceServicer):
    def __init__(self, store: Store, config: Config, pid: int) -> None:
        self._store = store
        self._config = config
        self._pid = pid

    def GetStatus(
        self, request: admin_pb.GetStatusRequest, context: grpc.ServicerContext
    ) -> admin_pb.GetStatusResponse:
        counters = self._store.counters()
        return admin_pb.GetStatusResponse(
            version=__version__,
            state="draining" if self._store.draining.is_set() else "serving",
            uptime_s=self._store.uptime_s,
            data_dir=str(self._config.data_dir),
            window_kind=self._config.window,
            workers=counters["workers"],
            sessions=counters["sessions"],
            packs=counters["packs"],
            pack_bytes=counters["pack_bytes"],
            nvme_bytes=self._config.nvme_bytes,
            dram_bytes=self._config.dram_bytes,
            counters=counters,
            pid=self._pid,
        )

    def GetConfig(
        self, request: admin_pb.GetConfigRequest, context: grpc.ServicerContext
    ) -> admin_pb.GetConfigResponse:
        return admin_pb.GetConfigResponse(values=self._config.values(), origins=self._config.origins)

    def ListSessions(
        self, request: admin_pb.ListSessionsRequest, context: grpc.ServicerContext
    ) -> admin_pb.ListSessionsResponse:
        return admin_pb.ListSessionsResponse(sessions=[_session(item) for item in self._store.sessions.all()])

    def DescribeSession(
        self, request: admin_pb.DescribeSessionRequest, context: grpc.ServicerContext
    ) -> admin_pb.DescribeSessionResponse:
        session = self._store.sessions.find(request.session_id)
        return admin_pb.DescribeSessionResponse(
            session=_session(session),
            fingerprint=session.layout.fingerprint,
            declared_max_tokens=session.declared_max_tokens,
            packs=[_pack(*self._store.described(row)) for row in list(session.packs)],
        )

    def ListPacks(
        self, request: admin_pb.ListPacksRequest, context: grpc.ServicerContext
    ) -> admin_pb.ListPacksResponse:
        limit = min(request.page_size or PAGE_SIZE_MAX, PAGE_SIZE_MAX)
        try:
            after = bytes.fromhex(request.page_token)
        except ValueError:
            raise StoreError("INVALID_ARGUMENT", "page_token is none of this service's") from None
        packs = self._store.packs(after, limit)
        token = packs[-1][0].ref.pack_id.hex() if len(packs) == limit else ""
        return admin_pb.ListPacksResponse(packs=[_pack(*item) for item in packs], next_page_token=token)

    def Verify(
        self, request: admin_pb.VerifyRequest, context: grpc.ServicerContext
    ) -> Iterator[admin_pb.VerifyResponse]:
        rows = self._store.packs_to_verify(list(request.pack_ids))
        for done, row in enumerate(rows, start=1):
            if not context.is_active():
                return
            bad_blocks, error = self._store.verify(row)
            yield admin_pb.VerifyResponse(
                pack_id=row.ref.pack_id,
                done=done,
                total=len(rows),
                bytes=row.file_bytes,
                bad_blocks=bad_blocks,
                error=error,
            )

    def Drain(self, request: admin_pb.DrainRequest, context: grpc.ServicerContext) -> admin_pb.DrainResponse:
        self._store.drain()
        return admin_pb.DrainResponse()


def _reserved(item: ReservedPack) -> pb.ReservedPack:
    if item.upload_id is None:
        status = pb.ItemStatus(code=code_pb2.ALREADY_EXISTS, message="the pack is stored already")
        return pb.ReservedPack(status=status, pack=wire.ref_to(item.pack))
    return pb.ReservedPack(status=pb.ItemStatus(), upload_id=item.upload_id, pack=wire.ref_to(item.pack))


def _committed(item: CommittedPack) -> pb.CommittedPack:
    if item.error is not None or item.pack is None:
        error = item.error or StoreError("INTERNAL", "no pack")
        return pb.CommittedPack(status=pb.ItemStatus(code=code_pb2.Code.Value(error.code), message=error.message))
    code = code_pb2.ALREADY_EXISTS if item.exists else code_pb2.OK
    return pb.CommittedPack(status=pb.ItemStatus(code=code), pack=wire.ref_to(item.pack))


def _session(session: Session) -> admin_pb.SessionSummary:
    packs = list(session.packs)
    return admin_pb.SessionSummary(
        session_id=session.session_id,
        tenant=session.worker.tenant,
        worker_id=session.worker.native_id or 0,
        worker_name=session.worker.name,
        tokens=session.tokens,
        packs=len(packs),
        bytes=sum(row.file_bytes for row in packs),
        slots=sorted(session.slots),
        age_s=time.monotonic() - session.opened_s,
    )


def _pack(row: PackRow, references: int, sidecars: list[str]) -> admin_pb.PackSummary:
    return admin_pb.PackSummary(
        pack_id=row.ref.pack_id,
        build=row.ref.build,
        parent=row.parent,
        tenant=row.tenant,
        tokens=row.ref.tokens,
        layers=row.layout.layers,
        lanes=row.layout.kinds[0].lanes,
        record_bytes=row.layout.kinds[0].record_bytes,
        bytes=row.file_bytes,
        references=references,
        created_s=row.created_s,
        sidecars=sidecars,
    )
