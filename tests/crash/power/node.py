"""A store and its data plane in this process, with one worker: what a daemon has, without its gRPC."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

from kvstore_service.client import WorkerMemory
from kvstore_service.daemon import config, directories, native
from kvstore_service.daemon.disk.catalog import Catalog
from kvstore_service.daemon.disk.learnt_order import RUNS_MIN
from kvstore_service.daemon.store.store import Store
from kvstore_service.daemon.store.uploads import pack_id
from kvstore_service.shared import memory
from kvstore_service.shared.types import LEARNT, NO_PARENT, PackRef, PackRow, RingGeometry, SidecarKey
from tests.support.world import LANES, LAYERS, LAYOUT, RECORD_BYTES, TOKENS, TestWorker, digest, order_of, records_of

CHAINS, CHAIN_PACKS = 4, 3
KINDS = ("hash", "graph")  # of sidecars
GATHERED_MAX = 256
DECLARED_TOKENS = 4096
SLOT = 0
LEARN_BYTES = 1 << 20


def numbers_of(chain: int) -> list[int]:
    return [chain * CHAIN_PACKS + index for index in range(CHAIN_PACKS)]


NUMBERS = [number for chain in range(CHAINS) for number in numbers_of(chain)]


def content_of(number: int, kind: str) -> bytes:
    """Of a sidecar: from nothing to some blocks."""
    chooser = Random(f"{number} {kind}")
    return chooser.randbytes(chooser.choice([0, 100, 3000, 4096, 20_000]))


def config_of(data_dir: Path, nvme_bytes: int, dram_bytes: int) -> config.Config:
    return config.load(
        [
            f"--data-dir={data_dir}", f"--socket={data_dir}.s", f"--broker={data_dir}.b", "--metrics-addr=off",
            f"--nvme-bytes={nvme_bytes}", f"--dram-bytes={dram_bytes}", "--copy-threads=1", "--window=shm",
            "--verify-bytes-per-s=unlimited", "--lease-s=0", "--io-depth=8", f"--learn-bytes={LEARN_BYTES}",
        ],
        {},
    )  # fmt: skip


class _Calls:
    """What a worker of the tests asks of its client, answered by the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.peer = store.workers.admit(os.getuid(), os.getpid(), "cut", False)

    def register_worker(
        self,
        slots: int,
        window_bytes: int,
        staging_bytes: int,
        rings: Sequence[RingGeometry],
        window_kinds: Sequence[str] = (),
    ) -> WorkerMemory:
        made = self._store.workers.register(self.peer, slots, window_bytes, staging_bytes, rings)
        window, staging, *fds = made.descriptors
        pairs = list(zip(fds[::2], fds[1::2], strict=True))
        return WorkerMemory(
            made.worker_id, window, window_bytes, staging, staging_bytes, pairs, TOKENS, 4, made.window_kind
        )

    def serve_rings(self) -> None:
        self._store.workers.serve_rings(self.peer)


