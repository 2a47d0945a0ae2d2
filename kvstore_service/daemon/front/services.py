"""StoreService and AdminService: messages in, one method of the store each, messages out."""

import json
import os
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
from google.rpc import code_pb2

from kvstore_service import __version__
from kvstore_service._proto import admin_service_pb2 as admin_pb
from kvstore_service._proto import admin_service_pb2_grpc as admin_grpc
from kvstore_service._proto import store_service_pb2 as pb
from kvstore_service._proto import store_service_pb2_grpc as pb_grpc
from kvstore_service.daemon import native
from kvstore_service.daemon.config import Config
from kvstore_service.daemon.disk.rows import PackFilter
from kvstore_service.daemon.front.broker import Broker
from kvstore_service.daemon.front.call import Call
from kvstore_service.daemon.store.events import Event
from kvstore_service.daemon.store.operation import DescribedPack, EvictedPack, TenantUse
from kvstore_service.daemon.store.registry import Session, Worker
from kvstore_service.daemon.store.store import Store
from kvstore_service.daemon.store.uploads import DescribedUpload
from kvstore_service.shared import memory, wire
from kvstore_service.shared.types import PACK_ID_BYTES, RECORD_ORDERS, CommittedPack, ReservedPack, StoreError

PAGE_SIZE_MAX = 1000
TRACE_BYTES = 1 << 20  # of a message, whole records or not
WATCH_TURN_S = 0.5  # between looks at whether the watcher is still there


