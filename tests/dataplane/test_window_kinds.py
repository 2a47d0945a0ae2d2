"""What a run delivers does not depend on the kind of window, and goes through its interface alone."""

import numpy as np
import pytest

from decode_worker._native import OP_GATHER, OP_RANGE
from kvstore_service._native import WINDOW_KINDS, DataPlane, NativeError
from tests.support.gpu_double import gpu_double
from tests.support.rig import CANARY, OK, FaultyRig, run

LATE = "late"  # of test builds: records reach the worker's memory at the fence, not before


@pytest.mark.parametrize("kind", sorted({*WINDOW_KINDS, LATE}))
@pytest.mark.parametrize("copy_threads", [1, 2])
def test_a_cell_says_that_the_records_are_there(directory, rng, kind, copy_threads):
    with (
        gpu_double(directory) as double,
        FaultyRig(
            directory,
            window_kind=kind,
            window_options={**double.options, "arena_bytes": 1 << 19},
            copy_threads=copy_threads,
            dram_bytes=1 << 20,
        ) as rig,
    ):
        pack = rig.make_pack(rng, tokens=1024)
        epoch = rig.bind(0, [pack], 1024, gap=512)
        for _ in range(8):
            records = np.sort(rng.choice(1024, 300, replace=False))
            places = rng.permutation(1024)[:300]
            rig.window[:] = CANARY
            pairs = np.stack([records, places], 1).astype(np.uint32)
            assert rig.ask(OP_GATHER, 1, run(0, epoch, lane=1, pair_count=300), pairs).tolist() == [[OK, 0]]
            assert (rig.lane(1, 1, 512)[places] == pack.records[1, 1, records]).all()
        assert rig.ask(OP_RANGE, 0, run(0, epoch, first_pair=0, pair_count=1024)).tolist() == [[OK, 0]]
        assert (rig.lane(0, 0, 512)[:1024] == pack.records[0, 0]).all()


def test_an_unknown_kind_is_refused():
    with pytest.raises(NativeError, match=f"pigeon.*{WINDOW_KINDS[0]}") as refused:
        DataPlane(4 << 20, 8, 1, window="pigeon")
    assert refused.value.code == "INVALID_ARGUMENT"
