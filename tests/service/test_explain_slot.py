"""Explain of a slot: where its runs' time went, as an operator asks it of a real daemon."""

import json

import numpy as np
import pytest

from kvstore_service.client import AdminClient, StoreError
from tests.service.test_administration import run
from tests.support.daemon_process import Daemon
from tests.support.world import LANES, LAYERS, LAYOUT, RECORD_BYTES, TOKENS, TestWorker


def bound(worker: TestWorker, slot: int, times: int) -> str:
    """A session in a slot, and gathers of all that it has."""
    session = worker.client.open_session(LAYOUT, 1024)
    pack = worker.commit(session, 1)
    worker.client.attach_packs(session, [pack])
    epoch = worker.client.bind_slot(session, slot, [pack], worker.windows(slot))
    for _ in range(times):
        worker.gather(slot, epoch, np.arange(TOKENS, dtype=np.uint32))
    return session


def test_a_slot_says_where_its_runs_time_went(daemon: Daemon, worker: TestWorker, admin: AdminClient) -> None:
    session = bound(worker, 1, times=3)
    (listed,) = admin.list_sessions()
    (slot,) = listed.slots
    shown = json.loads(run(daemon, "--format=json", "explain", str(slot)).stdout)
    (finding,) = shown["findings"]
    assert (finding["subject"], finding["answer"]) == (f"slot {listed.worker_id}/1", "bound")
    assert session in finding["detail"]
    (waits,) = shown["slots"]
    assert (waits["worker_id"], waits["slot"], waits["session_id"]) == (listed.worker_id, 1, session)
    ops = {op.pop("op"): op for op in waits["ops"]}
    assert set(ops) == {"gather", "store"}
    gather = ops["gather"]
    assert (gather["runs"], gather["failed"]) == (3 * LAYERS * LANES, 0)
    assert gather["moved_bytes"] == 3 * LAYERS * LANES * TOKENS * RECORD_BYTES
    assert 0 < gather["read_bytes"] < gather["moved_bytes"]
    assert gather["extent_hits"] > 0
    assert gather["extent_misses"] > 0
    assert all(gather[f"{part}_ns"] > 0 for part in ("queue", "pins", "disk", "copy", "commit", "slowest"))
    assert {(lane["layer"], lane["lane"]) for lane in waits["lanes"]} == {
        (layer, lane) for layer in range(LAYERS) for lane in range(LANES)
    }
    assert admin.explained(session).slots[0].slot == 1
    table = run(daemon, "explain", f"{listed.worker_id}/1")
    assert table.returncode == 0
    assert "gather" in table.stdout
    assert "longest waits" in table.stdout


@pytest.mark.parametrize("subject", ["0", "7", "99/1", "0/1"])
def test_a_slot_that_is_not_bound_is_one_line(
    daemon: Daemon, worker: TestWorker, admin: AdminClient, subject: str
) -> None:
    bound(worker, 1, times=0)
    done = run(daemon, "explain", subject)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"kvctl: slot {subject} is not bound; kvctl sessions shows those that are\n"
    assert not admin.explained("1").slots[0].lanes
    with pytest.raises(StoreError, match="NOT_FOUND"):
        admin.explain(subject)