class StoreService(pb_grpc.StoreServiceServicer):
    def __init__(self, store: Store, broker: Broker, config: Config) -> None:
        self._store = store
        self._broker = broker
        self._config = config

    def RegisterWorker(self, request: pb.RegisterWorkerRequest, context: Call) -> pb.RegisterWorkerResponse:
        worker = context.worker
        rings = [wire.geometry_of(ring) for ring in request.rings]
        registered = self._store.workers.register(
            worker, request.slots, request.window_bytes, request.staging_bytes, rings, request.wait_ms,
            request.window_kinds,
        )  # fmt: skip
        return pb.RegisterWorkerResponse(
            worker_id=registered.worker_id,
            transfer=self._broker.give_memory(worker.token, registered.descriptors),
            pack_tokens=self._config.pack_tokens,
            extent_blocks=self._config.extent_blocks,
            window_kind=registered.window_kind,
            gpu=registered.gpu,
        )

    def ServeRings(self, request: pb.ServeRingsRequest, context: Call) -> pb.ServeRingsResponse:
        self._store.workers.serve_rings(context.worker)
        return pb.ServeRingsResponse()

    def UnregisterWorker(self, request: pb.UnregisterWorkerRequest, context: Call) -> pb.UnregisterWorkerResponse:
        self._store.workers.unregister(context.worker, request.reason)
        self._broker.withdraw_memory(context.worker.token)
        return pb.UnregisterWorkerResponse()

    def OpenSession(self, request: pb.OpenSessionRequest, context: Call) -> pb.OpenSessionResponse:
        layout = wire.layout_of(request.layout)
        session = self._store.sessions.open(context.worker, layout, request.declared_max_tokens)
        self._keep(context, session)
        return pb.OpenSessionResponse(session_id=session.session_id)

    def ForkSession(self, request: pb.ForkSessionRequest, context: Call) -> pb.ForkSessionResponse:
        fork = self._store.sessions.fork(context.worker, request.session_id)
        self._keep(context, fork)
        return pb.ForkSessionResponse(session_id=fork.session_id)

    def _keep(self, context: Call, session: Session) -> None:
        """Nobody would ever close a session whose opener has left before it heard the id."""
        context.undo = lambda: self._store.sessions.close(session.worker, session.session_id)
        if not context.is_active():
            self._store.sessions.close(session.worker, session.session_id)
            context.require_active()

    def CloseSession(self, request: pb.CloseSessionRequest, context: Call) -> pb.CloseSessionResponse:
        self._store.sessions.close(context.worker, request.session_id)
        return pb.CloseSessionResponse()

    def LookupPrefix(self, request: pb.LookupPrefixRequest, context: Call) -> pb.LookupPrefixResponse:
        candidates = [wire.candidate_of(item) for item in request.candidates]
        packs = self._store.prefixes.lookup(context.worker, request.fingerprint, candidates, context.require_active)
        return pb.LookupPrefixResponse(packs=[wire.ref_to(ref) for ref in packs])

    def AttachPacks(self, request: pb.AttachPacksRequest, context: Call) -> pb.AttachPacksResponse:
        refs = [wire.ref_of(pack) for pack in request.packs]
        return pb.AttachPacksResponse(tokens=self._store.sessions.attach(context.worker, request.session_id, refs))

    def BindSlot(self, request: pb.BindSlotRequest, context: Call) -> pb.BindSlotResponse:
        refs = [wire.ref_of(pack) for pack in request.packs]
        windows = np.array([(lane.offset, lane.places) for lane in request.windows], np.uint64).reshape(-1, 2)
        binding = self._store.slots.bind(context.worker, request.session_id, request.slot, refs, windows)
        return pb.BindSlotResponse(epoch=binding.epoch, records=binding.session.tokens)

    def UnbindSlot(self, request: pb.UnbindSlotRequest, context: Call) -> pb.UnbindSlotResponse:
        self._store.slots.unbind(context.worker, request.slot)
        return pb.UnbindSlotResponse()

    def ReservePack(self, request: pb.ReservePackRequest, context: Call) -> pb.ReservePackResponse:
        items = [wire.reservation_of(item) for item in request.packs]
        reserved = self._store.packs.reserve(context.worker, request.session_id, items, request.compete)
        return pb.ReservePackResponse(packs=[_reserved(item) for item in reserved])

    def CommitPack(self, request: pb.CommitPackRequest, context: Call) -> pb.CommitPackResponse:
        committed = self._store.packs.commit(context.worker, request.session_id, list(request.upload_ids))
        return pb.CommitPackResponse(packs=[_committed(item) for item in committed])

    def AbortPack(self, request: pb.AbortPackRequest, context: Call) -> pb.AbortPackResponse:
        self._store.packs.abort(context.worker, list(request.upload_ids))
        return pb.AbortPackResponse()

    def SealTail(self, request: pb.SealTailRequest, context: Call) -> pb.SealTailResponse:
        session = self._store.packs.seal_tail(context.worker, request.session_id, request.upload_id)
        return pb.SealTailResponse(pack=wire.ref_to(session.packs[-1].ref), records=session.tokens)

    def PutSidecar(self, request: pb.PutSidecarRequest, context: Call) -> pb.PutSidecarResponse:
        worker = context.worker
        with memory.Owned(self._broker.receive(worker.token, request.transfer)) as offered:
            if request.size != (size_bytes := os.fstat(offered.fd).st_size):
                raise StoreError("INVALID_ARGUMENT", f"size {request.size}; the descriptor has {size_bytes} B")
            with memory.mapped(offered.fd) as content:
                self._store.indexes.put(worker, wire.sidecar_key_of(request.key), content, request.replace)
        return pb.PutSidecarResponse()

    def GetSidecar(self, request: pb.GetSidecarRequest, context: Call) -> pb.GetSidecarResponse:
        worker = context.worker
        key = wire.sidecar_key_of(request.key)
        size_bytes = self._store.indexes.size(worker, key)
        with self._broker.room(worker.token, size_bytes) as room:
            context.require_active()
            fd = self._store.indexes.get(worker, key)
            try:
                transfer = room.give([fd])
            except StoreError:
                os.close(fd)
                raise
        shape = self._store.indexes.map_shape(request.key.pack_id) if request.key.kind == "map" else ()
        return pb.GetSidecarResponse(transfer=transfer, size=size_bytes, shape=shape)

    def HintImportance(self, request: pb.HintImportanceRequest, context: Call) -> pb.HintImportanceResponse:
        hints = [(wire.ref_of(item.pack), item.hot_records) for item in request.packs]
        self._store.packs.hint_importance(context.worker, request.session_id, hints)
        return pb.HintImportanceResponse()


