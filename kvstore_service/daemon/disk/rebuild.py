"""`kvstored rebuild`: gives quarantined packs and sidecars their rows again, from what their files say themselves.

1. read every header; its build's seal says whose pack it is      2. verify every block
3. parents before what continues them: files back, then rows      4. sidecars of what is stored now
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvstore_service import _native
from kvstore_service.daemon.disk import files, pack_header, sidecars
from kvstore_service.daemon.disk.builds import made_by
from kvstore_service.daemon.disk.catalog import Catalog
from kvstore_service.daemon.disk.files import sync_directory
from kvstore_service.daemon.disk.rows import SidecarRow
from kvstore_service.daemon.disk.verifier import Verifier
from kvstore_service.shared.types import NO_PARENT, PackRef, PackRow, StoreError, format_size

_BATCH = 1000


@dataclass
class Rebuilt:
    """`left`: names of files that stay in quarantine, each with the reason."""

    packs: int = 0
    pack_bytes: int = 0
    sidecars: int = 0
    left: dict[str, str] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        for name, reason in self.left.items():
            yield f"{name} stays in quarantine: {reason}"
        yield f"restored {self.packs} packs ({format_size(self.pack_bytes)}) and {self.sidecars} sidecars"


def rebuild(catalog: Catalog) -> Rebuilt:
    """Restores what can be restored; what cannot stays where it is."""
    rebuilt = Rebuilt()
    if not catalog.quarantine_dir.is_dir():
        return rebuilt
    verifier = Verifier(catalog, 0)
    try:
        for batch in _in_order(catalog, _candidates(catalog, rebuilt), rebuilt):
            _restore(catalog, _verified(catalog, verifier, batch, rebuilt), rebuilt)
    finally:
        verifier.close()
    for path in files.ours(catalog.quarantine_dir, files.SIDECAR_NAME):
        _restore_sidecar(catalog, path, rebuilt)
    return rebuilt


def _candidates(catalog: Catalog, rebuilt: Rebuilt) -> list[PackRow]:
    """Packs whose header is whole and whose tenant is known; `first_token` is not known yet. Freezes extent_blocks,
    where no start has, as most of them have it."""
    found: list[tuple[PackRow, int]] = []
    keys = catalog.tenant_keys()
    for path in files.ours(catalog.quarantine_dir, files.PACK_NAME):
        try:
            with path.open("rb") as file:
                header = pack_header.parse(file.read(_native.BLOCK_BYTES))
            owner = [name for name, key in keys.items() if made_by(key, header.pack_id, header.build)]
            if not owner:
                raise ValueError("no tenant's seal fits its build")
        except (OSError, ValueError) as error:
            rebuilt.left[path.name] = f"an unfinished upload or none of this store's: {error}"
            continue
        ref = PackRef(header.pack_id, header.build, 0, header.tokens)
        row = PackRow(
            ref, header.parent, header.layout, owner[0], header.file_bytes, path.stat().st_mtime, header.record_order
        )
        found.append((row, header.extent_blocks))
    if found:
        (common, _), *_ = Counter(extent_blocks for _, extent_blocks in found).most_common()
        frozen = catalog.frozen("extent_blocks", common)
        for row, extent_blocks in found:
            if extent_blocks != frozen:
                rebuilt.left[row.file] = f"it has extent_blocks={extent_blocks}, this data directory {frozen}"
        found = [(row, extent_blocks) for row, extent_blocks in found if extent_blocks == frozen]
    return [row for row, _ in found]


def _in_order(catalog: Catalog, rows: Sequence[PackRow], rebuilt: Rebuilt) -> Iterator[list[PackRow]]:
    """Batches in which no pack stands beside or before its parent, with their first tokens."""
    waiting: defaultdict[bytes, list[PackRow]] = defaultdict(list)
    for row in rows:
        waiting[row.parent].append(row)
    ready = [name for name in waiting if name == NO_PARENT or catalog.served(name) is not None]
    while ready:
        generation = [
            _placed(row, 0 if name == NO_PARENT else catalog.any_pack(name).ref.end)
            for name in ready
            for row in waiting.pop(name)
        ]
        for first in range(0, len(generation), _BATCH):
            yield generation[first : first + _BATCH]
        ready = [name for row in generation if catalog.served(name := row.ref.pack_id) is not None and name in waiting]
        ready = list(dict.fromkeys(ready))
    for row in (row for rows in waiting.values() for row in rows):
        rebuilt.left[row.file] = f"its parent {row.parent.hex()} is not stored"


def _placed(row: PackRow, first_token: int) -> PackRow:
    ref = PackRef(row.ref.pack_id, row.ref.build, first_token, row.ref.tokens)
    return replace(row, ref=ref)


def _verified(catalog: Catalog, verifier: Verifier, rows: Sequence[PackRow], rebuilt: Rebuilt) -> list[PackRow]:
    whole = []
    for row in rows:
        bad_blocks, damage = verifier.check(catalog.quarantine_dir, row)
        if damage or bad_blocks:
            rebuilt.left[row.file] = damage or f"{len(bad_blocks)} bad blocks"
        else:
            whole.append(row)
    return whole


def _restore(catalog: Catalog, rows: Sequence[PackRow], rebuilt: Rebuilt) -> None:
    """Files, then their directory, then their rows, as a commit does. Where another build is stored that one stays."""
    for row in rows:
        _bring_back(catalog.quarantine_dir / row.file, catalog.packs_dir)
    sync_directory(catalog.packs_dir)
    for row, winner in zip(rows, catalog.commit_packs(rows), strict=True):
        if winner is None or winner.ref.build != row.ref.build:
            (catalog.packs_dir / row.file).unlink()
            rebuilt.left[row.file] = "another build of it is stored"
        else:
            (catalog.quarantine_dir / row.file).unlink()
            rebuilt.packs += 1
            rebuilt.pack_bytes += row.file_bytes


def _bring_back(path: Path, directory: Path) -> None:
    """Also leaves it in quarantine: until its row is durable, a start removes the one that it finds in `directory`."""
    back = directory / path.name
    back.unlink(missing_ok=True)
    back.hardlink_to(path)


def _restore_sidecar(catalog: Catalog, path: Path, rebuilt: Rebuilt) -> None:
    try:
        size = path.stat().st_size
        key = sidecars.key_of(str(path))
        row = catalog.served(key.pack_id)
        if row is None or row.ref.build != key.build or path.suffix != ".sidecar":
            raise ValueError("its pack is not stored")
        held = catalog.sidecar(key)
        if held is not None and held.file != path.name:
            raise ValueError("another one of its key is stored")
        _bring_back(path, catalog.sidecars_dir)
        sync_directory(catalog.sidecars_dir)
        catalog.commit_sidecar(SidecarRow(key, path.name, size))
        path.unlink()
        rebuilt.sidecars += 1
    except (OSError, ValueError, StoreError) as error:
        rebuilt.left[path.name] = str(error)
