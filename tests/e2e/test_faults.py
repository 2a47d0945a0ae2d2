"""What breaks: disks, daemons, workers, copies. Every failure is bounded in time and is an error, never other bytes."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from decode_worker import _native
from decode_worker.engine.engine import Engine
from decode_worker.engine.prefix import candidates
from decode_worker.engine.session import Session
from kvstore_service.client import AdminClient, StoreError
from tests.support.daemon_process import Daemon

from .conftest import (
    PACK_TOKENS,
    EngineFactory,
    Expected,
    attached_tokens,
    greedy,
    joined,
    random_ids,
    read_tokens,
    worker_process,
    worker_settings,
)
from .pack_files import BLOCK_BYTES, packs_by_id

DOCUMENT, QUESTION = 1280, 3


class RecordingRing:
    """Passes everything on to a ring; `posted` is what went through: (layer, runs, pairs)."""

    def __init__(self, ring: _native.RingProducer) -> None:
        self._ring = ring
        self.posted: list[tuple[int, NDArray[np.void], NDArray[np.uint32]]] = []

    def post(
        self, op: int, step: int, layer: int, runs: NDArray[np.void], pairs: NDArray[np.uint32], timeout_us: int
    ) -> int:
        self.posted.append((layer, runs.copy(), pairs.copy()))
        return self._ring.post(op, step, layer, runs, pairs, timeout_us)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ring, name)


# --- a byte on disk ---


@pytest.mark.timeout(90)
@pytest.mark.parametrize("stale", ["use", "fail"])
def test_a_flipped_byte_ends_in_data_loss_and_never_in_an_answer(daemon: Daemon, checkpoint: Path, stale: str) -> None:
    """The byte lies in a block that only the third step needs, when every head has an old set to fall back on."""
    seed = 51
    print(f"seed {seed}")
    ids = random_ids(DOCUMENT + QUESTION, seed)
    settings = {"policy": "infinigen", "slack": 1.0, "stale": stale}
    with joined(daemon, checkpoint, **settings) as worker:
        worker.close_session(worker.prefill(ids[:DOCUMENT])[0])
        needed = blocks_of_steps(worker, daemon.data_dir, ids)
    path, block = min(needed[-1].difference(*needed[:-1]))
    next(pack for pack in packs_by_id(daemon.data_dir).values() if pack.path == path).flip(block * BLOCK_BYTES + 77)
    daemon.restart()
    with joined(daemon, checkpoint, **settings) as worker:
        session, rest = worker.attach(ids)
        for token in rest[:-1]:
            worker.step([session], [token])
        for _ in range(2):
            with pytest.raises(StoreError) as failure:
                worker.step([session], [rest[-1]])
            assert failure.value.code == "DATA_LOSS"
        assert session.position == DOCUMENT + QUESTION - 1, "the failed step has left no token"
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        assert admin.get_status().counters["crc_errors"] >= 1


def blocks_of_steps(worker: Engine, data_dir: Path, ids: list[int]) -> list[set[tuple[Path, int]]]:
    """(file, block) that binding, and then each step over the question, fetches from."""
    packs = packs_by_id(data_dir)
    ring = RecordingRing(worker.transport.bulk)
    worker.transport.bulk = ring
    session, rest = worker.attach(ids)
    files = [(ref.first_token, packs[ref.pack_id]) for ref in (pack.ref for pack in session.packs)]

    def block(layer: int, head: int, record: int) -> tuple[Path, int]:
        first, file = max((item for item in files if item[0] <= record), key=lambda item: item[0])
        return file.path, file.offset(layer, head, record - first) // BLOCK_BYTES

    bound = set()
    for layer, runs, pairs in ring.posted:
        for run in runs:
            records = pairs[run["first_pair"] : run["first_pair"] + run["pair_count"], 0]
            bound |= {block(layer, int(run["lane"]), int(record)) for record in records}
    needed, before = [bound], held_records(worker, session)
    for token in rest:
        worker.step([session], [token])
        held = held_records(worker, session)
        needed.append({block(*record) for record in held - before})
        before = held
    worker.close_session(session)
    return needed


def held_records(worker: Engine, session: Session) -> set[tuple[int, int, int]]:
    """(layer, head, record) of every set in use."""
    return {(layer, head, int(i)) for layer, head, records, _ in sets_of(worker, session) for i in records}


def sets_of(worker: Engine, session: Session) -> Iterator[tuple[int, int, NDArray[np.int32], NDArray[np.int32]]]:
    """Layer, head, records and their places of every set in use."""
    state = worker.policy.state
    for layer, head in np.argwhere(~worker.policy.settings.resident).tolist():
        side = state.side(layer, session.slot, head)
        count = int(state.held_count[side])
        yield layer, head, state.held[side][:count].numpy(), state.held_places[side][:count].numpy()


# --- the daemon dies ---


@pytest.mark.timeout(60)
def test_a_daemon_killed_in_a_step_costs_one_deadline_and_then_nothing(daemon: Daemon, engine: EngineFactory) -> None:
    seed, wait_ms = 52, 1000
    print(f"seed {seed}")
    worker = engine(policy="infinigen", wait_ms=wait_ms, slots=2)
    session, logits = worker.prefill(random_ids(900, seed))
    tokens = greedy(worker, session, logits, 4)
    daemon.set_faults(delay_us=300_000)
    threading.Timer(0.1, os.kill, (daemon.pid, signal.SIGKILL)).start()
    started = time.monotonic()
    with pytest.raises(_native.RingTimeout, match="poisoned"):
        worker.step([session], tokens[-1:])
    assert wait_ms / 1000 <= time.monotonic() - started < 2 * wait_ms / 1000
    for call in (lambda: worker.step([session], tokens[-1:]), lambda: worker.attach(random_ids(900, seed))):
        started = time.monotonic()
        with pytest.raises((_native.RingPoisoned, StoreError)):
            call()
        assert time.monotonic() - started < 0.5, "poison is final"


@pytest.mark.timeout(60)
def test_poison_is_final_even_if_every_head_would_hit(daemon: Daemon, engine: EngineFactory) -> None:
    worker = engine(policy="qsac", eta=-1.0, wait_ms=300, slots=2)
    session, logits = worker.prefill(random_ids(900, 53))
    greedy(worker, session, logits, 2)
    daemon.set_faults(stopped=True)
    with pytest.raises(_native.RingTimeout):
        worker.attach(random_ids(900, 53))
    with pytest.raises(_native.RingPoisoned):
        worker.step([session], [1])


@pytest.mark.timeout(120)
def test_a_daemon_killed_in_prefill_keeps_what_it_acknowledged_and_nothing_else(
    daemon: Daemon, checkpoint: Path
) -> None:
    """Three kills, at other moments: while packs are written, while they are committed, after the first commit."""
    seed, wait_ms = 54, 1000
    print(f"seed {seed}")
    ids = random_ids(DOCUMENT + 600, seed)
    document = ids[:DOCUMENT]
    with joined(daemon, checkpoint, policy="qsac", eta=0.5) as worker:
        worker.close_session(worker.prefill(document)[0])
        wanted = attached_tokens(worker, [*document, 7], 8)
    for moment in ("store", "commit", "committed"):
        with joined(daemon, checkpoint, policy="qsac", eta=0.5, wait_ms=wait_ms) as worker:
            limit_s = wait_ms / 1000 + seconds_of(lambda worker=worker: worker.compute_only(ids)) * 3 + 2
            started = time.monotonic()
            with (
                pytest.raises((StoreError, _native.RingTimeout)) as failure,
                killer(daemon, worker, moment) as progress,
            ):
                worker.prefill(ids, progress)
            took_s = time.monotonic() - started
            print(f"{moment}: {took_s:.2f} s of {limit_s:.2f} s, {failure.value!r}")
            assert took_s < limit_s
            # A chunk that takes longer than the wait finds the heartbeat stopped before a ticket's wait has ended.
            code = getattr(failure.value, "code", "timeout of a ring")
            assert code in (("timeout of a ring", "DEADLINE_EXCEEDED") if moment == "store" else ("UNAVAILABLE",))
        daemon.restart()
        assert_whole_packs(daemon, checkpoint, ids)
        with joined(daemon, checkpoint, policy="qsac", eta=0.5) as worker:
            assert attached_tokens(worker, [*document, 7], 8) == wanted


@contextmanager
def killer(daemon: Daemon, worker: Engine, moment: str) -> Iterator[Callable[[int, int], None]]:
    """Kills the daemon while the block prefills; the block passes the yielded function as `progress`."""
    client, commit = worker.client, worker.client.commit_pack

    pid = daemon.pid

    def kill() -> None:
        with suppress(ProcessLookupError):  # a timer may come after the test has ended the daemon
            os.kill(pid, signal.SIGKILL)

    def progress(done: int, total: int) -> None:
        if moment == "store" and done >= total // 2:
            kill()

    def commit_pack(*arguments: Any) -> Any:
        if moment == "committed":
            commit(*arguments)
            kill()
        threading.Timer(random.Random(moment).uniform(0, 0.01), kill).start()
        return commit(*arguments)

    client.commit_pack = commit_pack  # type: ignore[method-assign]
    try:
        yield progress
    finally:
        client.commit_pack = commit  # type: ignore[method-assign]


def seconds_of(call: Callable[[], object]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started


def assert_whole_packs(daemon: Daemon, checkpoint: Path, ids: list[int]) -> None:
    """Lookup finds whole committed packs, every one passes its checks, and no other file is left."""
    with joined(daemon, checkpoint) as worker:
        found = worker.client.lookup_prefix(worker.layout.fingerprint, candidates(ids, PACK_TOKENS))
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        rows = {pack.pack_id for pack in admin.list_packs()}
        verified = list(admin.verify())
        assert admin.get_status().counters["uploads_open"] == 0
    assert all(not answer.error and not answer.bad_blocks for answer in verified)
    assert {answer.pack_id for answer in verified} == rows == set(packs_by_id(daemon.data_dir))
    assert {ref.pack_id for ref in found} <= rows
    assert sum(ref.tokens for ref in found) >= DOCUMENT // PACK_TOKENS * PACK_TOKENS


# --- the worker dies ---


@pytest.mark.timeout(60)
def test_a_worker_killed_in_decode_gives_everything_back_within_two_seconds(daemon: Daemon, checkpoint: Path) -> None:
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        admin.get_status()
        before = daemon.open_descriptors()
        order = {
            "config": worker_settings(daemon, checkpoint, policy="infinigen"),
            "prompt": random_ids(900, 55),
            "steps": 3000,
        }
        with worker_process(order) as process:
            read_tokens(process, 5)
            held = admin.get_status()
            assert (held.workers, held.sessions, held.counters["bound_slots"]) == (1, 1, 1)
            assert daemon.open_descriptors() > before
            process.kill()
            deadline = time.monotonic() + 2.0
            process.wait(10)
        while not (released := is_released(admin, daemon, before)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert released, admin.get_status()


def is_released(admin: AdminClient, daemon: Daemon, descriptors: int) -> bool:
    """No worker, session, slot, ring, upload or shared memory is left; packs may stay open for their frames."""
    status = admin.get_status()
    left = [status.workers, status.sessions, *(status.counters[name] for name in ("bound_slots", "rings", "workers"))]
    maps = Path(f"/proc/{daemon.pid}/maps").read_text()
    return (
        not any(left)
        and "memfd:" not in maps
        and daemon.open_descriptors() <= (descriptors + status.counters["packs_open"])
    )


# --- copies fail ---


@pytest.mark.timeout(60)
@pytest.mark.parametrize("policy", ["infinigen", "qsac"])
def test_failed_copies_leave_old_coherent_sets_and_never_other_bytes(
    daemon: Daemon, engine: EngineFactory, policy: str
) -> None:
    seed = 56
    print(f"seed {seed}")
    worker = engine(policy=policy, eta=0.8, stale="use", slack=1.0)
    session, logits = worker.prefill(random_ids(1100, seed))
    daemon.set_faults(fail_every=3, delay_us=200, delay_random=True, reorder=True, seed=seed)
    stored = stored_records(session, daemon.data_dir)
    for _ in range(30):
        logits = worker.step([session], [int(logits.argmax())])
        assert_window_is_stored(worker, session, stored)
    counters = worker.policy.counters
    assert counters.errors > 5
    assert counters.stale >= counters.errors, "every failure was covered by an old set"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("stale", "slack"), [("fail", 1.0), ("use", 0.0)], ids=["stale-fails", "nothing-to-fall-back-on"]
)
def test_a_step_that_failed_can_be_repeated_and_then_answers_as_the_oracle(
    daemon: Daemon, engine: EngineFactory, expected: Expected, stale: str, slack: float
) -> None:
    """Without slack a head gives its old set up before the new one is there, so even stale=use has to fail."""
    seed, steps = 57, 16
    print(f"seed {seed}")
    prompt = random_ids(1100, seed)
    worker = engine(policy="infinigen", stale=stale, slack=slack)
    session, logits = worker.prefill(prompt)
    stored = stored_records(session, daemon.data_dir)
    tokens: list[int] = []
    while len(tokens) < steps:
        token = int(logits.argmax())
        daemon.set_faults(fail_every=2)
        with pytest.raises(StoreError) as failure:
            worker.step([session], [token])
        assert failure.value.code == "INTERNAL"
        assert_window_is_stored(worker, session, stored)
        daemon.set_faults()
        logits = worker.step([session], [token])[0]
        assert_window_is_stored(worker, session, stored)
        tokens.append(token)
    assert tokens == expected.tokens(prompt, steps, policy="infinigen", retriever="exact", budget=0.1)


@pytest.mark.timeout(60)
def test_a_prefill_that_failed_leaves_its_engine_usable(
    daemon: Daemon, engine: EngineFactory, expected: Expected
) -> None:
    """Failed stores, then a failed bind, more of them than the ring has tickets."""
    prompt = random_ids(1100, 57)
    worker = engine(policy="infinigen")
    for _ in range(3):
        daemon.set_faults(fail_every=5)
        with pytest.raises(StoreError):
            worker.prefill(prompt)
    daemon.set_faults()
    session, logits = worker.prefill(prompt)
    worker.close_session(session)
    daemon.set_faults(fail_every=2)
    for _ in range(3):
        with pytest.raises(StoreError):
            worker.attach(prompt)
    daemon.set_faults()
    session, logits = worker.prefill(prompt)
    wanted = expected.tokens(prompt, 16, policy="infinigen", retriever="exact", budget=0.1)
    assert greedy(worker, session, logits, 16) == wanted


def stored_records(session: Session, data_dir: Path) -> NDArray[np.uint8]:
    """Every record of a session as its pack files hold it, uint8[layers, lanes, records, record_bytes]."""
    packs = packs_by_id(data_dir)
    return np.concatenate([packs[pack.ref.pack_id].records() for pack in session.packs], axis=2)


def assert_window_is_stored(worker: Engine, session: Session, stored: NDArray[np.uint8]) -> None:
    """Every place of every committed set holds the bytes of its record."""
    geometry = session.geometry
    for layer, head, records, places in sets_of(worker, session):
        first = session.slot * worker.slot_bytes + int(geometry.offsets[layer, head])
        lane = worker.transport.window.tensor[first : first + int(geometry.places[layer, head]) * geometry.record_bytes]
        held = lane.numpy().reshape(-1, geometry.record_bytes)[places]
        assert len(np.unique(places)) == len(places)
        np.testing.assert_array_equal(held, stored[layer, head, records])