class AdminService(admin_grpc.AdminServiceServicer):
    def __init__(self, store: Store, broker: Broker, config: Config, pid: int, disk_cost: str) -> None:
        self._store = store
        self._broker = broker
        self._config = config
        self._pid = pid
        self._disk_cost = disk_cost

    def GetStatus(self, request: admin_pb.GetStatusRequest, context: Call) -> admin_pb.GetStatusResponse:
        counters = self._store.operation.counters()
        return admin_pb.GetStatusResponse(
            version=__version__,
            state="draining" if self._store.state.draining.is_set() else "serving",
            uptime_s=self._store.state.uptime_s,
            data_dir=str(self._config.data_dir),
            window_kind=self._store.state.plane.window_kinds[0],
            tier_policy=self._config.tier_policy,
            windows_refused=[f"{kind}: {reason}" for kind, reason in self._store.state.plane.windows_refused],
            workers=counters["workers"],
            sessions=counters["sessions"],
            packs=counters["packs"],
            pack_bytes=counters["pack_bytes"],
            nvme_bytes=self._config.nvme_bytes,
            dram_bytes=self._config.dram_bytes,
            counters=counters,
            pid=self._pid,
            disk_cost=self._disk_cost,
            times={
                name: admin_pb.Times(bounds_us=bounds_us, counts=counts, sum_us=sum_us)
                for name, (bounds_us, counts, sum_us) in self._store.state.plane.histograms().items()
            },
        )

    def GetConfig(self, request: admin_pb.GetConfigRequest, context: Call) -> admin_pb.GetConfigResponse:
        return admin_pb.GetConfigResponse(values=self._config.values(), origins=self._config.origins)

    def ListSessions(self, request: admin_pb.ListSessionsRequest, context: Call) -> admin_pb.ListSessionsResponse:
        return admin_pb.ListSessionsResponse(sessions=[_session(item) for item in self._store.state.registry.all()])

    def DescribeSession(
        self, request: admin_pb.DescribeSessionRequest, context: Call
    ) -> admin_pb.DescribeSessionResponse:
        session = self._store.state.registry.find(request.session_id)
        return admin_pb.DescribeSessionResponse(
            session=_session(session),
            fingerprint=session.layout.fingerprint,
            declared_max_tokens=session.declared_max_tokens,
            packs=[_pack(self._store.operation.described(row)) for row in list(session.packs)],
        )

    def ListPacks(self, request: admin_pb.ListPacksRequest, context: Call) -> admin_pb.ListPacksResponse:
        limit = min(request.page_size or PAGE_SIZE_MAX, PAGE_SIZE_MAX)
        operation = self._store.operation
        if request.pack_ids:
            return admin_pb.ListPacksResponse(packs=[_pack(item) for item in operation.named(request.pack_ids)])
        if request.beginning:
            text = request.beginning.lower()
            if set(text) - set("0123456789abcdef") or len(text) > 2 * PACK_ID_BYTES:
                raise StoreError("INVALID_ARGUMENT", f"beginning {text!r}; write at most 64 hex digits")
            return admin_pb.ListPacksResponse(packs=[_pack(item) for item in operation.beginning(text, limit)])
        try:
            after = bytes.fromhex(request.page_token)
        except ValueError:
            raise StoreError("INVALID_ARGUMENT", "page_token is none of this service's") from None
        wanted = PackFilter(
            tenant=request.tenant or None,
            damaged=request.damaged or None,
            pinned=request.pinned or None,
            used_before_s=time.time() - request.idle_s if request.idle_s else None,
        )
        packs, following = operation.packs(wanted, request.unused, after, limit)
        token = following.hex() if following is not None else ""
        return admin_pb.ListPacksResponse(packs=[_pack(item) for item in packs], next_page_token=token)

    def Pin(self, request: admin_pb.PinRequest, context: Call) -> admin_pb.PinResponse:
        self._store.operation.pin(request.pack_ids, pinned=True, ttl_s=request.ttl_s)
        return admin_pb.PinResponse()

    def Unpin(self, request: admin_pb.UnpinRequest, context: Call) -> admin_pb.UnpinResponse:
        self._store.operation.pin(request.pack_ids, pinned=False)
        return admin_pb.UnpinResponse()

    def Evict(self, request: admin_pb.EvictRequest, context: Call) -> Iterator[admin_pb.EvictResponse]:
        operation, done = self._store.operation, 0
        names = operation.to_evict(request.pack_ids, request.descendants, context.require_active)
        for step in operation.evict(names):
            done += len(step)
            yield admin_pb.EvictResponse(packs=[_evicted(item) for item in step], done=done, total=len(names))
            context.require_active()

    def Audit(self, request: admin_pb.AuditRequest, context: Call) -> admin_pb.AuditResponse:
        checks = [admin_pb.AuditCheck(name=c.name, ok=c.ok, detail=c.detail) for c in self._store.operation.audit()]
        return admin_pb.AuditResponse(checks=checks)

    def Verify(self, request: admin_pb.VerifyRequest, context: Call) -> Iterator[admin_pb.VerifyResponse]:
        total, rows = self._store.operation.packs_named_or_all(list(request.pack_ids))
        for done, row in enumerate(rows, start=1):
            if not context.is_active():
                return
            bad_blocks, error = self._store.operation.verify(row)
            yield admin_pb.VerifyResponse(
                pack_id=row.ref.pack_id,
                done=done,
                total=max(total, done),
                bytes=row.file_bytes,
                bad_blocks=bad_blocks,
                error=error,
            )

    def Retier(self, request: admin_pb.RetierRequest, context: Call) -> Iterator[admin_pb.RetierResponse]:
        total, rows = self._store.operation.packs_named_or_all(list(request.pack_ids))
        for done, row in enumerate(rows, start=1):
            if not context.is_active():
                return
            found = self._store.operation.retier(row, request.dry_run)
            yield admin_pb.RetierResponse(
                pack_id=row.ref.pack_id,
                done=done,
                total=max(total, done),
                code=code_pb2.Code.Value(found.error.code) if found.error else code_pb2.OK,
                message=found.error.message if found.error else "",
                runs=found.runs,
                before_us=found.before_us,
                after_us=found.after_us,
                bytes=found.bytes,
            )

    def Drain(self, request: admin_pb.DrainRequest, context: Call) -> admin_pb.DrainResponse:
        self._store.operation.drain()
        return admin_pb.DrainResponse()

    def SetQuota(self, request: admin_pb.SetQuotaRequest, context: Call) -> admin_pb.SetQuotaResponse:
        self._store.operation.set_quota(
            request.tenant,
            request.nvme_bytes if request.HasField("nvme_bytes") else None,
            request.dram_bytes if request.HasField("dram_bytes") else None,
        )
        return admin_pb.SetQuotaResponse()

    def ListQuotas(self, request: admin_pb.ListQuotasRequest, context: Call) -> admin_pb.ListQuotasResponse:
        return admin_pb.ListQuotasResponse(quotas=[_quota(item) for item in self._store.operation.quotas()])

    def ListWorkers(self, request: admin_pb.ListWorkersRequest, context: Call) -> admin_pb.ListWorkersResponse:
        uploads = Counter(item.upload.worker.token for item in self._store.operation.uploads())
        workers = [_worker(worker, uploads[worker.token]) for worker in self._store.operation.workers()]
        return admin_pb.ListWorkersResponse(workers=workers)

    def ListUploads(self, request: admin_pb.ListUploadsRequest, context: Call) -> admin_pb.ListUploadsResponse:
        return admin_pb.ListUploadsResponse(uploads=[_upload(item) for item in self._store.operation.uploads()])

    def KillWorker(self, request: admin_pb.KillWorkerRequest, context: Call) -> admin_pb.KillWorkerResponse:
        worker = self._store.operation.find_worker(request.worker)
        self._broker.end(worker.token)
        return admin_pb.KillWorkerResponse(worker=_worker(worker, 0))

    def WatchEvents(
        self, request: admin_pb.WatchEventsRequest, context: Call
    ) -> Iterator[admin_pb.WatchEventsResponse]:
        with self._store.state.events.watch(request.kinds) as watch:
            yield admin_pb.WatchEventsResponse(at_s=time.time(), kind="watch")  # from here on nothing is missed
            while True:
                context.require_active()
                if (event := watch.take(WATCH_TURN_S)) is not None:
                    yield _event(event, watch.dropped)

    def TraceAccesses(
        self, request: admin_pb.TraceAccessesRequest, context: Call
    ) -> Iterator[admin_pb.TraceAccessesResponse]:
        with self._store.operation.accesses(request.seconds) as turns:
            yield admin_pb.TraceAccessesResponse(fields=json.dumps(native.ACCESS_FIELDS))  # from here on all is heard
            for records, dropped in turns:
                context.require_active()
                for first in range(0, len(records), TRACE_BYTES) or (0,):
                    part = records[first : first + TRACE_BYTES]
                    yield admin_pb.TraceAccessesResponse(accesses=part, dropped=dropped)

    def Explain(self, request: admin_pb.ExplainRequest, context: Call) -> admin_pb.ExplainResponse:
        found = self._store.explain.explain(request.subject)
        findings = [admin_pb.Finding(subject=item.subject, answer=item.answer, detail=item.detail) for item in found]
        slots = [
            admin_pb.SlotWaits(
                worker_id=item.worker,
                slot=item.slot,
                session_id=item.session_id,
                ops=[admin_pb.OpWaits(op=name, **figures) for name, figures in item.ops.items() if figures["runs"]],
                lanes=[
                    admin_pb.LaneStalls(layer=layer, lane=lane, stalls=count, stalled_ns=all_ns, slowest_ns=slowest_ns)
                    for layer, lane, count, all_ns, slowest_ns in item.lanes
                ],
            )
            for item in self._store.explain.slots(request.subject)
        ]
        return admin_pb.ExplainResponse(findings=findings, slots=slots)


