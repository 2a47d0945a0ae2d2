"""Retier: packs are rewritten in an order of their records that is learnt from the runs that wanted them.

1. look: nobody has the pack, and enough runs were seen    2. set aside room for a second file
3. a new build beside the old one, segment by segment, at a bounded rate and behind the runs' reads
4. condemn the pack, look again, and put the new build in its place: one transaction    5. the old files go
"""

import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import product
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Any

import numpy as np

from kvstore_service.daemon import native
from kvstore_service.daemon.disk import learnt_order, sidecars
from kvstore_service.daemon.disk.builds import new_build
from kvstore_service.daemon.disk.cost import OFF
from kvstore_service.daemon.disk.files import remove_file, sync_directory
from kvstore_service.daemon.disk.learnt_order import GAIN_MIN, RUNS_MIN, LearntOrder
from kvstore_service.daemon.disk.rows import SidecarRow
from kvstore_service.daemon.logs import Sparse, event
from kvstore_service.daemon.store.state import State, log
from kvstore_service.shared import index_file
from kvstore_service.shared.index_file import IndexFormatError
from kvstore_service.shared.types import LEARNT, PackRow, SidecarKey, StoreError

LOOK_AGAIN_S = 600.0  # at a pack that was not worth it, or that somebody had
BEHIND = 4  # times as long as a segment took, while runs read from the disk
BEHIND_S_MAX = 1.0
_AS_IT_IS = np.empty(0, np.uint16)


@dataclass(frozen=True)
class UnderWay:
    """What a rewrite has beside the store's rows, sessions and uploads: files with the bytes that each will have, bytes
    set aside, uploads of the data plane, holders of open packs."""

    files: Mapping[Path, int] = field(default_factory=dict)
    promised_bytes: int = 0
    uploads: int = 0
    holders: int = 0


@dataclass(frozen=True)
class Retiered:
    """What became of a pack, or would: `error` says why it stays as it is. `bytes`: of the new file, if there is one.
    `runs`, `before_us`, `after_us`: as LearntOrder has them."""

    row: PackRow
    bytes: int = 0
    runs: float = 0.0
    before_us: float = 0.0
    after_us: float = 0.0
    error: StoreError | None = None


