"""A real daemon with windows in a GPU's memory, over doubles: registration, service, and the death of either side."""

import gc
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from decode_worker.transport import Transport
from decode_worker.window.base import WindowError
from decode_worker.window.gdr import GdrWindow
from kvstore_service.client import AdminClient, RingGeometry, StoreClient, StoreError
from tests.support.daemon_process import Daemon
from tests.support.gpu_double import GpuDouble, daemon_over, double, gpu_daemon
from tests.support.pretend_gpu import PretendGpu
from tests.support.world import LAYOUT, TOKENS, TestWorker, expected

__all__ = ["double", "gpu_daemon"]

TEARDOWN = ["gdr_unmap", "gdr_unpin_buffer", "cuMemUnmap", "cuMemAddressFree", "cuMemRelease"]
RING = RingGeometry(4, 64, 4096, device=True)
STEPPING = 256  # struct RequestsHeader in csrc/core/ring.h
WINDOW_BYTES = 1 << 20

DOOMED = """
import sys, time
from kvstore_service.client import RingGeometry, StoreClient
client = StoreClient.connect(*sys.argv[1:3], "doomed")
ring = RingGeometry(4, 64, 4096, device=True)
memory = client.register_worker(1, 1 << 20, 4096, [ring], window_kinds=("gdr",))
print(memory.window_kind, flush=True)
time.sleep(60)
"""


def connect(daemon: Daemon, name: str) -> StoreClient:
    return StoreClient.connect(daemon.socket, daemon.broker, name)


def transport(client: StoreClient, *kinds: str) -> Transport:
    return Transport(
        client, PretendGpu(), slots=1, window_bytes=WINDOW_BYTES, staging_bytes=4096, decode_ring=RING,
        bulk_ring=RingGeometry(4, 64, 4096), wait_ms=10_000, windows=kinds,
    )  # fmt: skip


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)


def test_records_arrive_in_both_kinds_of_windows_at_once(gpu_daemon: Daemon) -> None:
    with connect(gpu_daemon, "cpu") as cpu, connect(gpu_daemon, "gpu") as gpu:
        on_cpu, on_gpu = TestWorker(cpu), TestWorker(gpu, window_kinds=("shm", "gdr"))
        assert (on_cpu.memory.window_kind, on_gpu.memory.window_kind) == ("shm", "gdr")
        session = cpu.open_session(LAYOUT, 4 * TOKENS)
        pack = on_cpu.commit(session, 1)
        records = np.arange(0, TOKENS, 3, dtype=np.uint32)
        for worker, client in ((on_cpu, cpu), (on_gpu, gpu)):
            mine = client.open_session(LAYOUT, 4 * TOKENS)
            client.attach_packs(mine, [pack])
            epoch = client.bind_slot(mine, 0, [pack], worker.windows(0))
            assert (worker.gather(0, epoch, records) == expected([1], records)).all()
        on_cpu.close()
        on_gpu.close()


def test_a_worker_gets_a_window_that_it_can_map(gpu_daemon: Daemon) -> None:
    with connect(gpu_daemon, "gpu") as client:
        mapped = transport(client, "gdr")
        assert isinstance(mapped.window, GdrWindow)
        mapped.close()
    with (
        connect(gpu_daemon, "strange") as client,
        pytest.raises(StoreError, match=r"gdr, pull, staged, shm.*pigeon") as refused,
    ):
        client.register_worker(1, WINDOW_BYTES, 4096, [RING], window_kinds=("pigeon",))
    assert refused.value.code == "FAILED_PRECONDITION"


def test_a_device_may_post_within_steps_alone(gpu_daemon: Daemon) -> None:
    with connect(gpu_daemon, "gpu") as client:
        mapped = transport(client, "gdr")
        stepping = mapped.decode.requests[STEPPING : STEPPING + 8].view(np.uint64)
        seen = []
        for _ in range(2):
            with mapped.steps():
                seen.append(int(stepping[0]))
            assert not stepping[0]
        assert seen[0] != seen[1]
        assert all(seen)
        mapped.close()


class Interrupted(PretendGpu):
    """What was launched has ended at the third look; or the device has failed."""

    def __init__(self, mark: Callable[[], int], fails: bool) -> None:
        super().__init__()
        self._mark, self._fails = mark, fails
        self.seen: list[int] = []

    def idle(self) -> bool:
        self.seen.append(self._mark())
        if self._fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return len(self.seen) == 3


@pytest.mark.parametrize(("fails", "looks"), [(False, 3), (True, 1)])
def test_what_was_launched_is_served_to_its_end_behind_an_error(gpu_daemon: Daemon, fails: bool, looks: int) -> None:
    with connect(gpu_daemon, "gpu") as client:
        mapped = transport(client, "gdr")
        stepping = mapped.decode.requests[STEPPING : STEPPING + 8].view(np.uint64)
        device = Interrupted(lambda: int(stepping[0]), fails)
        mapped._device = device
        with pytest.raises(KeyboardInterrupt), mapped.steps():
            raise KeyboardInterrupt
        assert len(device.seen) == looks
        assert all(device.seen), "the daemon still looked for tickets"
        assert not stepping[0]
        mapped.close()