def _reserved(item: ReservedPack) -> pb.ReservedPack:
    if item.retry_after_s is not None:
        status = pb.ItemStatus(
            code=code_pb2.ABORTED,
            message="another worker is writing the pack; reserve it again",
            reason="UPLOAD_IN_PROGRESS",
            retry_after_ms=int(item.retry_after_s * 1e3),
        )
        return pb.ReservedPack(status=status, pack=wire.ref_to(item.pack))
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


def _evicted(item: EvictedPack) -> admin_pb.EvictedPack:
    if item.error is None:
        return admin_pb.EvictedPack(pack_id=item.pack_id, freed_bytes=item.freed_bytes)
    code = code_pb2.Code.Value(item.error.code)
    return admin_pb.EvictedPack(pack_id=item.pack_id, code=code, message=item.error.message)


def _pack(item: DescribedPack) -> admin_pb.PackSummary:
    row = item.row
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
        references=item.references,
        created_s=row.created_s,
        sidecars=item.sidecars,
        first_token=row.ref.first_token,
        pinned=item.pinned,
        damaged=item.damaged,
        last_used_s=item.last_used_s,
        record_order=RECORD_ORDERS[row.record_order],
    )


def _quota(item: TenantUse) -> admin_pb.Quota:
    return admin_pb.Quota(
        tenant=item.tenant,
        nvme_bytes=item.room.limit_bytes if item.room else 0,
        stored_bytes=item.room.stored_bytes if item.room else 0,
        reserved_bytes=item.room.promised_bytes if item.room else 0,
        dram_bytes=item.dram.limit_bytes,
        dram_used_bytes=item.dram.used_bytes,
        moved_bytes=item.dram.moved_bytes,
    )


