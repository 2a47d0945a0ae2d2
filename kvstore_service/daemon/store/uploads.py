"""Uploads: packs between reservation and commit. Nothing of an upload is visible to anyone before its row."""

import hashlib
import hmac
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvstore_service.daemon import native
from kvstore_service.daemon.disk.catalog import Catalog, remove_file, sync_directory
from kvstore_service.daemon.store.registry import Session, Worker
from kvstore_service.shared.types import (
    BUILD_BYTES,
    DIGEST_BYTES,
    HASH_BLOCK_TOKENS,
    NO_PARENT,
    PACK_ID_BYTES,
    CommittedPack,
    PackRef,
    PackReservation,
    PackRow,
    ReservedPack,
    StoreError,
    Violation,
)

UPLOADS_MAX = 2048
_FINISH_THREADS = 4


@dataclass(frozen=True)
class Upload:
    upload_id: int
    worker: Worker
    row: PackRow


class Uploads:
    """Callers hold the worker's lock; tables that workers share have their own."""

    def __init__(
        self, plane: native.DataPlane, catalog: Catalog, nvme_bytes: int, pack_tokens: int, extent_blocks: int
    ) -> None:
        self._plane = plane
        self._catalog = catalog
        self._nvme_bytes = nvme_bytes
        self._pack_tokens = pack_tokens
        self._extent_blocks = extent_blocks
        self._lock = threading.Lock()
        self._uploads: dict[int, Upload] = {}
        self._promised_bytes = 0
        self._finishers = ThreadPoolExecutor(_FINISH_THREADS, thread_name_prefix="finish")

    def close(self) -> None:
        self._finishers.shutdown()

    def reserve(
        self, session: Session, reservations: Sequence[PackReservation], tenant_key: bytes
    ) -> list[ReservedPack]:
        """All of the chain or nothing. RESOURCE_EXHAUSTED before `nvme_bytes` would be exceeded."""
        rows = self._rows(session, reservations, tenant_key)
        winners = [self._served(row.ref.pack_id) for row in rows]
        wanted = [row for row, winner in zip(rows, winners, strict=True) if winner is None]
        self.promise(sum(row.file_bytes for row in wanted))
        created: list[Upload] = []
        try:
            with self._lock:
                if len(self._uploads) + len(wanted) > UPLOADS_MAX:
                    raise _full("uploads", f"at most {UPLOADS_MAX} uploads")
            for row in wanted:
                created.append(self._create(session.worker, row))
        except BaseException:
            self._discard(created)
            self.unpromise(sum(row.file_bytes for row in wanted[len(created) :]))
            raise
        fresh = iter(created)
        return [
            ReservedPack(winner.ref, None) if winner else ReservedPack(row.ref, next(fresh).upload_id)
            for row, winner in zip(rows, winners, strict=True)
        ]

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
            return self._catalog.commit_packs([upload.row for upload in finished])
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
        for upload in lost:
            self._settle(upload, won=False)

    def promise(self, wanted_bytes: int) -> None:
        """Sets bytes of the disk tier aside until `unpromise`, or until their row counts them."""
        _, _, held_bytes = self._catalog.totals()
        with self._lock:
            if held_bytes + self._promised_bytes + wanted_bytes > self._nvme_bytes:
                raise _full(
                    "nvme_bytes",
                    f"{held_bytes} B stored and {self._promised_bytes} B reserved of {self._nvme_bytes} B; "
                    f"{wanted_bytes} B more do not fit",
                )
            self._promised_bytes += wanted_bytes

    def unpromise(self, size_bytes: int) -> None:
        with self._lock:
            self._promised_bytes -= size_bytes

    def open_count(self) -> int:
        with self._lock:
            return len(self._uploads)

    def promised(self) -> tuple[int, dict[Path, int]]:
        """(bytes set aside, files of open uploads with the bytes that each will have)."""
        with self._lock:
            return self._promised_bytes, {self._path(u.row): u.row.file_bytes for u in self._uploads.values()}

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
            build = secrets.token_bytes(BUILD_BYTES)
            spec = native.pack_spec(name, build, parent_id, session.layout, item.tokens, self._extent_blocks)
            rows[name] = PackRow(
                PackRef(name, build, item.first_token, item.tokens), parent_id, session.layout,
                session.worker.tenant, f"{name.hex()}-{build.hex()}.pack", spec.file_bytes,
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
                own = [u.row for u in self._uploads.values() if u.worker is worker and u.row.ref.pack_id == name]
            row = own[0] if own else None
        if row is None or row.tenant != worker.tenant:
            raise StoreError(
                "NOT_FOUND",
                f"parent {name.hex()} is neither stored nor being written by this worker",
                reason="PARENT_NOT_STORED",
            )
        return row.ref.end

    def _served(self, name: bytes) -> PackRow | None:
        return None if name in self._catalog.damaged else self._catalog.pack(name)

    def _create(self, worker: Worker, row: PackRow) -> Upload:
        ref = row.ref
        spec = native.pack_spec(ref.pack_id, ref.build, row.parent, row.layout, ref.tokens, self._extent_blocks)
        assert worker.native_id is not None
        with native.errors():
            upload_id = self._plane.create_upload(str(self._path(row)), spec)
            self._plane.own_upload(worker.native_id, upload_id)
        upload = Upload(upload_id, worker, row)
        with self._lock:
            self._uploads[upload_id] = upload
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
                self._plane.finish_upload(upload.upload_id)
        except StoreError as error:
            with suppress(StoreError), native.errors():  # the first error is the one to tell
                self._plane.abort_upload(upload.upload_id)
            return error
        return None

    def _settle(self, upload: Upload, won: bool) -> None:
        with self._lock:
            if self._uploads.pop(upload.upload_id, None) is None:
                return
            self._promised_bytes -= upload.row.file_bytes
        if not won:
            remove_file(self._path(upload.row))

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


def _check(item: PackReservation, pack_tokens: int) -> None:
    if not 0 < item.tokens <= pack_tokens or item.tokens % HASH_BLOCK_TOKENS:
        raise StoreError(
            "INVALID_ARGUMENT",
            f"tokens {item.tokens}: a pack has a multiple of {HASH_BLOCK_TOKENS}, at most {pack_tokens}",
        )
    if len(item.token_digest) != DIGEST_BYTES or len(item.parent) not in (0, PACK_ID_BYTES):
        raise StoreError("INVALID_ARGUMENT", f"token_digest has {DIGEST_BYTES} bytes, parent none or {PACK_ID_BYTES}")


def _orphaned(parent: bytes) -> StoreError:
    return StoreError(
        "FAILED_PRECONDITION",
        f"parent {parent.hex()} is not stored; commit it before or with this one",
        reason="PARENT_NOT_STORED",
    )


def _full(subject: str, description: str) -> StoreError:
    return StoreError(
        "RESOURCE_EXHAUSTED",
        description,
        retry_after_s=5.0,
        violations=[Violation(subject, description)],
        reason="QUOTA_EXCEEDED",
    )
