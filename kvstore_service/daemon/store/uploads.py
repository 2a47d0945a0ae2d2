"""Uploads: packs between reservation and commit. Nothing of an upload is visible to anyone before its row."""

import hashlib
import hmac
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvstore_service._native import BLOCK_BYTES
from kvstore_service.daemon import native
from kvstore_service.daemon.config import Config
from kvstore_service.daemon.disk.ballast import Ballast, free_bytes
from kvstore_service.daemon.disk.builds import new_build
from kvstore_service.daemon.disk.catalog import Catalog
from kvstore_service.daemon.disk.files import remove_file, sync_directory
from kvstore_service.daemon.disk.open_packs import OpenPacks
from kvstore_service.daemon.store.claims import Claims
from kvstore_service.daemon.store.leases import Leases
from kvstore_service.daemon.store.registry import Session, Worker
from kvstore_service.daemon.store.room import Room, full
from kvstore_service.shared.types import (
    DIGEST_BYTES,
    HASH_BLOCK_TOKENS,
    LEARNT,
    NO_PARENT,
    PACK_ID_BYTES,
    CommittedPack,
    PackRef,
    PackReservation,
    PackRow,
    ReservedPack,
    StoreError,
)

UPLOADS_MAX = 4096
UPLOADS_PER_USER = 2048
UPLOADS_PER_WORKER = 1024
SHARE_PER_USER = 0.75  # of nvme_bytes, in uploads at a time
MEMORY_PER_USER = 512 << 20  # of the daemon's, for uploads of about 400 GiB at a time
RETRY_S = 0.1  # when to ask again for a pack that another worker is writing
CRC_BYTES = 4
FRAME_BYTES = 4
_FINISH_THREADS = 4


@dataclass(frozen=True)
class Upload:
    upload_id: int
    worker: Worker
    session_id: str
    row: PackRow
    opened_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class DescribedUpload:
    """`missing`: segments that no STORE has filled yet; `idle_s`: since its worker made progress with any upload."""

    upload: Upload
    missing: int
    idle_s: float