def _worker(worker: Worker, uploads: int) -> admin_pb.WorkerSummary:
    return admin_pb.WorkerSummary(
        worker_id=worker.native_id or 0,
        name=worker.name,
        tenant=worker.tenant,
        pid=worker.pid,
        slots=worker.slots,
        rings=len(worker.rings),
        sessions=len(worker.sessions),
        uploads=uploads,
        age_s=time.monotonic() - worker.joined_s,
        operator=worker.operator,
    )


def _upload(item: DescribedUpload) -> admin_pb.UploadSummary:
    upload = item.upload
    return admin_pb.UploadSummary(
        upload_id=upload.upload_id,
        pack_id=upload.row.ref.pack_id,
        tenant=upload.row.tenant,
        pid=upload.worker.pid,
        worker_name=upload.worker.name,
        first_token=upload.row.ref.first_token,
        tokens=upload.row.ref.tokens,
        bytes=upload.row.file_bytes,
        missing_segments=item.missing,
        age_s=time.monotonic() - upload.opened_s,
        idle_s=item.idle_s,
    )


def _event(event: Event, dropped: int) -> admin_pb.WatchEventsResponse:
    return admin_pb.WatchEventsResponse(
        at_s=event.at_s,
        kind=event.kind,
        tenant=event.tenant,
        pack_id=event.pack_id,
        bytes=event.size_bytes,
        detail=event.detail,
        dropped=dropped,
    )
