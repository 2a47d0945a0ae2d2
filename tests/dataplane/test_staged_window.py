"""Windows that are filled by copies of the driver, over a double of it that copies as late as it may."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from decode_worker._native import OP_GATHER, OP_PROBE, OP_RANGE
from decode_worker.window import imported
from decode_worker.window.kinds import WINDOWS
from kvstore_service._native import DataPlane, NativeError
from tests.support.gpu_double import GpuDouble, gpu_double
from tests.support.pretend_gpu import PretendGpu
from tests.support.rig import CANARY, ERROR, INTERNAL, OK, Rig, mapped, memfd, run

BYTES = 1 << 20
PLANE = (4 << 20, 8, 1)
LANE = ["cuMemHostAlloc", "cuStreamCreate"] * 2
SETUP = ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemsetD8", "cuMemcpyDtoH"]
TEARDOWN = ["cuStreamDestroy", "cuMemFreeHost"] * 2 + ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"]
LIMIT_S = 30


@pytest.fixture
def double(tmp_path: Path) -> Iterator[GpuDouble]:
    with gpu_double(tmp_path) as double:
        base = double.live()
        yield double
        assert double.faults() == []
        assert double.live() == base


@pytest.fixture
def staging() -> int:
    return memfd("staging", 4096)


def add_worker(plane: DataPlane, staging: int) -> int:
    return plane.add_worker(-1, BYTES, staging, 4096, 1, 0, window="staged")


def rig(directory: Path, double: GpuDouble, **options: object) -> Rig:
    return Rig(directory, window_kind="staged", window_options=double.options, **options)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("no_device", "cuInit: CUDA_ERROR_NO_DEVICE"),
        ("no_export", "no memory that can be exported"),
        ("stuck", "have not ended within 200 ms"),
        ("copy_spoils=65535", "delivered is not what the device holds"),
        ("full", "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"),
    ],
)
def test_a_device_that_cannot_is_refused_with_the_reason(tmp_path, words, reason):
    with gpu_double(tmp_path, words) as double:
        base = double.live()
        with pytest.raises(NativeError, match=reason) as refused:
            DataPlane(*PLANE, window="staged", **double.options)
        assert refused.value.code == ("RESOURCE_EXHAUSTED" if words == "full" else "FAILED_PRECONDITION")
        assert double.faults() == []
        assert (double.live() == base) == (words != "stuck"), "what may still be copied keeps its memory"


@pytest.mark.parametrize("copy_threads", [1, 3])
def test_a_window_is_made_and_given_back_in_order(double, staging, copy_threads):
    plane = DataPlane(4 << 20, 8, copy_threads, window="staged", **double.options)
    base, before = double.live(), len(double.calls())
    worker = add_worker(plane, staging)
    made = double.calls()[before:]
    assert [call for call in made if call in {*SETUP, *LANE}] == SETUP + LANE * copy_threads
    before = len(double.calls())
    plane.remove_worker(worker)
    assert double.calls()[before:] == TEARDOWN[:4] * copy_threads + TEARDOWN[4:]
    assert double.live() == base
    add_worker(plane, staging)  # a data plane gives back what its workers have left
    plane.close()


def test_a_call_that_fails_leaves_nothing_behind(double, staging):
    plane = DataPlane(*PLANE, window="staged", **double.options)
    base = double.live()
    for call in [*SETUP, *LANE[:2], "cuMemGetAllocationGranularity"]:
        double.set(f"fails={call}")
        with pytest.raises(NativeError, match=call) as failed:
            add_worker(plane, staging)
        assert failed.value.code == "FAILED_PRECONDITION"
        assert double.live() == base
    double.set("")
    plane.remove_worker(add_worker(plane, staging))
    plane.close()


@pytest.mark.parametrize(
    ("variant", "call"),
    [("", "cuMemcpyBatchAsync_v2"), ("cuda_12", "cuMemcpyBatchAsync"), ("old", "cuMemcpyHtoDAsync")],
)
def test_records_travel_in_batches_of_what_lies_together(tmp_path, directory, rng, variant, call):
    with gpu_double(tmp_path, variant=variant) as double:
        with rig(directory, double) as one:
            pack = one.make_pack(rng)
            epoch = one.bind(0, [pack], 512)
            before = len(double.calls())
            assert one.ask(OP_RANGE, 0, run(0, epoch, pair_count=512)).tolist() == [[OK, 0]]
            assert (one.lane(0, 0, 512) == pack.records[0, 0]).all()
            assert double.calls()[before:] == [call], "one piece of 256 KiB"
            before = len(double.calls())
            places = np.repeat(np.arange(0, 300, 3), 2) + np.tile([0, 1], 100)
            pairs = np.stack([np.arange(200), places], 1).astype(np.uint32)
            assert one.ask(OP_GATHER, 0, run(0, epoch, pair_count=200), pairs).tolist() == [[OK, 0]]
            assert double.calls()[before:] == [call] * (100 if variant == "old" else 1), "pairs of neighbours"
            assert (one.lane(0, 0, 512)[places] == pack.records[0, 0, :200]).all()
        assert double.faults() == []


def test_more_than_the_pinned_memory_holds_travels_in_turns(double, directory, rng):
    with rig(directory, double, staging_bytes=8 << 20, window_bytes=16 << 20) as one:
        pack = one.make_pack(rng, tokens=8192)
        epoch = one.bind(0, [pack], 3000)
        before = len(double.calls())
        for first in (0, 3000):
            runs = run(0, epoch, first_pair=first, pair_count=3000)
            assert one.ask(OP_RANGE, 0, runs).tolist() == [[OK, 0]]
            assert (one.lane(0, 0, 512)[:3000] == pack.records[0, 0, first : first + 3000]).all()
        assert double.calls()[before:].count("cuMemcpyBatchAsync_v2") == 2 * 6


def test_many_threads_fill_one_window_at_once(double, directory, rng):
    with rig(directory, double, copy_threads=4) as one:
        pack = one.make_pack(rng, lanes=4, tokens=2048)
        epoch = one.bind(0, [pack], 512)
        rings = [one.ring, *(one.add_ring() for _ in range(3))]
        failures = []

        def gather(lane: int) -> None:
            mine = np.random.default_rng(lane)
            for _ in range(30):
                records = np.sort(mine.choice(2048, 500, replace=False))
                pairs = np.stack([records, mine.permutation(512)[:500]], 1).astype(np.uint32)
                seq = rings[lane].post(OP_GATHER, 0, 0, run(0, epoch, lane=lane, pair_count=500), pairs, 10**7)
                ended = rings[lane].wait(seq, 10**7).tolist() == [[OK, 0]]
                if not ended or (one.lane(0, lane, 512)[pairs[:, 1]] != pack.records[0, lane, records]).any():
                    failures.append(lane)

        threads = [threading.Thread(target=gather, args=(lane,)) for lane in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert not failures


@pytest.mark.parametrize("words", ["fails=cuMemcpyBatchAsync_v2", "fails=cuStreamQuery", "stuck"])
def test_runs_end_in_errors_once_a_copy_has_failed(double, directory, rng, words):
    with rig(directory, double) as one, rig(directory, double, beside=one) as other:
        pack = one.make_pack(rng)
        epoch = one.bind(0, [pack], 512)
        runs = run(0, epoch, pair_count=64)
        assert one.ask(OP_RANGE, 0, runs).tolist() == [[OK, 0]]
        double.set(words)
        assert one.ask(OP_RANGE, 0, runs).tolist() == [[ERROR, INTERNAL]]
        double.set("")
        assert one.ask(OP_RANGE, 0, runs).tolist() == [[ERROR, INTERNAL]], "who knows what arrives later"
        epoch = other.bind(0, [pack], 512)
        assert other.ask(OP_RANGE, 0, run(0, epoch, pair_count=64)).tolist() == [[OK, 0]]
    del one, other


def test_a_device_that_stands_still_is_waited_for_once(tmp_path, directory, rng):
    """Or whoever registers anew there would hold up the copy thread's other workers each time. It is believed again."""

    def patience() -> float:
        began = time.monotonic()
        with rig(directory, double, beside=one) as other:
            epoch = other.bind(0, [pack], 512)
            ended = other.ask(OP_RANGE, 0, run(0, epoch, pair_count=64)).tolist()
        assert ended == ([[ERROR, INTERNAL]] if stuck else [[OK, 0]])
        return time.monotonic() - began

    with gpu_double(tmp_path) as double, rig(directory, double) as one:
        pack = one.make_pack(rng)
        stuck = True
        double.set("stuck")
        first, *later = [patience() for _ in range(4)]
        assert first >= 0.2
        assert min(later) < first - 0.15
        stuck = False
        double.set("")
        patience()
        stuck = True
        double.set("stuck")
        assert patience() >= 0.2