class Uploads:
    """Callers hold the worker's lock; tables that workers share have their own."""

    def __init__(
        self,
        plane: native.DataPlane,
        catalog: Catalog,
        open_packs: OpenPacks,
        room: Room,
        leases: Leases,
        ballast: Ballast,
        config: Config,
    ) -> None:
        self._plane = plane
        self._catalog = catalog
        self._open_packs = open_packs
        self._room = room
        self._leases = leases
        self._ballast = ballast
        self._nvme_bytes = config.nvme_bytes
        self._pack_tokens = config.pack_tokens
        self._extent_blocks = config.extent_blocks
        self._ttl_s = config.upload_ttl_s
        self._lock = threading.Lock()
        self._uploads: dict[int, Upload] = {}
        self._continued: Counter[bytes] = Counter()  # open uploads by the pack that they continue
        self.claims = Claims(config.upload_stall_s)
        self._finishers = ThreadPoolExecutor(_FINISH_THREADS, thread_name_prefix="finish")

    def close(self) -> None:
        self._finishers.shutdown()

    def reserve(
        self, session: Session, reservations: Sequence[PackReservation], tenant_key: bytes, compete: bool = False
    ) -> list[ReservedPack]:
        """All of the chain or nothing. RESOURCE_EXHAUSTED before `nvme_bytes` would be exceeded.

        What another worker is writing gets no upload, unless `compete`."""
        rows = self._rows(session, reservations, tenant_key)
        names = [row.ref.pack_id for row in rows]
        self._leases.take(names, session.session_id, session.worker.uid)
        elsewhere = self.claims.take(session.worker, names, compete)
        winners = {name: self._served(name) for name in names}
        wanted = [row for row in rows if winners[row.ref.pack_id] is None and row.ref.pack_id not in elsewhere]
        self.claims.give_up(session.worker, [name for name in names if winners[name] is not None])
        try:
            self._check_share(session.worker, wanted)
            self._room.promise(session.worker.tenant, sum(row.file_bytes for row in wanted), seal=bool(session.slots))
            created = self._create_all(session, wanted)
        except BaseException:
            self.claims.give_up(session.worker, [row.ref.pack_id for row in wanted])
            raise
        uploads = {upload.row.ref.pack_id: upload.upload_id for upload in created}

        def reserved(row: PackRow) -> ReservedPack:
            name = row.ref.pack_id
            if (winner := winners[name]) is not None:
                return ReservedPack(winner.ref, None)
            return ReservedPack(row.ref, uploads.get(name), RETRY_S if name in elsewhere else None)

        return [reserved(row) for row in rows]

    def _check_share(self, worker: Worker, wanted: Sequence[PackRow]) -> None:
        """RESOURCE_EXHAUSTED where one worker or user would have too much of the store in uploads."""
        with self._lock:
            mine = [upload for upload in self._uploads.values() if upload.worker.uid == worker.uid]
            own = sum(upload.worker is worker for upload in mine)
            for count, limit, subject in (
                (own, UPLOADS_PER_WORKER, "uploads of a worker"),
                (len(mine), UPLOADS_PER_USER, "uploads of a user"),
                (len(self._uploads), UPLOADS_MAX, "uploads"),
            ):
                if count + len(wanted) > limit:
                    raise full(subject, f"{count} are open and {len(wanted)} more are asked for; at most {limit}")
            rows = [upload.row for upload in mine]
            held_bytes, more_bytes = (
                sum(memory_bytes(row, self._extent_blocks) for row in some) for some in (rows, wanted)
            )
            if held_bytes + more_bytes > MEMORY_PER_USER:
                raise full(
                    "memory of uploads",
                    f"open uploads of this user take {held_bytes} B of the daemon's memory, {more_bytes} B more are "
                    f"asked for, at most {MEMORY_PER_USER} B may be; commit or abort them, or reserve less at once",
                )
            open_bytes, more_bytes = (sum(row.file_bytes for row in some) for some in (rows, wanted))
            if open_bytes and open_bytes + more_bytes > SHARE_PER_USER * self._nvme_bytes:
                most = int(SHARE_PER_USER * self._nvme_bytes)
                raise full(
                    "uploads",
                    f"{open_bytes} B are in open uploads of this user, at most {most} B may be; commit or abort them",
                )

    def sweep(self) -> int:
        """Looks at every worker's progress and aborts the uploads of those that have made none for `ttl_s`.
        Returns how many."""
        with self._lock:
            by_worker: dict[Worker, list[Upload]] = {}
            for upload in self._uploads.values():
                by_worker.setdefault(upload.worker, []).append(upload)
        self.claims.forget_others(by_worker)
        expired = 0
        for worker, uploads in by_worker.items():
            looks = tuple((upload.upload_id, self._missing(upload)) for upload in uploads)
            idle_s = self.claims.looked(worker, looks)
            # A worker whose lock is held is in a call of its own, such as a commit: that is progress.
            if idle_s > self._ttl_s and worker.lock.acquire(blocking=False):
                try:
                    expired += len(uploads)
                    self._discard([self._uploads[u.upload_id] for u in uploads if u.upload_id in self._uploads])
                finally:
                    worker.lock.release()
        return expired

    def _missing(self, upload: Upload) -> int:
        try:
            with native.errors():
                return self._plane.upload_missing(upload.upload_id)
        except StoreError:
            return 0  # it has just ended

    def described(self) -> list[DescribedUpload]:
        """Every open upload, the oldest first."""
        with self._lock:
            found = list(self._uploads.values())
        return [DescribedUpload(item, self._missing(item), self.claims.idle_s(item.worker)) for item in found]

    def continues(self, name: bytes) -> bool:
        """Whether an open upload continues the pack."""
        with self._lock:
            return self._continued[name] > 0

    def commit(self, worker: Worker, upload_ids: Sequence[int]) -> list[CommittedPack]:
        """Finishes each upload, syncs the directory once and writes all rows in one transaction.

        Per item: committed, or the winner if another commit of the id was first, or an error. An upload that lacks
        segments or its parent stays, to be completed or aborted; one whose file could not be made durable is gone."""
        uploads = [self._owned(worker, upload_id) for upload_id in upload_ids]
        if len(set(upload_ids)) != len(upload_ids):
            raise StoreError("INVALID_ARGUMENT", "the same upload stands twice in one commit")
        results: dict[int, CommittedPack] = {}
        ready: list[Upload] = []
        for upload in uploads:
            early = self._examine(upload, ready)
            if early is None:
                ready.append(upload)
            else:
                results[upload.upload_id] = early
        finished: list[Upload] = []
        errors = list(self._finishers.map(self._finish, ready))
        try:
            for upload, error in zip(ready, errors, strict=True):
                error = error or self._parent_error(upload, finished)
                if error is None:
                    finished.append(upload)
                else:
                    self._settle(upload, won=False)
                    results[upload.upload_id] = CommittedPack(None, error=error)
        except BaseException:
            for upload in ready:  # the data plane knows them no more
                self._settle(upload, won=False)
            raise
        for upload, winner in zip(finished, self._publish(finished), strict=True):
            if winner is None:
                self._settle(upload, won=False)
                results[upload.upload_id] = CommittedPack(None, error=_orphaned(upload.row.parent))
                continue
            exists = winner.ref.build != upload.row.ref.build
            results[upload.upload_id] = CommittedPack(winner.ref, exists=exists)
            self._settle(upload, won=not exists)
        return [results[upload_id] for upload_id in upload_ids]

    def _publish(self, finished: Sequence[Upload]) -> list[PackRow | None]:
        """Directory, then rows: from here on the packs are served."""
        if not finished:
            return []
        try:
            sync_directory(self._catalog.packs_dir)
            rows = [upload.row for upload in finished]
            for upload in finished:
                self._leases.take([upload.row.ref.pack_id], upload.session_id, upload.worker.uid)
            with self._room.storing() as unpromise:
                winners = self._ballast.behind(lambda: self._catalog.commit_packs(rows))
                for upload in finished:
                    self._end(upload, unpromise)
            return winners
        except BaseException:
            for upload in finished:
                self._settle(upload, won=False)
            raise

    def abort(self, worker: Worker, upload_ids: Sequence[int]) -> None:
        """Removes what is still open of these; an upload that has ended needs nothing."""
        with self._lock:
            found = [self._uploads[name] for name in dict.fromkeys(upload_ids) if name in self._uploads]
        self._discard([upload for upload in found if upload.worker is worker])

    def row(self, worker: Worker, upload_id: int) -> PackRow:
        """What an upload of this worker becomes with its commit."""
        return self._owned(worker, upload_id).row

    def forget(self, worker: Worker) -> None:
        """After the data plane has dropped the worker, and its uploads' files with it."""
        with self._lock:
            lost = [upload for upload in self._uploads.values() if upload.worker is worker]
        self.claims.forget(worker)
        for upload in lost:
            self._settle(upload, won=False)

    def open_count(self) -> int:
        with self._lock:
            return len(self._uploads)

    def promised(self) -> tuple[int, dict[Path, int]]:
        """(bytes set aside, files of open uploads with the bytes that each will have)."""
        with self._room.still() as promised_bytes, self._lock:
            return promised_bytes, {self._path(u.row): u.row.file_bytes for u in self._uploads.values()}

    def _rows(self, session: Session, reservations: Sequence[PackReservation], tenant_key: bytes) -> list[PackRow]:
        """What the reservations would become, with fresh builds; checks the chain."""
        rows: dict[bytes, PackRow] = {}
        parent_id = NO_PARENT
        for item in reservations:
            parent_id = item.parent or parent_id
            _check(item, self._pack_tokens)
            parent_end = self._end_of(session.worker, parent_id, rows)
            if parent_end != item.first_token:
                raise StoreError("INVALID_ARGUMENT", f"first_token {item.first_token}: the parent ends at {parent_end}")
            name = pack_id(tenant_key, parent_id, session.layout.fingerprint, item.token_digest)
            build = new_build(tenant_key, name)
            spec = native.pack_spec(name, build, parent_id, session.layout, item.tokens, self._extent_blocks)
            rows[name] = PackRow(
                PackRef(name, build, item.first_token, item.tokens), parent_id, session.layout,
                session.worker.tenant, spec.file_bytes, record_order=item.record_order,
            )  # fmt: skip
            parent_id = name
        if len(rows) != len(reservations):
            raise StoreError("INVALID_ARGUMENT", "the same pack stands twice in one reservation")
        return list(rows.values())

    def _end_of(self, worker: Worker, name: bytes, rows: dict[bytes, PackRow]) -> int:
        if name == NO_PARENT:
            return 0
        row = rows.get(name) or self._served(name)
        if row is None:
            with self._lock:
                open_rows = (u.row for u in self._uploads.values() if u.row.ref.pack_id == name)
                row = next(open_rows, None)
        if row is None or row.tenant != worker.tenant:
            raise StoreError(
                "NOT_FOUND", f"parent {name.hex()} is neither stored nor being written", reason="PARENT_NOT_STORED"
            )
        return row.ref.end

    def _served(self, name: bytes) -> PackRow | None:
        return self._catalog.served(name)

    def _create_all(self, session: Session, rows: Sequence[PackRow]) -> list[Upload]:
        """All or none; what was promised for none is given back. A full disk is evicted for, once."""
        wanted_bytes = sum(row.file_bytes for row in rows)
        for last in (False, True):
            created: list[Upload] = []
            try:
                self._room.clear_disk(wanted_bytes)
                for row in rows:
                    created.append(self._create(session, row))
                return created
            except BaseException as error:
                for upload in created:
                    self._drop(upload)
                no_space = isinstance(error, StoreError) and free_bytes(self._catalog.packs_dir) < wanted_bytes
                if last or not no_space:
                    self._room.unpromise(session.worker.tenant, wanted_bytes)
                    raise
        raise AssertionError("the last try returns or raises")

    def _drop(self, upload: Upload) -> None:
        """An upload of a reservation that failed; its bytes stay promised."""
        with self._lock:
            self._pop(upload)
        self._abort(upload.upload_id)

    def _abort(self, upload_id: int) -> None:
        """After an error, which is the one to tell. What a copy thread does not give up goes with its worker."""
        with suppress(StoreError), native.errors():
            self._plane.abort_upload(upload_id)

    def _create(self, session: Session, row: PackRow) -> Upload:
        worker, ref = session.worker, row.ref
        spec = native.pack_spec(
            ref.pack_id, ref.build, row.parent, row.layout, ref.tokens, self._extent_blocks, row.record_order
        )
        assert worker.native_id is not None
        with native.errors():
            upload_id = self._plane.create_upload(str(self._path(row)), spec)
            try:
                self._plane.own_upload(worker.native_id, upload_id)
            except BaseException:  # its ring is poisoned, for one, and its connection lives on
                self._abort(upload_id)
                raise
        upload = Upload(upload_id, worker, session.session_id, row)
        with self._lock:
            self._uploads[upload_id] = upload
            self._continued[row.parent] += 1
        return upload

    def _examine(self, upload: Upload, ready: Sequence[Upload]) -> CommittedPack | None:
        """An answer that needs no file: another commit won, or the upload cannot be committed yet."""
        if (winner := self._served(upload.row.ref.pack_id)) is not None:
            self._discard([upload])
            return CommittedPack(winner.ref, exists=True)
        try:
            with native.errors():
                missing = self._plane.upload_missing(upload.upload_id)
        except StoreError as error:
            return CommittedPack(None, error=error)
        if missing:
            reason = f"upload {upload.upload_id} lacks {missing} segments; store them first"
            return CommittedPack(None, error=StoreError("FAILED_PRECONDITION", reason, reason="UPLOAD_INCOMPLETE"))
        orphan = self._parent_error(upload, ready)
        return CommittedPack(None, error=orphan) if orphan is not None else None

    def _parent_error(self, upload: Upload, batch: Sequence[Upload]) -> StoreError | None:
        parent = upload.row.parent
        if parent == NO_PARENT or any(other.row.ref.pack_id == parent for other in batch) or self._served(parent):
            return None
        return _orphaned(parent)

    def _finish(self, upload: Upload) -> StoreError | None:
        """Makes the file durable, or removes it and says why: after a failed write nothing of it can be trusted."""
        try:
            with native.errors():
                handle = self._plane.finish_upload(upload.upload_id)
            if handle:
                self._open_packs.adopt(upload.row, handle)
        except StoreError as error:
            self._abort(upload.upload_id)
            return error
        return None

    def _settle(self, upload: Upload, won: bool) -> None:
        self._end(upload, self._room.unpromise)
        if not won:
            self._open_packs.retire(upload.row)
            remove_file(self._path(upload.row))

    def _pop(self, upload: Upload) -> bool:
        """For a caller that holds the lock. False if it has ended already."""
        if self._uploads.pop(upload.upload_id, None) is None:
            return False
        self._continued[upload.row.parent] -= 1
        if not self._continued[upload.row.parent]:
            del self._continued[upload.row.parent]
        return True

    def _end(self, upload: Upload, unpromise: Callable[[str, int], None]) -> None:
        with self._lock:
            if not self._pop(upload):
                return
        unpromise(upload.row.tenant, upload.row.file_bytes)
        self.claims.give_up(upload.worker, [upload.row.ref.pack_id])

    def _discard(self, uploads: Sequence[Upload]) -> None:
        for upload in uploads:
            with native.errors():
                self._plane.abort_upload(upload.upload_id)
            self._settle(upload, won=False)

    def _owned(self, worker: Worker, upload_id: int) -> Upload:
        with self._lock:
            upload = self._uploads.get(upload_id)
        if upload is None or upload.worker is not worker:
            raise StoreError("NOT_FOUND", f"upload {upload_id} is not open for this worker", reason="UPLOAD_UNKNOWN")
        return upload

    def _path(self, row: PackRow) -> Path:
        return self._catalog.packs_dir / row.file