class Retier:
    """Thread-safe. One pack at a time, in a thread of its own; whoever asks waits for it."""

    def __init__(self, state: State) -> None:
        self._state = state
        config = state.config
        self._bytes_per_s = config.retier_bytes_per_s or config.verify_bytes_per_s
        self._by_itself = bool(config.retier_bytes_per_s)
        self._cost = native.DISK_COST if state.disk_cost == OFF else state.disk_cost
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="retier")
        self._ending = threading.Event()
        self._free_s = time.monotonic()
        self._looked_s: dict[bytes, float] = {}  # at packs, by build
        self._failures = Sparse(log)
        self._busy = threading.Lock()  # a pack of the chore's own is under way
        self.under_way = UnderWay()

    def close(self) -> None:
        self._ending.set()
        self._thread.shutdown(cancel_futures=True)

    def retier(self, row: PackRow, dry_run: bool = False) -> Retiered:
        """Rewrites the pack, or says why not."""
        try:
            return self._thread.submit(self._retier, row, dry_run).result()
        except (RuntimeError, CancelledError):  # no more work is taken, or what waited is given up
            return Retiered(row, error=_ended())

    def chore(self) -> None:
        """Where the daemon does it by itself: begins with the next pack that it has not looked at lately."""
        if not self._by_itself or self._ending.is_set() or not self._busy.acquire(blocking=False):
            return
        row = self._next()
        if row is None:
            self._busy.release()
            return
        self._thread.submit(self._retier, row, False).add_done_callback(lambda _: self._busy.release())

    def _next(self) -> PackRow | None:
        now_s = time.monotonic()
        idle = {row.ref.build: row for row in self._state.open_packs.idle()}
        self._looked_s = {
            build: at_s for build, at_s in self._looked_s.items() if build in idle and now_s - at_s < LOOK_AGAIN_S
        }
        row = next((row for build, row in idle.items() if build not in self._looked_s), None)
        if row is not None:
            self._looked_s[row.ref.build] = now_s
        return row

    def _retier(self, row: PackRow, dry_run: bool) -> Retiered:
        done = Retiered(row)
        try:
            self._require_free(row)
            with self._using(row) as handle:
                learnt = self._learn(row, handle)
                done = replace(done, runs=learnt.runs, before_us=learnt.before_us, after_us=learnt.after_us)
                _require_gain(row, learnt)
                if not dry_run:
                    self._rewrite(row, handle, learnt)
                    done = replace(done, bytes=row.file_bytes)
        except StoreError as error:
            if error.code != "FAILED_PRECONDITION" and not self._ending.is_set():
                self._failures.event(error.code, WARNING, "pack not rewritten", error=str(error))
            return replace(done, error=error)
        except Exception as error:  # of which nobody else hears where the daemon does it by itself
            what = f"{type(error).__name__}: {error}"
            event(log, ERROR, "pack not rewritten", pack_id=row.ref.pack_id.hex(), error=what)
            code = "UNAVAILABLE" if isinstance(error, (OSError, sqlite3.Error)) else "INTERNAL"
            return replace(done, error=StoreError(code, f"{row.file}: {what}"))
        return done

    @contextmanager
    def _using(self, row: PackRow) -> Iterator[int]:
        self._now(holders=1)
        try:
            with self._state.open_packs.using(row) as handle:
                yield handle
        finally:
            self._now(holders=0)

    def _now(self, **changed: Any) -> None:
        self.under_way = replace(self.under_way, **changed)

    def _require_free(self, row: PackRow) -> None:
        """FAILED_PRECONDITION if somebody has the pack or may be about to take it."""
        name = row.ref.pack_id
        if self._state.registry.references(name):
            raise _attached(row)
        if self._state.catalog.uses.is_pinned(name):
            raise StoreError("FAILED_PRECONDITION", f"pack {name.hex()} is pinned", reason="PACK_PINNED")
        # The lease on a chain's last pack is one on all of it.
        line = (name, *(after.ref.pack_id for after in self._state.catalog.descendants(name)))
        if any(self._state.leases.holds(leased) for leased in line):
            raise StoreError("FAILED_PRECONDITION", f"pack {name.hex()} was just found by a worker", reason="LEASED")

    def _learn(self, row: PackRow, handle: int) -> LearntOrder:
        with native.errors():
            samples = self._state.plane.run_samples(handle)
        if samples is None:
            why = "samples of other packs take learn_bytes" if self._state.config.learn_bytes else "learn_bytes is 0"
            raise StoreError("FAILED_PRECONDITION", f"nothing is known of what runs wanted: {why}", reason="NO_SAMPLES")
        return learnt_order.learn(samples, row.layout.kinds[0].record_bytes, self._cost)

    # --- the new build ---

    def _rewrite(self, row: PackRow, handle: int, learnt: LearntOrder) -> None:
        """All or nothing: what could not be put in the pack's place is removed, unless nobody knows whether it was."""
        catalog = self._state.catalog
        build = new_build(catalog.tenant_key(row.tenant), row.ref.pack_id)
        new = replace(row, ref=replace(row.ref, build=build), created_s=time.time(), record_order=LEARNT)
        path = catalog.packs_dir / new.file
        old_sidecars = catalog.sidecars_of(row.ref.pack_id)
        size_bytes = row.file_bytes + sum(item.file_bytes for item in old_sidecars)
        with self._room(row.tenant, size_bytes), ExitStack() as undo:
            self._now(files={path: row.file_bytes})
            undo.callback(remove_file, path)
            self._write(path, row, new, handle, learnt)
            kept: list[SidecarRow] = []
            for old in old_sidecars:
                if (moved := self._reordered(old, new, learnt)) is not None:
                    beside = catalog.sidecars_dir / moved.file
                    undo.callback(remove_file, beside)
                    self._now(files={**self.under_way.files, beside: moved.file_bytes})
                    kept.append(moved)
            sync_directory(catalog.packs_dir)
            try:
                self._swap(row, new, kept)
            except StoreError:
                raise
            except BaseException:
                undo.pop_all()  # the row may stand for the new file: the next start removes what no row names
                raise
            undo.pop_all()
        self._state.count("packs_retiered")
        self._state.events.tell(
            "retier", row.tenant, row.ref.pack_id, row.file_bytes, f"gain {100 * learnt.gain:.1f} %"
        )
        event(log, INFO, "pack rewritten", pack_id=row.ref.pack_id.hex(), file=new.file, gain=f"{learnt.gain:.3f}")

    @contextmanager
    def _room(self, tenant: str, size_bytes: int) -> Iterator[None]:
        """Both builds are there for a while; nothing is evicted for it. RESOURCE_EXHAUSTED."""
        self._state.room.promise(tenant, size_bytes, evict=False)
        self._now(promised_bytes=size_bytes)
        try:
            self._state.room.require_disk(size_bytes)
            yield
        finally:
            self._now(promised_bytes=0, files={})
            self._state.room.unpromise(tenant, size_bytes)

    def _write(self, path: Path, row: PackRow, new: PackRow, handle: int, learnt: LearntOrder) -> None:
        """The new file, durable on return."""
        plane, layout = self._state.plane, row.layout
        spec = native.pack_spec(
            new.ref.pack_id, new.ref.build, new.parent, layout, new.ref.tokens, self._state.config.extent_blocks, LEARNT
        )
        with native.errors():
            upload = plane.create_upload(str(path), spec)
            self._now(uploads=1)
            try:
                for number, kind in enumerate(layout.kinds):
                    for layer, lane in product(range(layout.layers), range(kind.lanes)):
                        order = learnt.orders[layer, lane] if number == 0 else _AS_IT_IS
                        with self._paced(row, 2 * spec.segment_bytes(number)):
                            plane.rewrite_segment(handle, upload, number, layer, lane, order)
                plane.finish_upload(upload)
            except BaseException:
                with suppress(StoreError), native.errors():
                    plane.abort_upload(upload)
                raise
            finally:
                self._now(uploads=0)

    @contextmanager
    def _paced(self, row: PackRow, size_bytes: int) -> Iterator[None]:
        """A part of the work, after which the disk is the others' for a while: at the bounded rate, and longer where
        runs had to read meanwhile. Ends with UNAVAILABLE at the daemon's end, and where somebody has taken the pack."""
        begun_s, misses = time.monotonic(), self._misses()
        yield
        now_s = time.monotonic()
        rest_s = min(BEHIND * (now_s - begun_s), BEHIND_S_MAX) if self._misses() > misses else 0.0
        if self._bytes_per_s:
            self._free_s = max(self._free_s, begun_s) + size_bytes / self._bytes_per_s
            rest_s = max(rest_s, self._free_s - now_s)
        if self._ending.wait(rest_s):
            raise _ended()
        if self._state.registry.references(row.ref.pack_id):
            raise _attached(row)

    def _misses(self) -> int:
        return self._state.plane.stats()["extent_misses"]

    def _reordered(self, old: SidecarRow, new: PackRow, learnt: LearntOrder) -> SidecarRow | None:
        """An index of the former build for the new one, its file durable; labels as they are. None: it is neither, or
        is damaged; whoever wants it makes it anew."""
        try:
            content = sidecars.content_of(self._state.catalog, old)
            parameters, data = index_file.load(content)
        except IndexFormatError:
            return None
        except StoreError as error:
            if error.code != "DATA_LOSS":
                raise
            return None
        if index_file.is_by_record(content):
            if data.shape[:3] != learnt.orders.shape:
                return None
            content = index_file.save(parameters, index_file.reordered(data, learnt.orders))
        key = SidecarKey(new.ref.pack_id, new.ref.build, old.key.kind, old.key.parameters)
        return sidecars.write_file(self._state.catalog, key, content)

    def _swap(self, row: PackRow, new: PackRow, kept: Sequence[SidecarRow]) -> None:
        """StoreError: it was refused, and nothing is changed."""
        name, state = row.ref.pack_id, self._state
        with state.registry.condemned([name]) as spared:
            if name in spared:
                raise spared[name]
            self._require_free(row)
            state.ballast.behind(lambda: state.catalog.replace_pack(row, new, kept))


def _require_gain(row: PackRow, learnt: LearntOrder) -> None:
    name = row.ref.pack_id.hex()
    if learnt.runs < RUNS_MIN:
        reason = f"pack {name}: {learnt.runs:.1f} sampled runs of a segment; {RUNS_MIN} say something"
        raise StoreError("FAILED_PRECONDITION", reason, reason="FEW_SAMPLES")
    if learnt.gain < GAIN_MIN:
        reason = (
            f"pack {name}: another order saves {100 * learnt.gain:.1f} % of the disk's time; {GAIN_MIN:.0%} is worth it"
        )
        raise StoreError("FAILED_PRECONDITION", reason, reason="NO_GAIN")


def _attached(row: PackRow) -> StoreError:
    return StoreError(
        "FAILED_PRECONDITION", f"pack {row.ref.pack_id.hex()} is attached to sessions", reason="PACK_ATTACHED"
    )


def _ended() -> StoreError:
    return StoreError("UNAVAILABLE", "the daemon is ending")
