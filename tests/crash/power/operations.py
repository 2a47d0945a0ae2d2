"""What a life does to its store, one thing after the other, each chosen by the seed.

An operation writes into the ledger what may be true from its beginning on, and what is once it was acknowledged. To
join, it takes its place in OPERATIONS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random

import numpy as np

from kvstore_service.shared.types import LEARNT, PackReservation, PackRow, ReservedPack, StoreError
from tests.crash.power.ledger import Ledger
from tests.crash.power.node import CHAIN_PACKS, CHAINS, KINDS, NUMBERS, Node, content_of, numbers_of
from tests.support.world import LANES, LAYERS, LAYOUT, TOKENS, candidate, digest


@dataclass
class Scene:
    """What an operation has at hand. `tight`: the store is too small for all packs, so that writing evicts others."""

    node: Node
    ledger: Ledger
    chance: Random
    tight: bool

    def chain(self) -> int:
        return self.chance.randrange(CHAINS)

    def stored_chain(self) -> tuple[list[int], list[PackRow]]:
        """Packs of one chain from its beginning on; none if nothing is stored."""
        chains = [chain for chain in range(CHAINS) if self.node.row(numbers_of(chain)[0]) is not None]
        if not chains:
            return [], []
        chain = self.chance.choice(chains)
        rows = self.node.stored(chain)
        rows = rows[: self.chance.randint(1, len(rows))]
        return numbers_of(chain)[: len(rows)], rows

    def may_evict(self) -> None:
        """Whatever is not pinned may have to go."""
        for number in NUMBERS if self.tight else ():
            if self.ledger.of(f"pin {number}") == [False]:
                self.may_go(number)

    def may_go(self, number: int) -> None:
        """A pack's end is that of its sidecars and of its pin."""
        for fact in (f"pack {number}", f"pin {number}", *(f"sidecar {number} {kind}" for kind in KINDS)):
            if self.ledger.of(fact) != [False]:
                self.ledger.may_be(fact, False)

    def look(self, numbers: Iterable[int] = NUMBERS) -> None:
        """What is true now: the operation is over."""
        for number in numbers:
            row = self.node.row(number)
            self.ledger.see(f"pack {number}", row is not None)
            self.ledger.see(f"pin {number}", row is not None and self.node.pinned(number))
            for kind in KINDS:
                content = self.node.sidecar(row, kind) if row is not None else None
                assert content in (None, content_of(number, kind)), f"sidecar {kind} of pack {number} is another one's"
                self.ledger.see(f"sidecar {number} {kind}", content is not None)

    def reserve(self, session: str, numbers: list[int]) -> list[ReservedPack]:
        """RESOURCE_EXHAUSTED."""
        items = []
        for number in numbers:
            index = number % CHAIN_PACKS
            parent = self.node.name(number - 1) if index and not items else b""  # b"": the one before in this list
            items.append(PackReservation(index * TOKENS, TOKENS, digest(number), parent))
        return self.node.store.packs.reserve(self.node.peer, session, items)


def write(scene: Scene) -> None:
    """The next packs of a chain, committed together or one by one."""
    node, chance = scene.node, scene.chance
    chain = scene.chain()
    numbers = numbers_of(chain)[len(node.stored(chain)) :][: chance.randint(1, 2)]
    if not numbers:
        return
    session = node.open()
    scene.may_evict()
    uploads = [item.upload_id for item in scene.reserve(session, numbers)]
    for number, upload in zip(numbers, uploads, strict=True):
        assert upload is not None
        node.worker.store(upload, number)
    at_once = chance.randint(1, len(numbers))
    for first in range(0, len(numbers), at_once):
        part = numbers[first : first + at_once]
        for number in part:
            scene.ledger.may_be(f"pack {number}", True)
        ids = [upload for upload in uploads[first : first + at_once] if upload is not None]
        for number, item in zip(part, node.store.packs.commit(node.peer, session, ids), strict=True):
            if item.error is not None:
                raise item.error
            scene.ledger.know(f"pack {number}", True)
    scene.look()
    node.close_session(session)


def abandon(scene: Scene) -> None:
    """An upload that is filled in part and then aborted, or left open."""
    chain = scene.chain()
    numbers = numbers_of(chain)[len(scene.node.stored(chain)) :][:1]
    if not numbers:
        return
    session = scene.node.open()
    scene.may_evict()
    (item,) = scene.reserve(session, numbers)
    if item.upload_id is not None:
        scene.node.worker.store(item.upload_id, numbers[0], range(scene.chance.randint(0, LAYERS)))
        if scene.chance.random() < 0.7:
            scene.node.store.packs.abort(scene.node.peer, [item.upload_id])
    scene.look()
    scene.node.close_session(session)


def read(scene: Scene) -> None:
    """A stored chain, bound and fetched, with its maps."""
    numbers, rows = scene.stored_chain()
    if not rows:
        return
    session, epoch = scene.node.attach(rows)
    scene.node.compare(numbers, epoch, scene.chance)
    scene.node.compare_map(numbers[-1], rows[-1])
    scene.node.close_session(session)


