"""Open packs: a handle of the data plane per pack in use, and a bounded number of idle ones that keep their frames.

The lock guards the table only. A file is opened and closed outside it, so that a slow disk delays nobody but those who
want that file; they wait, up to a deadline, for whoever opens or closes it.
"""

import logging
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from kvstore_service.daemon import directories, native
from kvstore_service.daemon.disk.catalog import Catalog
from kvstore_service.daemon.logs import event
from kvstore_service.shared.types import PackRow, StoreError, uid_of

OPEN_WAIT_S = 10.0
# Another try may succeed; any other code says that the file is not what was committed.
_PASSING = ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "INTERNAL")

log = logging.getLogger("kvstored.open_packs")


@dataclass
class _OpenPack:
    """Of `row`. `handle` is None while the file is being opened; `closing` is final."""

    row: PackRow
    handle: int | None = None
    holders: int = 0
    retired: bool = False
    closing: bool = False

    @property
    def ready(self) -> bool:
        return self.handle is not None and not self.closing


class OpenPacks:
    """Thread-safe. A pack's frames outlive its last holder until `idle_max` others were used after it."""

    def __init__(self, plane: native.DataPlane, catalog: Catalog, idle_max: int) -> None:
        self._plane = plane
        self._catalog = catalog
        self._idle_max = idle_max
        self._changed = threading.Condition()
        self._open: dict[bytes, _OpenPack] = {}  # by build
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        catalog.on_gone = self.retire

    def acquire(self, row: PackRow) -> int:
        """The pack's handle, opened if need be. DATA_LOSS, and a mark, if its file is not what was committed;
        UNAVAILABLE if that takes too long."""
        build = row.ref.build
        with self._changed:
            if not self._changed.wait_for(lambda: build not in self._open or self._open[build].ready, OPEN_WAIT_S):
                reason = f"pack {row.ref.pack_id.hex()} has been opening or closing for {OPEN_WAIT_S:.0f} s"
                raise StoreError("UNAVAILABLE", f"{reason}; is the disk slow?", retry_after_s=1.0)
            pack = self._open.get(build)
            if pack is not None and pack.handle is not None:
                self._idle.pop(build, None)
                pack.holders += 1
                return pack.handle
            pack = self._open[build] = _OpenPack(row)
        try:
            handle = self._open_file(row)
        except BaseException:
            with self._changed:
                del self._open[build]
                self._changed.notify_all()
            raise
        with self._changed:
            pack.handle, pack.holders = handle, 1
            self._changed.notify_all()
            return handle

    def adopt(self, row: PackRow, handle: int) -> None:
        """A pack that is open, and idle: its build is nobody else's yet. `retire` it if it is not committed."""
        with self._changed:
            self._open[row.ref.build] = _OpenPack(row, handle)
            ending = self._rest(row.ref.build)
        for build in ending:
            self._close(build)

    def release(self, row: PackRow) -> None:
        self._found_damaged(row)
        with self._changed:
            pack = self._open[row.ref.build]
            pack.holders -= 1
            if pack.holders == 0 and pack.retired:
                pack.closing = True
                ending = [row.ref.build]
            else:
                ending = self._rest(row.ref.build) if pack.holders == 0 else []
        for build in ending:
            self._close(build)

    def _rest(self, idle: bytes) -> list[bytes]:
        """With the lock held: one more is idle. Returns those that the caller has to close."""
        self._idle[idle] = None
        ending: list[bytes] = []
        while len(self._idle) > self._idle_max:
            build, _ = self._idle.popitem(last=False)
            self._open[build].closing = True
            ending.append(build)
        return ending

    def retire(self, row: PackRow) -> None:
        """The pack's file is gone: its handle goes too, now or with its last holder."""
        build = row.ref.build
        with self._changed:
            pack = self._open.get(build)
            if pack is None:
                return
            pack.retired = True
            if pack.holders > 0 or not pack.ready:
                return
            self._idle.pop(build, None)
            pack.closing = True
        self._close(build)

    def _close(self, build: bytes) -> None:
        """Of a pack that is marked as closing. Its file is read only: an error is told and loses nothing."""
        handle = self._open[build].handle
        assert handle is not None
        try:
            with native.errors():
                self._plane.close_pack(handle)
        except StoreError as error:
            event(log, logging.ERROR, "pack not closed", handle=handle, error=error.message)
        finally:
            with self._changed:
                del self._open[build]
                self._changed.notify_all()

    def idle(self) -> list[PackRow]:
        """Open packs that nobody holds, the longest idle first."""
        with self._changed:
            return [self._open[build].row for build in self._idle]

    def holders(self) -> tuple[int, int]:
        """(open packs, holders of all of them)."""
        with self._changed:
            return sum(pack.handle is not None for pack in self._open.values()), sum(
                pack.holders for pack in self._open.values()
            )

    def check(self, row: PackRow) -> None:
        """DATA_LOSS, and a mark, if what costs no read shows damage: a block that an open pack's readers have met, or
        a file that is gone, has another size or is none."""
        if self._found_damaged(row):
            raise StoreError(
                "DATA_LOSS", f"pack {row.ref.pack_id.hex()} is damaged; write it again", reason="PACK_DAMAGED"
            )
        with self._changed:
            known = row.ref.build in self._open
        if not known:
            self._check_file(row)

    def probe(self, row: PackRow) -> None:
        """`check`, and the file's head and checksum table as they are read when it is opened."""
        self.acquire(row)
        self.release(row)
        self.check(row)

    def _found_damaged(self, row: PackRow) -> bool:
        with self._changed:
            pack = self._open.get(row.ref.build)
            damaged = pack is not None and pack.ready and self._plane.pack_damaged(pack.handle or 0)
        if damaged:
            self._catalog.mark_damaged(row, "a block that was read fails its checksum")
        return damaged

    @contextmanager
    def using(self, row: PackRow) -> Iterator[int]:
        handle = self.acquire(row)
        try:
            yield handle
        except StoreError as error:
            if error.code == "DATA_LOSS":
                self._catalog.mark_damaged(row, error.message)
            raise
        finally:
            self.release(row)

    def _check_file(self, row: PackRow) -> None:
        try:
            held = os.lstat(self._catalog.packs_dir / row.file)
        except FileNotFoundError:
            self._refuse(row, "its file is gone")
        if not stat.S_ISREG(held.st_mode):
            self._refuse(row, f"in place of its file stands {directories.what_is(held.st_mode)}")
        if held.st_size != row.file_bytes:
            self._refuse(row, f"its file has {held.st_size} B, not {row.file_bytes}: it ends before its last block")

    def _refuse(self, row: PackRow, reason: str) -> NoReturn:
        if not self._catalog.mark_damaged(row, reason):
            raise StoreError("NOT_FOUND", f"pack {row.ref.pack_id.hex()} is not stored any more")
        raise StoreError("DATA_LOSS", f"pack {row.ref.pack_id.hex()}: {reason}")

    def _open_file(self, row: PackRow) -> int:
        self._check_file(row)
        try:
            with native.errors():
                handle = self._plane.open_pack(str(self._catalog.packs_dir / row.file), uid_of(row.tenant))
                spec = self._plane.pack_spec(handle)
        except StoreError as error:
            if error.code in _PASSING:
                raise
            self._refuse(row, error.message)
        if (spec.pack_id, spec.build, spec.tokens) != (row.ref.pack_id, row.ref.build, row.ref.tokens):
            self._plane.close_pack(handle)
            self._refuse(row, "its file is another pack's")
        return handle
