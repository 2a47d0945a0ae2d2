"""Where the time of a slot's runs went: what is counted adds up, and a slow disk is blamed on the disk."""

import time
from pathlib import Path

import numpy as np
import pytest

from decode_worker._native import OP_GATHER, OP_RANGE
from kvstore_service._native import NativeError
from tests.support import shim_build
from tests.support.rig import ERROR, OK, Rig, run

TOKENS, LANES, LAYERS, RECORD_BYTES = 512, 2, 2, 512
PARTS = ("queue_ns", "pins_ns", "disk_ns", "copy_ns", "commit_ns")
DELAY_US = 30_000


def gather(rig: Rig, epoch: int, layer: int, lane: int, count: int) -> None:
    pairs = np.stack([np.arange(count)] * 2, axis=1).astype(np.uint32)
    answer = rig.ask(OP_GATHER, layer, run(0, epoch, lane=lane, pair_count=count), pairs)
    assert answer.tolist() == [[OK, 0]]


def test_what_is_counted_adds_up(directory: Path, rng: np.random.Generator) -> None:
    with Rig(directory) as rig:
        pack = rig.make_pack(rng, LAYERS, LANES, RECORD_BYTES, TOKENS)
        with pytest.raises(NativeError, match="slot 0 is not bound"):
            rig.plane.waits(rig.worker, 0)
        epoch = rig.bind(0, [pack], TOKENS)
        began_ns, before = time.monotonic_ns(), rig.plane.stats()
        gather(rig, epoch, 1, 0, 100)
        cold, stalled = rig.plane.waits(rig.worker, 0)
        assert [lane[:3] for lane in stalled] == [(1, 0, 1)]
        assert stalled[0][3] >= cold["gather"]["disk_ns"] > 0
        for _ in range(3):
            gather(rig, epoch, 1, 0, 100)
        assert rig.ask(OP_RANGE, 0, run(0, epoch, lane=1, pair_count=TOKENS)).tolist() == [[OK, 0]]
        took_ns, stats = time.monotonic_ns() - began_ns, rig.plane.stats()
        ops, stalled = rig.plane.waits(rig.worker, 0)
        assert {name: op["runs"] for name, op in ops.items()} == {"gather": 4, "range": 1, "store": LAYERS * LANES}
        assert ops["gather"]["disk_ns"] == cold["gather"]["disk_ns"]  # the others were hot
        assert ops["gather"]["moved_bytes"] == 4 * 100 * RECORD_BYTES
        assert ops["range"]["moved_bytes"] == TOKENS * RECORD_BYTES
        for name, counted in (("extent_hits", "extent_hits"), ("extent_misses", "extent_misses")):
            assert sum(ops[op][name] for op in ("gather", "range")) == stats[counted] - before[counted]
        read = sum(ops[op]["read_bytes"] for op in ("gather", "range"))
        assert read == stats["nvme_read_bytes"] - before["nvme_read_bytes"]
        assert 0 < sum(ops[op][part] for op in ("gather", "range") for part in PARTS) <= took_ns
        assert all(op["slowest_ns"] <= sum(op[part] for part in PARTS) for op in ops.values())
        assert {lane[:2] for lane in stalled} == {(1, 0), (0, 1)}
        assert rig.plane.moved() == {rig.owner: 4 * 100 * RECORD_BYTES + TOKENS * RECORD_BYTES}


def test_a_slot_that_is_bound_anew_begins_at_nothing(directory: Path, rng: np.random.Generator) -> None:
    with Rig(directory) as rig:
        pack = rig.make_pack(rng, LAYERS, LANES, RECORD_BYTES, TOKENS)
        old = rig.bind(0, [pack], TOKENS)
        gather(rig, old, 0, 0, 10)
        rig.plane.unbind(rig.worker, 0)
        with pytest.raises(NativeError, match="slot 0 is not bound"):
            rig.plane.waits(rig.worker, 0)
        epoch = rig.bind(0, [pack], TOKENS)
        stale = rig.ask(OP_RANGE, 0, run(0, old, pair_count=1))
        assert stale[0, 0] not in (OK, ERROR)
        ops, stalled = rig.plane.waits(rig.worker, 0)
        assert (ops["gather"]["runs"], ops["range"]["runs"], stalled) == (0, 0, [])
        assert rig.ask(OP_RANGE, LAYERS, run(0, epoch, pair_count=1))[0, 0] == ERROR
        ops, _ = rig.plane.waits(rig.worker, 0)
        assert (ops["range"]["runs"], ops["range"]["failed"], ops["range"]["moved_bytes"]) == (1, 1, 0)


def test_a_slow_disk_is_blamed_on_the_disk(directory: Path, rng: np.random.Generator) -> None:
    native = shim_build.native()
    with Rig(directory, native=native) as rig:
        pack = rig.make_pack(rng, LAYERS, LANES, RECORD_BYTES, TOKENS)
        epoch = rig.bind(0, [pack], TOKENS)
        for layer in range(LAYERS):
            for lane in range(LANES):
                gather(rig, epoch, layer, lane, 8)
        native.io_shim_set([("gather", "delay", 1, 1 << 40, DELAY_US)])
        before, _ = rig.plane.waits(rig.worker, 0)
        gather(rig, epoch, 1, 1, TOKENS)
        native.io_shim_set([])
        after, stalled = rig.plane.waits(rig.worker, 0, lanes=1)
        more = {part: after["gather"][part] - before["gather"][part] for part in PARTS}
        assert more["disk_ns"] >= DELAY_US * 1000
        assert after["gather"]["slowest_ns"] >= DELAY_US * 1000
        assert [lane[:2] for lane in stalled] == [(1, 1)]
        assert stalled[0][4] >= DELAY_US * 1000 - 1000
