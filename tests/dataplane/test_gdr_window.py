"""Windows that are stored to over the bus, over doubles of the driver and of GDRCopy, which deliver stores as late as
they may."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from decode_worker._native import OP_RANGE
from decode_worker.window import imported as imported_module
from decode_worker.window.kinds import WINDOWS
from kvstore_service._native import DataPlane, NativeError
from tests.support.gpu_double import GpuDouble, gpu_double
from tests.support.pretend_gpu import PretendGpu
from tests.support.rig import ABORTED, CANARY, ERROR, INTERNAL, OK, STALE, Rig, mapped, memfd, run

BYTES = 1 << 20
PLANE = (4 << 20, 8, 1)
SETUP = ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemsetD8", "cuMemcpyDtoH"]
TEARDOWN = ["gdr_unmap", "gdr_unpin_buffer", "cuMemUnmap", "cuMemAddressFree", "cuMemRelease"]
FLUSHES = ["cuFlushGPUDirectRDMAWrites", "gdr_copy_from_mapping"]


@pytest.fixture
def double(tmp_path: Path) -> Iterator[GpuDouble]:
    with gpu_double(tmp_path) as double:
        base = double.live()
        yield double
        assert double.faults() == []
        assert double.live() == base


def add_worker(plane: DataPlane, staging: int, window_bytes: int = BYTES) -> int:
    return plane.add_worker(-1, window_bytes, staging, 4096, 1, 0, window="gdr")


@pytest.fixture
def staging() -> int:
    return memfd("staging", 4096)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("no_device", "cuInit: CUDA_ERROR_NO_DEVICE"),
        ("no_rdma", "no GPUDirect RDMA"),
        ("no_export", "no memory that can be exported"),
        ("no_module", "gdrdrv"),
        ("ordering=0 flush=0", "neither orders .* nor lets the host flush"),
        ("deaf", "delivered is not what the device holds"),
        ("ordering=0 deaf", "delivered is not what the device holds"),
        ("full", "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"),
    ],
)
def test_auto_takes_what_works_and_says_why_not_the_others(double, words, reason):
    double.set(words)
    plane = DataPlane(*PLANE, window="auto", **double.options)
    refused = dict(plane.windows_refused)
    needs_no_bus = words not in {"no_device", "no_export", "full"}
    assert plane.window_kinds == (["staged", "shm"] if needs_no_bus else ["shm"])
    assert set(refused) == ({"gdr", "pull"} if needs_no_bus else {"gdr", "pull", "staged"})
    why = refused["gdr"]
    with pytest.raises(NativeError, match=reason) as refused:
        DataPlane(*PLANE, window="gdr", **double.options)
    plane.close()
    assert str(refused.value) == why
    assert refused.value.code == ("RESOURCE_EXHAUSTED" if words == "full" else "FAILED_PRECONDITION")


def test_without_a_driver_windows_lie_in_shared_memory():
    plane = DataPlane(*PLANE, window="auto", cuda_library="/nowhere/libcuda.so.1")
    assert plane.window_kinds == ["shm"]
    refused = dict(plane.windows_refused)
    assert list(refused) == ["gdr", "pull", "staged"]
    assert all("/nowhere/libcuda.so.1" in refused[kind] for kind in ("gdr", "staged"))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("short", "cut short or broken"),
        ("fifo", "did not load within"),
        ("hangs", "did not load within"),
        ("none", "without a name"),
    ],
)
def test_a_library_that_is_none_ends_nobody(tmp_path, kind, reason):
    """An update that is under way leaves half a file: mapping that kills, and a FIFO opens when somebody writes. What a
    library does first may wait for good, whatever the signal."""
    path = tmp_path / "libcuda.so.1"
    if kind == "short":
        with gpu_double(tmp_path) as double:
            whole = Path(double.library).read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "hangs":
        source = "#include <signal.h>\n#include <unistd.h>\n__attribute__((constructor)) void f(void) {"
        source += "signal(SIGALRM, SIG_IGN), signal(SIGTERM, SIG_IGN); for (;;) pause();}"
        compile_it = ["gcc", "-x", "c", "-shared", "-fPIC", "-o", path, "-"]
        subprocess.run(compile_it, input=source, text=True, check=True, timeout=60)
    library = "" if kind == "none" else str(path)
    program = (
        "import sys; from kvstore_service._native import DataPlane; "
        f"print(DataPlane(*{PLANE}, window='auto', cuda_library=sys.argv[1]).windows_refused)"
    )
    command = [sys.executable, "-c", program, library]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert reason in done.stdout


@pytest.mark.parametrize("old", [False, True])
def test_a_window_is_made_and_given_back_in_order(tmp_path, staging, old):
    with gpu_double(tmp_path, variant="old" if old else "") as double:
        unused = double.live()
        plane = DataPlane(*PLANE, window="gdr", **double.options)
        before = len(double.calls())
        base = double.live()
        worker = add_worker(plane, staging)
        made = double.calls()[before:]
        pin = ["gdr_pin_buffer", "gdr_map"] if old else ["gdr_pin_buffer_v2", "gdr_map_v2"]
        assert [call for call in made if call != "cuMemGetAllocationGranularity"] == SETUP + pin
        assert double.live() > base
        before = len(double.calls())
        plane.remove_worker(worker)
        assert double.calls()[before:] == TEARDOWN
        assert double.live() == base
        add_worker(plane, staging)  # a data plane gives back what its workers have left
        plane.close()
        assert double.calls()[-2:] == ["gdr_close", "cuDevicePrimaryCtxRelease"]
        assert double.live() == unused
        assert double.faults() == []


def test_a_call_that_fails_leaves_nothing_behind(double, staging):
    plane = DataPlane(*PLANE, window="gdr", **double.options)
    base = double.live()
    for call in [*SETUP, "gdr_pin_buffer_v2", "gdr_map_v2", "cuMemGetAllocationGranularity"]:
        double.set(f"fails={call}")
        with pytest.raises(NativeError, match=call.removesuffix("_v2")) as failed:
            add_worker(plane, staging)
        assert failed.value.code == "FAILED_PRECONDITION"
        assert double.live() == base
    for full, reason in (("full", "OUT_OF_MEMORY"), ("bar_full", "gdr_pin_buffer: Cannot allocate memory")):
        double.set(full)
        with pytest.raises(NativeError, match=reason) as failed:
            add_worker(plane, staging)
        assert failed.value.code == "RESOURCE_EXHAUSTED"
        assert double.live() == base
    double.set("")
    plane.remove_worker(add_worker(plane, staging))
    plane.close()


def test_a_window_shows_nothing_of_who_had_its_memory_before(double, staging):
    plane = DataPlane(*PLANE, window="gdr", **double.options)
    assert not mapped(plane.window_descriptor(add_worker(plane, staging)), BYTES).any()


@pytest.mark.parametrize(
    ("words", "flush"),
    [
        ("ordering=0 flush=1", "cuFlushGPUDirectRDMAWrites"),
        ("ordering=0 flush=3", "cuFlushGPUDirectRDMAWrites"),
        ("ordering=100 flush=1", "gdr_copy_from_mapping"),  # a flush by the driver would do nothing there
        ("ordering=200 flush=0", "gdr_copy_from_mapping"),
    ],
)
def test_the_flush_is_the_one_that_the_device_needs(double, directory, rng, words, flush):
    double.set(words)
    with Rig(directory, window_kind="gdr", window_options=double.options) as rig:
        pack = rig.make_pack(rng)
        epoch = rig.bind(0, [pack], 512)
        before = len(double.calls())
        for _ in range(5):
            rig.window[:] = CANARY
            assert rig.ask(OP_RANGE, 0, run(0, epoch, pair_count=512)).tolist() == [[OK, 0]]
            assert (rig.lane(0, 0, 512) == pack.records[0, 0]).all()
        assert set(double.calls()[before:]) == {flush}


def test_what_delivers_nothing_is_not_flushed(double, directory, rng):
    """Each of many runs that are given up at once would hold up the copy thread, and whoever shares it."""
    double.set("ordering=0")
    with Rig(directory, window_kind="gdr", window_options=double.options) as rig:
        pack = rig.make_pack(rng)
        epoch = rig.bind(0, [pack], 512)
        before = len(double.calls())
        runs = np.concatenate([run(0, epoch + 1, pair_count=512)] * 63 + [run(0, epoch)])
        assert rig.ask(OP_RANGE, 0, runs).tolist() == [[STALE, ABORTED]] * 63 + [[OK, 0]]
        assert double.calls()[before:] == []


def test_runs_end_in_errors_once_a_flush_has_failed(double, directory, rng):
    double.set("ordering=0")
    options = {"window_kind": "gdr", "window_options": double.options}
    with Rig(directory, **options) as rig, Rig(directory, beside=rig, **options) as other:
        pack = rig.make_pack(rng)
        epoch = rig.bind(0, [pack], 512)
        runs = run(0, epoch, pair_count=64)
        assert rig.ask(OP_RANGE, 0, runs).tolist() == [[OK, 0]]
        before = rig.plane.stats()
        double.set("ordering=0 fails=cuFlushGPUDirectRDMAWrites")
        assert rig.ask(OP_RANGE, 0, runs).tolist() == [[ERROR, INTERNAL]]
        double.set("ordering=0")
        assert rig.ask(OP_RANGE, 0, runs).tolist() == [[ERROR, INTERNAL]], "who knows what the device saw meanwhile"
        after = rig.plane.stats()
        assert (after["runs_ok"] - before["runs_ok"], after["runs_error"] - before["runs_error"]) == (0, 2)
        epoch = other.bind(0, [pack], 512)
        assert other.ask(OP_RANGE, 0, run(0, epoch, pair_count=64)).tolist() == [[OK, 0]]
    del rig, other


# --- the worker's side ---


@pytest.fixture
def imported(double, staging, monkeypatch) -> Iterator[tuple[DataPlane, int]]:
    monkeypatch.setattr(imported_module, "CUDA_LIBRARY", double.library)
    plane = DataPlane(*PLANE, window="gdr", **double.options)
    yield plane, add_worker(plane, staging)
    plane.close()


def test_a_worker_imports_its_window(imported):
    plane, worker = imported
    fd = plane.window_descriptor(worker)
    device = mapped(fd, BYTES)
    window = WINDOWS["gdr"]()(fd, BYTES, PretendGpu())
    device[64:70] = np.frombuffer(b"record", np.uint8)
    assert bytes(window.tensor[64:70].tolist()) == b"record"
    assert window.landing is window.tensor
    window.close()
    window.close()


def test_either_side_outlives_the_other(imported, double):
    plane, worker = imported
    window = WINDOWS["gdr"]()(plane.window_descriptor(worker), BYTES, PretendGpu())
    plane.remove_worker(worker)
    window.tensor[:64] = 7
    assert window.tensor[:64].tolist() == [7] * 64
    window.close()
    with pytest.raises(RuntimeError, match="closed"):
        PretendGpu().at(window._imported.address, BYTES)


def test_what_is_no_window_is_not_imported(imported, double):
    base = double.live()
    with pytest.raises(RuntimeError, match=r"cuMemMap|cuMemImport"):
        WINDOWS["gdr"]()(memfd("small", 4096), BYTES, PretendGpu())
    assert double.live() == base
