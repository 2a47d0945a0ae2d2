"""A flipped bit of an index costs that index; one of a pack is a miss, and all damage surfaces at once."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from decode_worker.engine.engine import Engine
from decode_worker.engine.prefix import candidates
from kvstore_service.client import AdminClient, PackRef, StoreError
from tests.support.daemon_process import Daemon
from tests.support.life import until

from .conftest import PACK_TOKENS, EngineFactory, Expected, attached_tokens, greedy, joined, random_ids
from .pack_files import PackFile, packs_by_id

DOCUMENT, QUESTION, STEPS = 4 * PACK_TOKENS, 4, 8
SETTINGS = {"policy": "infinigen"}


@pytest.fixture
def ids(daemon: Daemon, checkpoint: Path) -> list[int]:
    """A stored document of four packs, whose daemon has been restarted since, and a question."""
    seed = 91
    print(f"seed {seed}")
    ids = random_ids(DOCUMENT + QUESTION, seed)
    with joined(daemon, checkpoint, **SETTINGS) as worker:
        worker.close_session(worker.prefill(ids[:DOCUMENT])[0])
    return ids


def wanted(expected: Expected, ids: list[int]) -> list[int]:
    oracle = expected.oracle(retriever="exact", budget=0.1, **SETTINGS)
    return oracle.greedy(oracle.attach(ids[:DOCUMENT], ids[DOCUMENT:]), STEPS)


def sidecars(daemon: Daemon) -> list[Path]:
    return sorted((daemon.data_dir / "sidecars").iterdir())


def flip_a_bit(path: Path, seed: int) -> None:
    content = bytearray(path.read_bytes())
    bit = random.Random(seed).randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def stored_in_order(daemon: Daemon, worker: Engine, ids: list[int]) -> list[PackFile]:
    """The document's pack files."""
    packs = packs_by_id(daemon.data_dir)
    session, _ = worker.attach(ids)
    worker.close_session(session)
    return [packs[pack.ref.pack_id] for pack in session.packs]


def damaged_packs(daemon: Daemon) -> int:
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        return sum(pack.damaged for pack in admin.list_packs())


@pytest.mark.timeout(90)
@pytest.mark.parametrize("spoil", [lambda path: flip_a_bit(path, 92), Path.unlink], ids=["flipped", "lost"])
def test_an_index_that_is_damaged_or_lost_is_made_again_from_the_stored_keys(
    daemon: Daemon, engine: EngineFactory, expected: Expected, ids: list[int], spoil: Callable[[Path], None]
) -> None:
    daemon.stop()
    for path in sidecars(daemon)[:2]:
        spoil(path)
    daemon.start()
    assert attached_tokens(engine(**SETTINGS), ids, STEPS) == wanted(expected, ids)
    again = engine(**SETTINGS)
    assert all(again.catalogue.find(pack) for pack in found(again, ids)), "it was stored again"


def found(worker: Engine, ids: list[int]) -> list[PackRef]:
    return worker.client.lookup_prefix(worker.layout.fingerprint, candidates(ids, PACK_TOKENS))


@pytest.mark.timeout(90)
def test_a_session_of_another_retriever_indexes_what_it_finds(
    daemon: Daemon, engine: EngineFactory, ids: list[int]
) -> None:
    """As a prefill with that retriever would have: the same index, from the keys as they are stored."""
    rebuilt = engine(policy="infinigen", retriever="hash")
    session, _ = rebuilt.attach(ids)
    assert session.stored == DOCUMENT
    other = engine(policy="infinigen", retriever="hash")
    prefilled, _ = other.prefill(ids)
    for pack, fresh in zip(session.packs, prefilled.packs, strict=True):
        assert pack.index.data.tolist() == fresh.index.data.tolist()


@pytest.mark.timeout(90)
def test_a_prefill_over_damaged_indexes_goes_on_and_replaces_them(
    daemon: Daemon, engine: EngineFactory, expected: Expected, ids: list[int]
) -> None:
    daemon.stop()
    for path in sidecars(daemon):
        flip_a_bit(path, 93)
    daemon.start()
    worker = engine(**SETTINGS)
    session, logits = worker.prefill(ids[:DOCUMENT])
    again = engine(**SETTINGS)
    assert all(again.catalogue.find(pack) for pack in found(again, ids))
    assert greedy(worker, session, logits, STEPS) == expected.tokens(
        ids[:DOCUMENT], STEPS, retriever="exact", budget=0.1, **SETTINGS
    )


@pytest.mark.timeout(90)
@pytest.mark.parametrize("where", ["data", "map"])
def test_an_attach_goes_on_with_the_longest_chain_that_is_good(
    daemon: Daemon, engine: EngineFactory, checkpoint: Path, ids: list[int], where: str
) -> None:
    """The third and the last of four packs are damaged, in a head that is held in full."""
    with joined(daemon, checkpoint, **SETTINGS) as worker:
        files = stored_in_order(daemon, worker, ids)
    daemon.stop()
    for file in files[2:]:
        file.flip({"data": file.offset(0, 1, 300), "map": file.map_off}[where])
    daemon.start()
    worker = engine(**SETTINGS)
    session, rest = worker.attach(ids)
    assert session.stored == 2 * PACK_TOKENS
    assert rest == ids[2 * PACK_TOKENS :]


@pytest.mark.timeout(120)
def test_damage_that_a_step_meets_ends_that_run_only_and_all_of_it_surfaces_with_it(
    daemon: Daemon, engine: EngineFactory, checkpoint: Path, expected: Expected, ids: list[int]
) -> None:
    """Blocks that binding does not need, of two packs; the next run writes both of them anew."""
    with joined(daemon, checkpoint, **SETTINGS) as worker:
        files = stored_in_order(daemon, worker, ids)
    daemon.stop()
    for file in files[1:3]:
        for record in range(0, PACK_TOKENS, 8):
            for head in (0, 1):
                file.flip(file.offset(3, head, record))
    daemon.start()
    worker = engine(**SETTINGS)
    session, rest = worker.attach(ids)
    assert session.stored == DOCUMENT
    with pytest.raises(StoreError) as failure:
        worker.step([session], rest[:1])
    worker.give_up(session, failure.value)
    assert failure.value.code == "DATA_LOSS"
    until(lambda: damaged_packs(daemon) == 2, "the daemon has verified the chain")
    worker = engine(**SETTINGS)
    worker.close_session(worker.prefill(ids[:DOCUMENT])[0])
    assert damaged_packs(daemon) == 0
    assert attached_tokens(worker, ids, STEPS) == wanted(expected, ids)


@pytest.mark.timeout(120)
def test_a_prefill_of_damaged_packs_writes_all_of_them_anew_in_one_run(
    daemon: Daemon, engine: EngineFactory, checkpoint: Path, expected: Expected, ids: list[int]
) -> None:
    with joined(daemon, checkpoint, **SETTINGS) as worker:
        files = stored_in_order(daemon, worker, ids)
    daemon.stop()
    files[0].flip(files[0].map_off)
    files[1].flip(files[1].map_off + 8)
    for file in files[2:]:
        file.flip(file.offset(0, 0, 100))
    daemon.start()
    worker = engine(**SETTINGS)
    session, logits = worker.prefill(ids[:DOCUMENT])
    assert damaged_packs(daemon) == 0
    assert greedy(worker, session, logits, STEPS) == expected.tokens(
        ids[:DOCUMENT], STEPS, retriever="exact", budget=0.1, **SETTINGS
    )
