"""A life of a store: it starts on what a crash has left, is compared with the ledger, and works until the next crash.

1. start; where SQLite's files cannot be read, once more on a copy of what can   2. a catalogue that was lost: rebuild
3. compare rows, files, bytes and sums with the ledger                           4. operations, restarts, the crash
"""

from __future__ import annotations

import os
import sys
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from kvstore_service.daemon.config import Config
from kvstore_service.daemon.disk.catalog import Catalog
from kvstore_service.daemon.disk.files import sync_directory
from kvstore_service.daemon.disk.rebuild import rebuild
from kvstore_service.shared.types import StoreError
from tests.crash.power import disk
from tests.crash.power.ledger import Ledger
from tests.crash.power.node import CHAINS, KINDS, NUMBERS, Node, config_of, numbers_of
from tests.crash.power.operations import OPERATIONS, Scene, operate

PACK_BYTES = 286_720
AMPLE_BYTES = 64 << 20
TIGHT_PACKS = 6
REBUILD_STEPS = 150  # about as many as a rebuild takes
DRAM_BYTES = (4 << 20, 16 << 20)
CATALOGUE_FILES = ("catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-journal")


@dataclass
class Plan:
    """What a seed chooses, for all its lives and for each."""

    seed: int
    life: int
    last: bool
    tight: bool = field(init=False)
    faults: set[str] = field(init=False)
    crash_at: int = field(init=False)

    def __post_init__(self) -> None:
        self.tight = Random(f"{self.seed}").random() < 0.3
        self.chance = Random(f"{self.seed} {self.life}")
        self.faults = {fault for fault in disk.FAULTS if self.chance.random() < 0.7}
        most = self.chance.choice([40, 150, 400])  # a start, a few operations, or many
        self.crash_at = 0 if self.last else self.chance.randint(1, most)


class Life:
    """In a process of its own, which the crash ends."""

    def __init__(self, plan: Plan, root: Path, aside: Path, ledger: Ledger) -> None:
        self._plan = plan
        self._data_dir = root / "data"
        self._aside = aside
        self._ledger = ledger
        self._chance = plan.chance
        wanted = [each for each in OPERATIONS if self._chance.random() < 0.8]
        self._wanted = wanted or list(OPERATIONS)
        print(f"life {plan.life}: {sorted(plan.faults)}, crash at {plan.crash_at}", file=sys.stderr)
        disk.begin(root, aside, plan.seed << 8 | plan.life, plan.crash_at, plan.faults)

    def live(self) -> None:
        """Ends with the crash, but for the last one of a seed. AssertionError, StoreError: the store has failed."""
        self._scene = Scene(self._started(), self._ledger, self._chance, self._plan.tight)
        self._compare()
        for _ in range(0 if self._plan.last else self._chance.randint(3, 12)):
            kind = self._chance.random()
            if kind < 0.06:
                self._restart()
            elif kind < 0.14:
                self._lose_catalogue()
            else:
                operate(self._scene, self._wanted)
        if not self._plan.last:
            disk.crash()
        self._scene.node.close()

    def _config(self) -> Config:
        nvme_bytes = TIGHT_PACKS * PACK_BYTES if self._plan.tight else AMPLE_BYTES
        return config_of(self._data_dir, nvme_bytes, self._chance.choice(DRAM_BYTES))

    def _started(self) -> Node:
        config = self._config()
        try:
            return self._restored(config)
        except StoreError as error:
            damaged = [(path, block) for path, block in disk.unreadable(self._aside) if path.name in CATALOGUE_FILES]
            if error.code != "UNAVAILABLE" or not damaged:
                raise
        for path, block in damaged:
            rescue(path, block)
        return self._restored(config)

    def _restored(self, config: Config) -> Node:
        if True not in self._ledger.of("catalogue lost"):
            return Node(config)
        self._data_dir.mkdir(exist_ok=True)
        for number in NUMBERS:  # what was left over when the catalogue went is as good as what it knew
            self._ledger.may_be(f"pin {number}", False)
            for fact in (f"pack {number}", *(f"sidecar {number} {kind}" for kind in KINDS)):
                self._ledger.may_be(fact, True)
        self._ledger.may_be("quota", False)
        with closing(Catalog(config.data_dir)) as catalog:
            catalog.freeze({"extent_blocks": config.extent_blocks})
            rebuild(catalog)
        self._ledger.know("catalogue lost", False)
        return Node(config)

    def _restart(self) -> None:
        """In order."""
        self._scene.node.close()
        self._scene.node = self._started()
        self._compare()

    def _lose_catalogue(self) -> None:
        """An operator moves it away; the next start finds files that it does not know."""
        self._scene.node.close()
        if self._chance.random() < 0.5:
            disk.crash_within(self._chance.randint(1, REBUILD_STEPS))
        self._ledger.may_be("catalogue lost", True)
        for name in CATALOGUE_FILES:
            (self._data_dir / name).unlink(missing_ok=True)
        sync_directory(self._data_dir)
        self._ledger.know("catalogue lost", True)
        self._scene.node = self._started()
        self._compare()

    def _compare(self) -> None:
        """What was acknowledged is there and right, what was not is there as a whole or not at all, and nothing is left
        over."""
        node = self._scene.node
        damaged = node.catalog.damaged()
        assert not damaged, f"damaged: {[(row.file, reason) for row, reason in damaged]}"
        self._scene.look()
        quota = node.catalog.quotas().get(node.peer.tenant)
        self._ledger.see("quota", (quota and quota.nvme_bytes) or False)
        for chain in range(CHAINS):
            self._compare_chain(chain)
        failed = [f"{check.name}: {check.detail}" for check in node.store.operation.audit() if not check.ok]
        assert not failed, failed
        self._compare_files(node)

    def _compare_chain(self, chain: int) -> None:
        node, numbers = self._scene.node, numbers_of(chain)
        rows = node.stored(chain)
        beyond = [number for number in numbers[len(rows) :] if node.row(number) is not None]
        assert not beyond, f"packs {beyond} are stored without what they continue"
        if not rows:
            return
        for row in rows:
            answer = node.store.operation.verify(row)
            assert answer == ([], ""), f"{row.file}: {answer}"
        session, epoch = node.attach(rows)
        node.compare(numbers[: len(rows)], epoch, self._chance)
        for number, row in zip(numbers, rows, strict=False):
            node.compare_map(number, row)
        node.close_session(session)

    def _compare_files(self, node: Node) -> None:
        """No file but those of rows, and of the daemon itself."""
        rows = [row for number in NUMBERS if (row := node.row(number)) is not None]
        held = {path.name for path in (self._data_dir / "packs").iterdir()}
        assert held == {row.file for row in rows}
        held = {path.name for path in (self._data_dir / "sidecars").iterdir()}
        assert held == {row.file for row in node.catalog.sidecars()}
        own = {"packs", "sidecars", "quarantine", "lock", "packs.stamp", "tenants", "ballast"}
        strange = {path.name for path in self._data_dir.iterdir()} - own - set(CATALOGUE_FILES)
        assert not strange, strange


def rescue(path: Path, block: int) -> None:
    """Zeros for a block that cannot be read, as a copy by `ddrescue` has them."""
    if not path.exists():  # SQLite has done without it
        return
    fd = os.open(path, os.O_WRONLY)
    os.pwrite(fd, bytes(disk.BLOCK_BYTES), block * disk.BLOCK_BYTES)
    os.fsync(fd)
    os.close(fd)