def test_a_device_that_hangs_does_not_hide_what_went_wrong(gpu_daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    with connect(gpu_daemon, "gpu") as client:
        mapped = transport(client, "gdr")
        mapped.wait_us = 10_000
        monkeypatch.setattr(mapped._device, "idle", lambda: False)
        with pytest.raises(ValueError, match="this"), mapped.steps():
            raise ValueError("this")
        mapped.close()


def test_all_is_closed_though_the_device_has_failed(gpu_daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def failed() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with connect(gpu_daemon, "gpu") as client:
        mapped = transport(client, "gdr")
        monkeypatch.setattr(mapped._device, "close", failed)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            mapped.close()
        assert mapped.decode.poisoned
        assert mapped.bulk.poisoned
        assert not mapped.window.tensor.numel()
        assert not mapped.staging.memory.size


def test_status_and_log_say_why_there_are_no_windows_on_a_gpu(tmp_path: Path) -> None:
    missing = "/nowhere/libcuda.so.1"
    with Daemon(tmp_path, options=("--nvme-bytes=1GiB", f"--cuda-library={missing}")) as daemon:
        with AdminClient.connect(daemon.socket, daemon.broker) as admin:
            status = admin.get_status()
        assert status.window_kind == "pull"
        assert [refused.split(": ")[0] for refused in status.windows_refused] == ["gdr", "staged"]
        assert all(missing in refused for refused in status.windows_refused)
        why = rf"window gdr: .* are pull, shm, the worker can map gdr \(gdr: .*{missing}"
        with connect(daemon, "gpu") as client, pytest.raises(StoreError, match=why):
            transport(client, "gdr")


def test_a_daemon_that_is_told_to_have_them_does_not_start_without(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "kvstore_service.daemon.server", "--window=gdr", "--cuda-library=/nowhere/libcuda"]
    paths = [f"--{name}={tmp_path / name}" for name in ("data-dir", "socket", "broker")]
    done = subprocess.run([*argv, *paths, "--metrics-addr=off"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "/nowhere/libcuda" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_window_of_a_killed_worker_is_given_back(gpu_daemon: Daemon, double: GpuDouble) -> None:
    argv = [sys.executable, "-c", DOOMED, str(gpu_daemon.socket), str(gpu_daemon.broker)]
    environment = {name: value for name, value in os.environ.items() if name != "GPU_DOUBLE_LOG"}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment) as worker:
        assert worker.stdout
        assert worker.stdout.readline() == "gdr\n"
        before = len(double.calls())
        worker.kill()
        worker.wait(10)
    eventually(lambda: double.calls()[before:] == TEARDOWN)


def test_the_window_of_a_killed_daemon_stays_valid(gpu_daemon: Daemon) -> None:
    with connect(gpu_daemon, "gpu") as client:
        mapped = transport(client, "gdr")
        mapped.window.tensor[:64] = 7
        gpu_daemon.kill()
        assert mapped.window.tensor[:64].tolist() == [7] * 64
        mapped.close()


def test_a_daemon_gives_everything_back_when_it_ends(gpu_daemon: Daemon, double: GpuDouble) -> None:
    with connect(gpu_daemon, "gpu") as client:
        mapped = transport(client, "gdr")
        gpu_daemon.stop()
        mapped.close()
    calls = double.calls()
    assert calls.count("cuDevicePrimaryCtxRetain") - calls.count("cuDevicePrimaryCtxRelease") == 0
    assert calls.count("gdr_open") == calls.count("gdr_close") == 1
    for made, ended in (("cuMemMap", "cuMemUnmap"), ("gdr_map_v2", "gdr_unmap")):
        assert calls.count(made) == calls.count(ended)


SPOILT = "bar_spoils=70000"  # behind what the daemon tries at its start
NOT_SEEN = "bar_deaf=70000"


def registered(daemon: Daemon) -> int:
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        return int(admin.get_status().workers)


def shared(pid: int | str = "self") -> list[str]:
    """What a process holds open of memory that it shares: windows, staging memory, rings, a GPU's."""
    links = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # of the look itself, or closed meanwhile
            links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return sorted(link for link in links if link.startswith("/memfd:"))


OTHERS = tuple(name for name in PretendGpu.windows if name != "pull")  # than the one that needs no GPU of the daemon


@pytest.mark.parametrize(
    ("words", "kinds", "taken", "refused"),
    [
        (SPOILT, PretendGpu.windows, "pull", {"gdr": "cannot read back what it has delivered"}),
        (SPOILT, OTHERS, "staged", {"gdr": "cannot read back what it has delivered"}),
        (NOT_SEEN, OTHERS, "staged", {"gdr": "kernels see .* otherwise than the daemon delivers them"}),
        (f"{NOT_SEEN} copy_spoils=70000", OTHERS, "bounce", {"gdr": "kernels see", "staged": "cannot read back"}),
        (
            "no_module no_export", OTHERS, "bounce",
            {"gdr": r"the daemon's windows are pull, shm.*no memory", "staged": "no memory"},
        ),
    ],
)  # fmt: skip
def test_the_best_window_that_works_is_taken_and_nothing_is_left_of_the_others(
    tmp_path: Path, double: GpuDouble, words: str, kinds: tuple[str, ...], taken: str, refused: dict[str, str]
) -> None:
    with daemon_over(tmp_path, double, words) as daemon:
        assert registered(daemon) == 0
        gc.collect()
        made, mine, its = double.live(), [link for link in shared() if "gpu" in link], shared(daemon.pid)
        with connect(daemon, "gpu") as client:
            mapped = transport(client, *kinds)
            assert mapped.window_name == taken
            assert list(mapped.windows_refused) == list(refused)
            for name, reason in refused.items():
                assert re.search(reason, mapped.windows_refused[name])
            assert registered(daemon) == 1
            mapped.close()
            del mapped  # with the pretended graph, which remembers tensors
            gc.collect()
        eventually(lambda: registered(daemon) == 0)
        eventually(lambda: shared(daemon.pid) == its)
        assert [link for link in shared() if "gpu" in link] == mine
        assert double.live() == made
        calls = double.calls()
        ends = {"cuMemMap": "cuMemUnmap", "gdr_map_v2": "gdr_unmap", "cuMemHostAlloc": "cuMemFreeHost"}
        for begun, ended in ends.items():
            assert calls.count(begun) == calls.count(ended)


def test_a_window_on_another_gpu_than_the_worker_s_is_not_taken(tmp_path: Path, double: GpuDouble) -> None:
    with daemon_over(tmp_path, double, "uuid=255") as daemon, connect(daemon, "gpu") as client:
        double.set("")
        why = (
            r"the daemon's GPU is 00010203-0405-0607-0809-0a0b0c0d0eff, this worker's is "
            r"00010203-0405-0607-0809-0a0b0c0d0e0f: set the daemon's `gpu`, or this worker's CUDA_VISIBLE_DEVICES"
        )
        with pytest.raises(WindowError, match=f"^window gdr: {why}$"):
            transport(client, "gdr")
        calls = double.calls()
        mapped = transport(client, *OTHERS)
        assert mapped.window_name == "bounce"
        assert list(mapped.windows_refused) == ["gdr", "staged"]
        assert all(re.fullmatch(why, reason) for reason in mapped.windows_refused.values())
        assert "cuMemImportFromShareableHandle" not in calls
        mapped.close()


def test_a_window_that_was_asked_for_is_an_error_with_its_reason(tmp_path: Path, double: GpuDouble) -> None:
    with daemon_over(tmp_path, double, SPOILT) as daemon, connect(daemon, "gpu") as client:
        for _ in range(3):
            with pytest.raises(WindowError, match=r"^window gdr: the daemon cannot read back .* to bytes \d+ to \d+$"):
                transport(client, "gdr")
            assert registered(daemon) == 0
        mapped = transport(client, "staged")
        assert (mapped.window_name, mapped.windows_refused) == ("staged", {})
        mapped.close()


def test_without_any_all_reasons_are_told(tmp_path: Path, double: GpuDouble) -> None:
    with daemon_over(tmp_path, double, f"{SPOILT} copy_spoils=70000") as daemon, connect(daemon, "gpu") as client:
        with pytest.raises(WindowError, match=r"^window gdr: the daemon cannot.*; window staged: the daemon cannot"):
            transport(client, "gdr", "staged")
        assert registered(daemon) == 0


def test_memory_is_given_back_unless_a_slot_needs_it(gpu_daemon: Daemon) -> None:
    with connect(gpu_daemon, "cpu") as client:
        client.unregister_worker("nothing is registered")
        worker = TestWorker(client)
        session = client.open_session(LAYOUT, 4 * TOKENS)
        pack = worker.commit(session, 1)
        client.attach_packs(session, [pack])
        client.bind_slot(session, 0, [pack], worker.windows(0))
        with pytest.raises(StoreError, match="slots 0 are bound") as refused:
            client.unregister_worker("still in use")
        assert (refused.value.code, refused.value.reason) == ("FAILED_PRECONDITION", "SLOTS_BOUND")
        client.unbind_slot(0)
        client.unregister_worker("x" * 10_000)
        worker.close()
        anew = TestWorker(client)
        epoch = client.bind_slot(session, 0, [pack], anew.windows(0))
        records = np.arange(0, TOKENS, 3, dtype=np.uint32)
        assert (anew.gather(0, epoch, records) == expected([1], records)).all()
        anew.close()