class Node:
    """Serves from its creation on. StoreError as a daemon's start."""

    def __init__(self, settings: config.Config) -> None:
        directories.prepare(settings.data_dir)
        self.catalog = Catalog(settings.data_dir)
        self.catalog.freeze({"extent_blocks": settings.extent_blocks})
        plane = native.DataPlane(
            settings.dram_bytes,
            settings.io_depth,
            1,
            extent_blocks=settings.extent_blocks,
            learn_bytes=settings.learn_bytes,
        )
        self.store = Store(settings, self.catalog, plane)
        calls = _Calls(self.store)
        self.peer = calls.peer
        self.worker = TestWorker(calls)  # type: ignore[arg-type]
        self._key = self.catalog.tenant_key(self.peer.tenant)

    def close(self) -> None:
        self.worker.close()
        self.store.close()

    def keep_house(self) -> None:
        """What the upkeep's thread does by itself, now."""
        for chore in self.store._upkeep._chores:
            chore()

    # --- packs by their numbers ---

    def name(self, number: int) -> bytes:
        parent = NO_PARENT if number % CHAIN_PACKS == 0 else self.name(number - 1)
        return pack_id(self._key, parent, LAYOUT.fingerprint, digest(number))

    def row(self, number: int) -> PackRow | None:
        """DATA_LOSS for a damaged pack."""
        return self.catalog.pack(self.name(number))

    def stored(self, chain: int) -> list[PackRow]:
        """As far as the chain goes without a gap."""
        rows: list[PackRow] = []
        for number in numbers_of(chain):
            row = self.row(number)
            if row is None:
                break
            rows.append(row)
        return rows

    def key(self, row: PackRow, kind: str) -> SidecarKey:
        return SidecarKey(row.ref.pack_id, row.ref.build, kind, b"p")

    def sidecar(self, row: PackRow, kind: str) -> bytes | None:
        """What the store has as that sidecar, by the way that workers get it."""
        key = self.key(row, kind)
        if self.catalog.sidecar(key) is None:
            return None
        with memory.Owned(self.store.indexes.get(self.peer, key)) as shared:
            return memory.read(shared.fd)

    def open(self) -> str:
        return self.store.sessions.open(self.peer, LAYOUT, DECLARED_TOKENS).session_id

    def attach(self, rows: Sequence[PackRow]) -> tuple[str, int]:
        """(session, epoch of the slot that it is bound to)."""
        session = self.open()
        refs: list[PackRef] = [row.ref for row in rows]
        self.store.sessions.attach(self.peer, session, refs)
        windows = self.worker.windows(SLOT).reshape(LAYERS * LANES, 2)
        return session, self.store.slots.bind(self.peer, session, SLOT, refs, windows).epoch

    def compare(self, numbers: Sequence[int], epoch: int, chance: Random) -> None:
        """Records of the bound packs, fetched through the ring, with what they must be by the packs' maps."""
        count = len(numbers) * TOKENS
        records = np.array(sorted(chance.sample(range(count), min(count, GATHERED_MAX))), np.uint32)
        found = self.worker.gather(SLOT, epoch, records)
        maps = [self.map_of(row) for number in numbers if (row := self.row(number)) is not None]
        for layer, lane in np.ndindex(LAYERS, LANES):
            parts = [
                records_of(number, layer, lane)[order[layer, lane]] for number, order in zip(numbers, maps, strict=True)
            ]
            np.testing.assert_array_equal(found[layer, lane], np.concatenate(parts)[records])

    def map_of(self, row: PackRow) -> NDArray[np.uint16]:
        key = SidecarKey(row.ref.pack_id, row.ref.build, "map")
        with memory.Owned(self.store.indexes.get(self.peer, key)) as shared:
            return np.frombuffer(memory.read(shared.fd), np.uint16).reshape(LAYERS, LANES, TOKENS)

    def compare_map(self, number: int, row: PackRow) -> None:
        """The writer's order; of a pack that was rewritten some order of all tokens."""
        order = self.map_of(row)
        for layer, lane in np.ndindex(LAYERS, LANES):
            mine = order[layer, lane]
            if row.record_order == LEARNT:
                mine, wanted = np.sort(mine), np.arange(TOKENS)
            else:
                wanted = order_of(number, layer, lane)
            np.testing.assert_array_equal(mine, wanted)

    def use(self, rows: Sequence[PackRow]) -> None:
        """Runs that want a record of each block, often enough to learn from."""
        session, epoch = self.attach(rows)
        hot = np.arange(0, len(rows) * TOKENS, 4096 // RECORD_BYTES, dtype=np.uint32)
        for _ in range(RUNS_MIN):
            self.worker.gather(SLOT, epoch, hot)
        self.close_session(session)

    def close_session(self, session: str) -> None:
        self.store.sessions.close(self.peer, session)

    def pinned(self, number: int) -> bool:
        return self.catalog.uses.is_pinned(self.name(number))