def test_a_worker_that_goes_under_a_copy_that_stands_still_leaves_its_memory_to_it(tmp_path, directory, rng):
    """The double tells of each mapping or pinned memory that ends under a copy."""
    with gpu_double(tmp_path) as double:
        with rig(directory, double) as one, rig(directory, double, beside=one) as other:
            pack = one.make_pack(rng)
            epoch = one.bind(0, [pack], 512)
            double.set("stuck")
            began = time.monotonic()
            assert one.ask(OP_RANGE, 0, run(0, epoch, pair_count=64)).tolist() == [[ERROR, INTERNAL]]
            assert time.monotonic() - began < LIMIT_S
            one.plane.remove_worker(one.worker)
            double.set("")
            epoch = other.bind(0, [pack], 512)
            assert other.ask(OP_RANGE, 0, run(0, epoch, pair_count=64)).tolist() == [[OK, 0]]
        assert double.faults() == []
        del one, other


def test_what_is_left_to_copies_that_stand_still_is_bounded_and_comes_back(tmp_path, directory):
    """Nobody counts the memory of a worker that has gone: whoever kept the device busy could have had it all, window by
    window."""
    with gpu_double(tmp_path) as double, rig(directory, double) as one:
        base, left, refusal = double.live(), 0, ""
        double.set("stuck")
        while not refusal and left < 20:
            try:
                with rig(directory, double, beside=one) as other:
                    assert other.ask(OP_PROBE, 0, run(0, 0, pair_count=1)).tolist() == [[ERROR, INTERNAL]]
            except NativeError as error:
                refusal = f"{error.code}: {error}"
            else:
                left += 1
        assert refusal.startswith("RESOURCE_EXHAUSTED")
        assert f"copies to {left} windows that are gone have not ended" in refusal
        assert double.live() > base
        double.set("")
        with rig(directory, double, beside=one) as other:
            assert other.ask(OP_PROBE, 0, run(0, 0, pair_count=1)).tolist() == [[OK, 0]]
        assert double.live() == base
        assert double.faults() == []
        del one, other


def test_a_worker_imports_its_window_and_outlives_the_other_end(double, staging, monkeypatch):
    monkeypatch.setattr(imported, "CUDA_LIBRARY", double.library)
    plane = DataPlane(*PLANE, window="staged", **double.options)
    worker = add_worker(plane, staging)
    fd = plane.window_descriptor(worker)
    device = mapped(fd, BYTES)
    assert not device.any(), "nothing of who had its memory before"
    window = WINDOWS["staged"]()(fd, BYTES, PretendGpu())
    device[64:70] = CANARY
    assert window.tensor[64:70].tolist() == [CANARY] * 6
    plane.remove_worker(worker)
    assert window.tensor[64:70].tolist() == [CANARY] * 6
    window.close()
    window.close()
    plane.close()
