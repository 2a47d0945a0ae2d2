"""A store that has no room, or drains, at a seal: the session goes on until its tail is full, and then says so."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from decode_worker.engine.engine import Engine
from decode_worker.engine.sealing import SEAL_STEPS
from kvstore_service.client import AdminClient, ReservedPack, StoreError, Violation
from tests.support.daemon_process import Daemon

from .conftest import EngineFactory, Expected, greedy, random_ids

PROMPT = 520
SETTINGS = {"policy": "qsac", "eta": 0.5, "budget": 64, "order": "token"}
FIRST_SEAL, TAIL_FULL = 512 + 256 + 64, 512 + 576  # positions: the prompt stores 512; recent 64, tail 576


@contextmanager
def refusing(worker: Engine, error: StoreError) -> Iterator[list[int]]:
    """The store refuses every reservation with `error`; yields the number of attempts, in a list."""
    attempts, reserve = [0], worker.client.reserve_pack

    def refuse(*_: Any, **__: Any) -> list[ReservedPack]:
        attempts[0] += 1
        raise error

    worker.client.reserve_pack = refuse  # type: ignore[method-assign]
    try:
        yield attempts
    finally:
        worker.client.reserve_pack = reserve  # type: ignore[method-assign]


FULL = StoreError("RESOURCE_EXHAUSTED", "no room", 0.001, [Violation("nvme_bytes", "no room")])
FULL_FOR_LONG = StoreError("RESOURCE_EXHAUSTED", "no room", 3600.0, [Violation("nvme_bytes", "no room")])
DRAINING = StoreError("UNAVAILABLE", "the daemon is draining", 3600.0)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("error", [FULL_FOR_LONG, DRAINING], ids=["full", "draining"])
def test_a_seal_that_is_refused_waits_until_the_tail_is_full(engine: EngineFactory, error: StoreError) -> None:
    worker = engine(**SETTINGS)
    session, logits = worker.prefill(random_ids(PROMPT, 61))
    with refusing(worker, error) as attempts:
        with pytest.raises(StoreError, match="the session's tail is full") as failure:
            greedy(worker, session, logits, TAIL_FULL)
        assert (failure.value.code, failure.value.violations) == (error.code, error.violations)
        assert session.position == TAIL_FULL, "every place of the tail was used"
        assert attempts == [2], "once when it was due, once when it had to be, not before retry_after_s was over"
    worker.step([session], [1])
    assert session.stored > 512, "it went on as soon as there was room"


@pytest.mark.timeout(90)
def test_a_session_that_waited_for_room_decodes_as_the_oracle(engine: EngineFactory, expected: Expected) -> None:
    """Everything that is stored fits the budget, and nothing is lost that waits in the tail: full attention."""
    prompt, steps = random_ids(PROMPT, 62), FIRST_SEAL - PROMPT + 60
    settings = {**SETTINGS, "policy": "infinigen", "budget": 4000}
    worker = engine(**settings)
    session, logits = worker.prefill(prompt)
    with refusing(worker, FULL) as attempts:
        tokens = greedy(worker, session, logits, steps)
    assert attempts[0] > 2, "it was tried again"
    assert session.stored == 512
    assert tokens == expected.tokens(prompt, steps, policy="full")


@pytest.mark.timeout(90)
def test_an_index_without_room_costs_no_session_and_is_stored_later(daemon: Daemon, engine: EngineFactory) -> None:
    worker = engine(**SETTINGS)
    put = worker.client.put_sidecar

    def refuse(*_: Any) -> None:
        raise FULL

    worker.client.put_sidecar = refuse  # type: ignore[method-assign]
    session, logits = worker.prefill(random_ids(PROMPT, 63))
    greedy(worker, session, logits, FIRST_SEAL - PROMPT + SEAL_STEPS + 2)
    assert session.stored == 768, "the tail was sealed without its index"
    assert worker.catalogue.sidecars_refused >= 2
    worker.client.put_sidecar = put  # type: ignore[method-assign]
    worker.close_session(session)
    worker.close_session(worker.prefill(random_ids(PROMPT, 64))[0])
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        assert all(pack.sidecars for pack in admin.list_packs())


@pytest.mark.timeout(90)
def test_an_index_that_the_store_takes_too_long_for_ends_no_session(engine: EngineFactory) -> None:
    worker = engine(**SETTINGS)
    put, left = worker.client.put_sidecar, [1]

    def late(*arguments: Any) -> None:
        if left and left.pop():
            raise StoreError("DEADLINE_EXCEEDED", "the call's deadline has passed")
        put(*arguments)

    session, logits = worker.prefill(random_ids(PROMPT, 64))
    worker.client.put_sidecar = late  # type: ignore[method-assign]
    greedy(worker, session, logits, FIRST_SEAL + SEAL_STEPS + 20 - PROMPT)
    assert (session.stored, left, worker.catalogue.sidecars_refused) == (768, [], 1)


@pytest.mark.timeout(90)
def test_a_tail_is_sealed_with_its_index(engine: EngineFactory) -> None:
    """Whenever its session ends: nobody has to read the pack back to index it."""
    worker = engine(**SETTINGS)
    session, logits = worker.prefill(random_ids(PROMPT, 65))
    greedy(worker, session, logits, FIRST_SEAL + 1 - PROMPT)
    worker.step([session], [1])
    assert session.sealing is not None
    sealed, conversation = session.sealing.finish(), list(session.tokens)
    worker.close_session(session)
    other = engine(**SETTINGS)
    assert other.catalogue.find(sealed.ref) is not None
    assert other.attach(conversation)[0].stored == 768


@pytest.mark.timeout(90)
@pytest.mark.parametrize("error", [FULL, FULL_FOR_LONG], ids=["soon", "when it is full"])
def test_what_fails_behind_a_seal_is_done_later_and_the_seal_is_not(engine: EngineFactory, error: StoreError) -> None:
    """As when another writer's pack won, and the store refuses its map at first."""
    ids = random_ids(TAIL_FULL + 1, 66)
    worker = engine(**SETTINGS)
    session, _ = worker.prefill(ids[:PROMPT])
    commit, refused = worker._writer._committed, [1]

    def refuse(*arguments: Any) -> Any:
        if refused and refused.pop():
            raise error
        return commit(*arguments)

    worker._writer._committed = refuse  # type: ignore[method-assign]
    for token in ids[PROMPT:]:
        worker.step([session], [token])
        if session.sealing is not None:
            with suppress(StoreError):
                session.sealing.finish()
    assert (session.stored, refused) == (768, [])


@pytest.mark.timeout(90)
def test_a_tail_that_is_stored_and_indexed_is_not_copied_again(engine: EngineFactory) -> None:
    worker = engine(**SETTINGS)
    copied, tail = [], worker._sealer._tail

    def counted(*arguments: Any) -> Any:
        copied.append(arguments)
        return tail(*arguments)

    worker._sealer._tail = counted  # type: ignore[method-assign]
    counts = []
    for _ in range(2):
        session, logits = worker.prefill(random_ids(PROMPT, 67))
        greedy(worker, session, logits, FIRST_SEAL + SEAL_STEPS + 2 - PROMPT)
        assert session.stored == 768
        worker.close_session(session)
        counts.append(len(copied))
    assert counts[0] == counts[1] > 0
