"""Open packs: a handle of the data plane per pack in use, and a bounded number of idle ones that keep their frames."""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvstore_service.daemon import native
from kvstore_service.daemon.disk.catalog import Catalog
from kvstore_service.shared.types import PackRow, StoreError


@dataclass
class _OpenPack:
    handle: int
    holders: int = 0
    retired: bool = False


class OpenPacks:
    """Thread-safe. A pack's frames outlive its last holder until `idle_max` others were used after it."""

    def __init__(self, plane: native.DataPlane, catalog: Catalog, idle_max: int) -> None:
        self._plane = plane
        self._catalog = catalog
        self._idle_max = idle_max
        self._lock = threading.Lock()
        self._open: dict[bytes, _OpenPack] = {}  # by build
        self._idle: OrderedDict[bytes, None] = OrderedDict()

    def acquire(self, row: PackRow) -> int:
        """The pack's handle, opened if need be. DATA_LOSS, and a mark, if its file is not what was committed."""
        build = row.ref.build
        with self._lock:
            pack = self._open.get(build)
            if pack is None:
                pack = self._open[build] = _OpenPack(self._open_file(row))
            self._idle.pop(build, None)
            pack.holders += 1
            return pack.handle

    def release(self, row: PackRow) -> None:
        with self._lock:
            pack = self._open[row.ref.build]
            pack.holders -= 1
            self._found_damaged(row, pack)
            if pack.holders == 0:
                self._idle[row.ref.build] = None
            while len(self._idle) > self._idle_max:
                build, _ = self._idle.popitem(last=False)
                self._close(build)
            if pack.retired and pack.holders == 0:
                self._close(row.ref.build)

    def retire(self, row: PackRow) -> None:
        """The pack's file is gone: its handle goes too, now or with its last holder."""
        with self._lock:
            pack = self._open.get(row.ref.build)
            if pack is None:
                return
            pack.retired = True
            if pack.holders == 0:
                self._close(row.ref.build)

    def _close(self, build: bytes) -> None:
        self._idle.pop(build, None)
        pack = self._open.pop(build, None)
        if pack is not None:
            with native.errors():
                self._plane.close_pack(pack.handle)

    def holders(self) -> tuple[int, int]:
        """(open packs, holders of all of them)."""
        with self._lock:
            return len(self._open), sum(pack.holders for pack in self._open.values())

    def check(self, row: PackRow) -> None:
        """DATA_LOSS, and a mark, if a read of the open pack has met a block that fails its check."""
        with self._lock:
            pack = self._open.get(row.ref.build)
            if pack is not None and self._found_damaged(row, pack):
                raise StoreError(
                    "DATA_LOSS", f"pack {row.ref.pack_id.hex()} is damaged; write it again", reason="PACK_DAMAGED"
                )

    def _found_damaged(self, row: PackRow, pack: _OpenPack) -> bool:
        damaged = self._plane.pack_damaged(pack.handle)
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

    def _open_file(self, row: PackRow) -> int:
        try:
            with native.errors():
                handle = self._plane.open_pack(str(self._catalog.packs_dir / row.file))
                spec = self._plane.pack_spec(handle)
        except StoreError as error:
            if error.code in ("DATA_LOSS", "NOT_FOUND"):
                if not self._catalog.mark_damaged(row, error.message):
                    raise StoreError("NOT_FOUND", f"pack {row.ref.pack_id.hex()} is not stored any more") from error
                raise StoreError("DATA_LOSS", f"pack {row.ref.pack_id.hex()}: {error.message}") from error
            raise
        if (spec.pack_id, spec.build, spec.tokens) != (row.ref.pack_id, row.ref.build, row.ref.tokens):
            self._plane.close_pack(handle)
            self._catalog.mark_damaged(row, "its file is another pack's")
            raise StoreError("DATA_LOSS", f"pack {row.ref.pack_id.hex()}: its file is another pack's")
        return handle
