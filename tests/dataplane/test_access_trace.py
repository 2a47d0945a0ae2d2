"""What runs want of the tier, as a listener hears it: every extent, and nothing when nobody listens."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from decode_worker._native import OP_GATHER, OP_RANGE
from kvstore_service import _native
from kvstore_service._native import NativeError
from kvstore_service.shared.accesses import joined
from tests.support.rig import OK, Rig, run, until

ACCESS = np.dtype(list(_native.ACCESS_FIELDS))
TOKENS, LANES, LAYERS, RECORD_BYTES = 512, 2, 2, 512
PER_BLOCK, BLOCKS = 8, 4  # records of a block, blocks of an extent
WAITING_MAX = 131_072


def drain(rig: Rig) -> tuple[NDArray[np.void], int]:
    records, dropped = rig.plane.drain_accesses()
    return np.frombuffer(records, ACCESS), dropped


def gather(rig: Rig, epoch: int, layer: int, lane: int, records: NDArray[np.uint32]) -> None:
    pairs = np.column_stack([records, np.arange(len(records), dtype=np.uint32)]).astype(np.uint32)
    answer = rig.ask(OP_GATHER, layer, run(0, epoch, lane=lane, pair_count=len(records)), pairs)
    assert answer.tolist() == [[OK, 0]]


def test_every_extent_of_a_run_is_told_with_what_was_wanted(directory: Path, rng: np.random.Generator) -> None:
    with Rig(directory, extent_blocks=BLOCKS) as rig:
        pack = rig.make_pack(rng, LAYERS, LANES, RECORD_BYTES, TOKENS)
        epoch = rig.bind(0, [pack], TOKENS)
        records = np.sort(rng.choice(TOKENS, 60, replace=False)).astype(np.uint32)
        rig.plane.trace_accesses(60)
        for _ in range(2):
            gather(rig, epoch, 1, 0, records)
        heard, dropped = drain(rig)
        assert dropped == 0
        first, again = np.split(heard, 2)
        segment = LANES * TOKENS // PER_BLOCK  # where layer 1 begins, in blocks
        block = segment + records // PER_BLOCK
        for found in (first, again):
            assert found["extent"].tolist() == np.unique(block // BLOCKS).tolist()
            wanted = [sum(1 << b % BLOCKS for b in set(block[block // BLOCKS == e].tolist())) for e in found["extent"]]
            assert found["wanted"].tolist() == wanted
            assert found["records"].sum() == len(records)
        assert not first["hit"].any()
        assert again["hit"].all()
        assert np.unique(
            heard[["pack", "layer", "lane", "bulk", "worker", "owner", "slot", "slot_epoch"]]
        ).tolist() == [(int.from_bytes(pack.spec.build[:8], "little"), 1, 0, 0, rig.worker, rig.owner, 0, epoch)]
        assert (np.diff(heard["time_ns"].astype(np.int64)) >= 0).all()
        assert rig.ask(OP_RANGE, 0, run(0, epoch, lane=1, pair_count=TOKENS)).tolist() == [[OK, 0]]
        heard, _ = drain(rig)
        assert heard["bulk"].all()
        assert heard["records"].sum() == TOKENS


def test_an_extent_where_a_step_ends_is_told_of_twice_and_joined(directory: Path, rng: np.random.Generator) -> None:
    with Rig(directory, extent_blocks=BLOCKS) as rig:
        pack = rig.make_pack(rng, LAYERS, LANES, RECORD_BYTES, TOKENS)
        epoch = rig.bind(0, [pack], TOKENS)
        everything = np.arange(TOKENS, dtype=np.uint32)
        gather(rig, epoch, 0, 0, everything)
        records = np.delete(everything, rng.choice(TOKENS // 2, 1))  # a step copies half of them
        rig.plane.trace_accesses(60)
        for _ in range(2):
            gather(rig, epoch, 0, 0, records)
        heard, _ = drain(rig)
        rig.plane.end_accesses()
        per_extent = PER_BLOCK * BLOCKS
        extents = TOKENS // per_extent
        assert len(heard) > 2 * extents
        found = joined(heard)
        assert found["extent"].tolist() == 2 * list(range(extents))
        assert (found["wanted"] == (1 << BLOCKS) - 1).all()
        assert found["records"].tolist() == 2 * np.bincount(records // per_extent).tolist()
        assert found["hit"].all()


def test_one_listens_at_a_time_and_nothing_is_kept_for_nobody(directory: Path, rng: np.random.Generator) -> None:
    with Rig(directory) as rig:
        pack = rig.make_pack(rng, LAYERS, LANES, RECORD_BYTES, TOKENS)
        epoch = rig.bind(0, [pack], TOKENS)
        with pytest.raises(NativeError, match="nobody traces"):
            rig.plane.drain_accesses()
        rig.plane.trace_accesses(60)
        with pytest.raises(NativeError, match="somebody traces already"):
            rig.plane.trace_accesses(60)
        gather(rig, epoch, 0, 0, np.arange(9, dtype=np.uint32))
        rig.plane.end_accesses()
        rig.plane.end_accesses()
        rig.plane.trace_accesses(60)
        assert len(drain(rig)[0]) == 0
        rig.plane.end_accesses()
        rig.plane.trace_accesses(0)  # over at once, whether or not its listener comes back
        gather(rig, epoch, 0, 0, np.arange(9, dtype=np.uint32))
        assert len(drain(rig)[0]) == 0


def test_what_nobody_fetches_in_time_is_dropped_and_counted(directory: Path, rng: np.random.Generator) -> None:
    with Rig(directory, extent_blocks=1) as rig:
        pack = rig.make_pack(rng, LAYERS, LANES, RECORD_BYTES, TOKENS)
        epoch = rig.bind(0, [pack], TOKENS)
        rig.plane.trace_accesses(60)
        rounds = WAITING_MAX // TOKENS * PER_BLOCK + 5
        runs = np.concatenate([run(0, epoch, pair_count=TOKENS)] * 64)
        for _ in range(-(-rounds // 64)):
            assert (rig.ask(OP_RANGE, 0, runs)[:, 0] == OK).all()
        heard, dropped = drain(rig)
        assert len(heard) == WAITING_MAX
        assert dropped > 0
        assert len(heard) + dropped >= -(-rounds // 64) * 64 * TOKENS // PER_BLOCK
        until(lambda: len(drain(rig)[0]) == 0)