def seal(scene: Scene) -> None:
    """A bound session grows by a pack."""
    node = scene.node
    numbers, rows = scene.stored_chain()
    wanted = [numbers[-1] + 1] if rows and len(rows) < CHAIN_PACKS else []
    if not wanted or node.row(wanted[0]) is not None:
        return
    session, epoch = node.attach(rows)
    scene.may_evict()
    (item,) = scene.reserve(session, wanted)
    assert item.upload_id is not None
    node.worker.store(item.upload_id, wanted[0])
    scene.ledger.may_be(f"pack {wanted[0]}", True)
    node.store.packs.seal_tail(node.peer, session, item.upload_id)
    scene.ledger.know(f"pack {wanted[0]}", True)
    node.compare([*numbers, *wanted], epoch, scene.chance)
    scene.look()
    node.close_session(session)


def keep_sidecar(scene: Scene) -> None:
    numbers, rows = scene.stored_chain()
    if not rows:
        return
    kind = scene.chance.choice(KINDS)
    scene.ledger.may_be(f"sidecar {numbers[-1]} {kind}", True)
    scene.may_evict()
    scene.node.store.indexes.put(scene.node.peer, scene.node.key(rows[-1], kind), content_of(numbers[-1], kind))
    scene.ledger.know(f"sidecar {numbers[-1]} {kind}", True)
    scene.look()


def evict(scene: Scene) -> None:
    """A pack and what continues it, by an operator."""
    _, rows = scene.stored_chain()
    if not rows:
        return
    operation = scene.node.store.operation
    names = operation.to_evict([rows[-1].ref.pack_id], True, lambda: None)
    going = {scene.node.name(number): number for number in NUMBERS if scene.node.name(number) in names}
    for number in going.values():
        if scene.ledger.of(f"pin {number}") == [False]:
            scene.may_go(number)
    for step in operation.evict(names):
        for item in step:
            if item.error is None:
                scene.ledger.know(f"pack {going[item.pack_id]}", False)
    scene.look(going.values())


def pin(scene: Scene) -> None:
    numbers, _ = scene.stored_chain()
    if numbers:
        pinned = scene.chance.random() < 0.6
        scene.ledger.may_be(f"pin {numbers[-1]}", pinned)
        scene.node.store.operation.pin([scene.node.name(numbers[-1])], pinned)
        scene.ledger.know(f"pin {numbers[-1]}", pinned)


def set_quota(scene: Scene) -> None:
    """One that bounds nothing."""
    quota_bytes = scene.chance.choice([0, 1 << 30, 2 << 30])
    scene.ledger.may_be("quota", quota_bytes or False)
    scene.node.store.operation.set_quota(scene.node.peer.tenant, quota_bytes, None)
    scene.ledger.know("quota", quota_bytes or False)


def hint(scene: Scene) -> None:
    """Importance, and a read ahead of it."""
    _, rows = scene.stored_chain()
    if rows:
        session = scene.node.open()
        hot = np.full(LAYERS * LANES, scene.chance.randint(0, TOKENS)).tolist()
        scene.node.store.packs.hint_importance(scene.node.peer, session, [(row.ref, hot) for row in rows])
        scene.node.close_session(session)


def verify(scene: Scene) -> None:
    _, rows = scene.stored_chain()
    for row in rows:
        answer = scene.node.store.operation.verify(row)
        assert answer == ([], ""), f"pack {row.ref.pack_id.hex()}: {answer}"


def find(scene: Scene) -> None:
    """A lookup by tokens, as a prefill asks."""
    chain = scene.chain()
    wanted = [candidate(number, index) for index, number in enumerate(numbers_of(chain))]
    found = scene.node.store.prefixes.lookup(scene.node.peer, LAYOUT.fingerprint, wanted)
    assert found == [row.ref for row in scene.node.stored(chain)]


def retier(scene: Scene) -> None:
    """A stored chain is used and then rewritten: every pack stays, its sidecars, which are no indexes, may go."""
    numbers, rows = scene.stored_chain()
    if not rows:
        return
    scene.node.use(rows)
    for number, row in zip(numbers, rows, strict=True):
        for kind in KINDS:
            if scene.ledger.of(f"sidecar {number} {kind}") != [False]:
                scene.ledger.may_be(f"sidecar {number} {kind}", False)
        found = scene.node.store.operation.retier(row, dry_run=False)
        if found.error is None:
            now = scene.node.row(number)
            assert now is not None
            assert (now.ref.build != row.ref.build, now.record_order) == (True, LEARNT)
        else:
            assert found.error.reason in ("QUOTA_EXCEEDED", "NO_ROOM", "PACK_PINNED", "NO_SAMPLES", "NO_GAIN"), found
    scene.look(numbers)


def keep_house(scene: Scene) -> None:
    scene.may_evict()
    scene.node.keep_house()
    scene.look()


OPERATIONS: dict[Callable[[Scene], None], int] = {
    write: 6, seal: 3, keep_sidecar: 3, evict: 2, abandon: 2, read: 2, keep_house: 1, pin: 1, set_quota: 1, hint: 1,
    verify: 1, find: 1, retier: 8,
}  # fmt: skip


def operate(scene: Scene, wanted: list[Callable[[Scene], None]]) -> None:
    """One of these. A store that is too small may refuse, or evict what nobody has a lease of, such as the pack that is
    to be continued; then what it has is looked at."""
    chosen = scene.chance.choices(wanted, [OPERATIONS[each] for each in wanted])[0]
    try:
        chosen(scene)
    except StoreError as error:
        if not scene.tight or error.reason not in ("QUOTA_EXCEEDED", "NO_ROOM", "PARENT_NOT_STORED"):
            raise
        scene.look()
        for session in list(scene.node.peer.sessions):
            scene.node.close_session(session)