def pack_id(tenant_key: bytes, parent: bytes, fingerprint: bytes, token_digest: bytes) -> bytes:
    """The identity of a pack: what was computed, from what, for whom."""
    return hmac.new(tenant_key, parent + fingerprint + token_digest, hashlib.sha256).digest()


def memory_bytes(row: PackRow, extent_blocks: int) -> int:
    """What the data plane holds of the upload: a checksum for each block, a frame's number for each extent, a state for
    each segment."""
    blocks, segments = row.file_bytes // BLOCK_BYTES, row.layout.layers * sum(kind.lanes for kind in row.layout.kinds)
    return blocks * CRC_BYTES + blocks // extent_blocks * FRAME_BYTES + segments


def _check(item: PackReservation, pack_tokens: int) -> None:
    if not 0 < item.tokens <= pack_tokens or item.tokens % HASH_BLOCK_TOKENS:
        raise StoreError(
            "INVALID_ARGUMENT",
            f"tokens {item.tokens}: a pack has a multiple of {HASH_BLOCK_TOKENS}, at most {pack_tokens}",
        )
    if not 0 <= item.record_order < LEARNT:
        raise StoreError("INVALID_ARGUMENT", f"record_order {item.record_order}: 0..{LEARNT - 1}")
    if len(item.token_digest) != DIGEST_BYTES or len(item.parent) not in (0, PACK_ID_BYTES):
        raise StoreError("INVALID_ARGUMENT", f"token_digest has {DIGEST_BYTES} bytes, parent none or {PACK_ID_BYTES}")


def _orphaned(parent: bytes) -> StoreError:
    return StoreError(
        "FAILED_PRECONDITION",
        f"parent {parent.hex()} is not stored; commit it before or with this one",
        reason="PARENT_NOT_STORED",
    )
