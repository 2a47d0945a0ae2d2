"""Audit: what must be equal, counted in two places. A check that fails shows a leak, a loss or a wrong count."""

from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path

from kvstore_service.daemon import native
from kvstore_service.daemon.disk.catalog import Catalog
from kvstore_service.daemon.disk.open_packs import OpenPacks
from kvstore_service.daemon.store.registry import Registry
from kvstore_service.daemon.store.uploads import Uploads

LISTED_MAX = 5


@dataclass(frozen=True)
class Check:
    """`detail` shows both sides of the equation."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class Audited:
    """The parts of a running store. Figures are read one after the other, so a busy store may need a second look."""

    catalog: Catalog
    uploads: Uploads
    packs: OpenPacks
    registry: Registry
    plane: native.DataPlane
    counts: Callable[[], dict[str, int]]

    def checks(self) -> list[Check]:
        return [*self._files(), *self._bytes(), *self._references(), *self._data_plane(), *self._calls()]

    def _files(self) -> list[Check]:
        """Every row has its file, every file its row or its open upload."""
        _, uploading = self.uploads.promised()
        expected = self.catalog.files()
        damaged = {self.catalog.packs_dir / row.file for row, _ in self.catalog.damaged()}
        found = {path: path.stat().st_size for path in self.catalog.data_files()}
        wrong = [path for path, size in expected.items() if found.get(path) != size and path not in damaged]
        strange = [path for path in found if path not in expected and path not in uploading]
        return [
            Check("catalogue rows = files", not wrong, _listed(len(expected), wrong, "rows", "without their file")),
            Check("files = rows + uploads", not strange, _listed(len(found), strange, "files", "without a row")),
            Check("no pack is damaged", not damaged, _listed(len(expected), sorted(damaged), "files", "damaged")),
        ]

    def _bytes(self) -> list[Check]:
        stored = self.catalog.totals().stored_bytes
        promised, uploading = self.uploads.promised()
        return [
            _equal("stored bytes = sizes of rows", stored, sum(self.catalog.files().values())),
            _equal("promised bytes = open uploads", promised, sum(uploading.values())),
        ]

    def _references(self) -> list[Check]:
        workers = self.registry.workers()
        sessions = self.registry.all()
        bindings = [binding for worker in workers for binding in list(worker.bound.values())]
        opened, holders = self.packs.holders()
        stats = self.plane.stats()
        return [
            _equal("references = packs of sessions", self.registry.references_total(), _sum(s.packs for s in sessions)),
            _equal("holders of packs = packs of bound slots", holders, _sum(b.packs for b in bindings)),
            _equal("open packs", stats["packs_open"], opened),
            _equal("open uploads", stats["uploads_open"], self.uploads.open_count()),
            _equal("bound slots", stats["bound_slots"], len(bindings)),
            _equal("registered workers", stats["workers"], sum(w.native_id is not None for w in workers)),
            _equal("rings", stats["rings"], _sum(w.rings for w in workers if w.native_id is not None)),
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
        ]  # fmt: skip

    def _calls(self) -> list[Check]:
        counts = self.counts()
        ended = sum(counts[f"lookup_{outcome}"] for outcome in ("hits", "misses", "errors"))
        return [_equal("lookups = hits + misses + errors", counts["lookups"], ended)]


def read(audited: Audited, looks: int, again: Callable[[], object]) -> list[Check]:
    """A check fails only if it does so in each of `looks` looks, with `again()` between them."""
    checks = audited.checks()
    for _ in range(looks - 1):
        if all(check.ok for check in checks):
            break
        again()
        checks = [a if a.ok else b for a, b in zip(checks, audited.checks(), strict=True)]
    return checks


def _equal(name: str, left: int, right: int) -> Check:
    return Check(name, left == right, f"{left} = {right}" if left == right else f"{left}, not {right}")


def _sum(parts: Iterable[Sized]) -> int:
    return sum(len(part) for part in parts)


def _listed(total: int, wrong: Sequence[Path], what: str, fault: str) -> str:
    names = ", ".join(path.name for path in wrong[:LISTED_MAX])
    return f"{total} {what}" + (f", {len(wrong)} {fault}: {names}" if wrong else "")
