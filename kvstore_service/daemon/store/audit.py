"""Audit: what must be equal, counted in two places. A check that fails shows a leak, a loss or a wrong count."""

import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from kvstore_service.daemon import native
from kvstore_service.daemon.disk import files
from kvstore_service.daemon.disk.catalog import Catalog
from kvstore_service.daemon.disk.open_packs import OpenPacks
from kvstore_service.daemon.store.registry import Registry, Worker
from kvstore_service.daemon.store.retier import UnderWay
from kvstore_service.daemon.store.uploads import Uploads

LISTED_MAX = 5
QUIET_S = 1.0
WRONG_MAX = 10_000  # after which a look ends: the check has failed
SETTLE_LOOKS = 4
SETTLE_PAUSE_S = 0.02


@dataclass(frozen=True)
class Check:
    """`detail` shows both sides of the equation."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class Audited:
    """The parts of a running store."""

    catalog: Catalog
    uploads: Uploads
    packs: OpenPacks
    registry: Registry
    plane: native.DataPlane
    lookups_begun: Callable[[], tuple[int, int]]
    rewritten: Callable[[], UnderWay]

    def checks(self) -> list[Check]:
        """Calls of workers pause while figures are read one after the other; rows and files are gone through while
        they go on."""
        with _quiet(self.registry.workers()):
            figures = [*self._promises(), *self._references(), *self._data_plane(), *self._calls()]
        return [*self._files(), *self._totals(), *figures]

    def _files(self) -> list[Check]:
        """Every row has its file, every file its row or its open upload. What is seen amid a commit or an eviction is
        looked at until it is settled."""
        totals = self.catalog.totals()
        wrong = _settled(self._is_wrong, self._rows_files())
        strange = _settled(self._is_strange, self._strange_files())
        damaged = [self.catalog.packs_dir / row.file for row, _ in self.catalog.damaged(LISTED_MAX)]
        return [
            Check("catalogue rows = files", not wrong, _listed(totals.packs, wrong, "packs", "without their file")),
            Check("files = rows + uploads", not strange, _listed(totals.packs, strange, "packs", "without a row")),
            Check("no pack is damaged", not damaged, _listed(totals.packs, damaged, "packs", "damaged")),
        ]

    def _rows_files(self) -> Iterator[Path]:
        """Files that are not as their rows say."""
        for name, size_bytes in self.catalog.census.pack_files():
            if _size_of(path := self.catalog.packs_dir / name) != size_bytes:
                yield path
        file = ""
        while rows := self.catalog.sidecars(file):
            file = rows[-1].file
            for row in rows:
                if _size_of(path := self.catalog.sidecars_dir / row.file) != row.file_bytes:
                    yield path

    def _strange_files(self) -> Iterator[Path]:
        census = self.catalog.census
        yield from files.strangers(self.catalog.packs_dir, files.PACK_NAME, census.pack_keys())
        yield from files.strangers(self.catalog.sidecars_dir, files.SIDECAR_NAME, census.sidecar_keys())

    def _is_wrong(self, path: Path) -> bool:
        wanted = self.catalog.wanted_bytes(path)
        return wanted is not None and _size_of(path) != wanted

    def _is_strange(self, path: Path) -> bool:
        _, uploading = self.uploads.promised()
        known = path in uploading or path in self.rewritten().files
        return not known and self.catalog.wanted_bytes(path) is None and _size_of(path) >= 0

    def _totals(self) -> list[Check]:
        kept, counted = self.catalog.census.recounted()
        return [
            _equal("stored bytes = sizes of rows", kept.stored_bytes, counted.stored_bytes),
            _equal("packs, damaged ones = rows", kept.packs + kept.damaged, counted.packs + counted.damaged),
        ]

    def _promises(self) -> list[Check]:
        promised, uploading = self.uploads.promised()
        opened = sum(uploading.values()) + self.rewritten().promised_bytes
        return [_equal("promised bytes = open uploads and a rewrite", promised, opened)]

    def _references(self) -> list[Check]:
        workers = self.registry.workers()
        sessions = self.registry.all()
        bindings = [binding for worker in workers for binding in list(worker.bound.values())]
        opened, holders = self.packs.holders()
        rewritten = self.rewritten()
        stats = self.plane.stats()
        return [
            _equal("references = packs of sessions", self.registry.references_total(), _sum(s.packs for s in sessions)),
            _equal(
                "holders of packs = packs of bound slots", holders, _sum(b.packs for b in bindings) + rewritten.holders
            ),
            _equal("open packs", stats["packs_open"], opened),
            _equal("open uploads", stats["uploads_open"], self.uploads.open_count() + rewritten.uploads),
            _equal("bound slots", stats["bound_slots"], len(bindings)),
            _equal("registered workers", stats["workers"], sum(w.native_id is not None for w in workers)),
            _equal("rings", stats["rings"], _sum(w.rings for w in workers if w.served)),
        ]

    def _data_plane(self) -> list[Check]:
        with native.errors():
            census = self.plane.census()
        return [
            _equal("runs = ended + in flight", census["runs"], census["runs_ended"] + census["runs_in_flight"]),
            _equal(
                "blocks in = resident + evicted",
                census["blocks_landed"], census["blocks_valid"] + census["blocks_evicted"],
            ),
            _equal("frames used = frames held", census["frames_used"], census["frames_held"]),
            _equal("frames used = frames of all users", census["frames_used"], census["frames_of_owners"]),
            _equal("users whose frames are not those counted", census["owners_miscounted"], 0),
        ]  # fmt: skip

    def _calls(self) -> list[Check]:
        return [_equal("lookups = hits + misses + errors + under way", *self.lookups_begun())]


def read(audited: Audited, looks: int, again: Callable[[], object]) -> list[Check]:
    """A check fails only if it does so in each of `looks` looks, with `again()` between them."""
    checks = audited.checks()
    for _ in range(looks - 1):
        if all(check.ok for check in checks):
            break
        again()
        checks = [a if a.ok else b for a, b in zip(checks, audited.checks(), strict=True)]
    return checks


@contextmanager
def _quiet(workers: Sequence[Worker]) -> Iterator[None]:
    """Between the calls of these workers. One whose call takes too long goes on: another look may find it idle."""
    deadline = time.monotonic() + QUIET_S
    held = []
    try:
        for worker in sorted(workers, key=lambda worker: worker.token):
            if worker.lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                held.append(worker)
        yield
    finally:
        for worker in held:
            worker.lock.release()


def _settled(seen: Callable[[Path], bool], paths: Iterable[Path]) -> list[Path]:
    """Those of which it is seen for as long as a commit or an eviction may take between file and row."""
    left = list(islice((path for path in paths if seen(path)), WRONG_MAX))
    for _ in range(SETTLE_LOOKS):
        if left:
            time.sleep(SETTLE_PAUSE_S)
            left = [path for path in left if seen(path)]
    return left


def _size_of(path: Path) -> int:
    """Bytes; -1 if there is no regular file."""
    try:
        held = path.lstat()
    except FileNotFoundError:
        return -1
    return held.st_size if stat.S_ISREG(held.st_mode) else -1


def _equal(name: str, left: int, right: int) -> Check:
    return Check(name, left == right, f"{left} = {right}" if left == right else f"{left}, not {right}")


def _sum(parts: Iterable[Sized]) -> int:
    return sum(len(part) for part in parts)


def _listed(total: int, wrong: Sequence[Path], what: str, fault: str) -> str:
    names = ", ".join(path.name for path in wrong[:LISTED_MAX])
    count = f"{len(wrong)} or more" if len(wrong) == WRONG_MAX else len(wrong)
    return f"{total} {what}" + (f", {count} {fault}: {names}" if wrong else "")
