"""A trace of accesses as an operator takes it: a file that numpy reads, and nothing left of it when he leaves."""

import json
import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import grpc
import numpy as np
import pytest

from kvstore_service import kvctl
from kvstore_service._proto import admin_service_pb2 as admin_pb
from kvstore_service.client import AdminClient, StoreError
from tests.service.test_administration import ROOT
from tests.support.daemon_process import Daemon
from tests.support.life import until
from tests.support.world import LANES, LAYERS, LAYOUT, TOKENS, TestWorker


def read_all(worker: TestWorker, times: int) -> None:
    """Gathers of a session of its own."""
    session = worker.client.open_session(LAYOUT, 1024)
    pack = worker.commit(session, 1)
    worker.client.attach_packs(session, [pack])
    epoch = worker.client.bind_slot(session, 0, [pack], worker.windows(0))
    for _ in range(times):
        worker.gather(0, epoch, np.arange(TOKENS, dtype=np.uint32))


def kvctl_trace(daemon: Daemon, file: Path, seconds: float) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "kvstore_service.kvctl", "--socket", daemon.socket, "--format=json", "trace"]
    return subprocess.Popen(
        [*command, f"--seconds={seconds}", str(file)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )  # fmt: skip


def test_kvctl_trace_writes_an_array(daemon: Daemon, worker: TestWorker, tmp_path: Path) -> None:
    tracing = kvctl_trace(daemon, file := tmp_path / "accesses.npy", 4)
    until(lambda: file.exists() and file.stat().st_size > 0, "the trace to begin")
    read_all(worker, times=3)
    said, _ = tracing.communicate(timeout=30)
    assert tracing.returncode == 0
    accesses = np.load(file)
    assert json.loads(said) == {"accesses": len(accesses), "dropped": 0}
    assert accesses["hit"].any()
    assert (accesses["owner"] == os.getuid()).all()
    assert (accesses["wanted"] > 0).all()
    assert accesses["records"].sum() == 3 * LAYERS * LANES * TOKENS


def test_nothing_is_left_of_a_tracer_that_dies(daemon: Daemon, admin: AdminClient, tmp_path: Path) -> None:
    tracing = kvctl_trace(daemon, file := tmp_path / "accesses.npy", 600)
    until(lambda: file.exists() and file.stat().st_size > 0, "the trace to begin")
    with pytest.raises(StoreError, match=r"FAILED_PRECONDITION.*somebody traces already"):
        next(admin.trace(1))
    tracing.kill()
    tracing.communicate()

    def ours() -> bool:
        try:
            answers = admin.trace(0.1)
            fields = json.loads(next(answers).fields)
            answers.close()  # type: ignore[attr-defined]
        except StoreError as error:
            if error.code != "FAILED_PRECONDITION":
                raise
            return False
        return "wanted" in dict(fields)

    until(ours, "the dead tracer's end")
    until(ours, "the end of one that left")


@pytest.mark.parametrize("method", ["trace", "watch"])
def test_a_stream_ends_with_the_token_that_began_it(daemon: Daemon, method: str) -> None:
    """Whoever has got a token of `kvctl token` hears nothing more once that has ended."""
    owner, other = (AdminClient.connect(daemon.socket, daemon.broker) for _ in range(2))
    with closing(owner), closing(other):
        stub, token = other._stub, (("kvstore-token", owner.token),)
        answers = (
            stub.TraceAccesses(admin_pb.TraceAccessesRequest(seconds=600), timeout=60, metadata=token)
            if method == "trace"
            else stub.WatchEvents(admin_pb.WatchEventsRequest(), timeout=60, metadata=token)
        )
        next(answers)
        owner.close()
        with pytest.raises(grpc.RpcError) as ended:
            list(answers)
        assert ended.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_bounds_of_a_trace(daemon: Daemon, admin: AdminClient, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for seconds in (0.0, -1.0, 1e9, float("nan")):
        with pytest.raises(StoreError, match="INVALID_ARGUMENT"):
            next(admin.trace(seconds))
    started = time.monotonic()
    assert sum(len(answer.accesses) for answer in admin.trace(0.2)) == 0
    assert time.monotonic() - started >= 0.2
    missing = tmp_path / "nowhere" / "file.npy"
    assert kvctl.main(["--socket", daemon.socket, "trace", "--seconds=1", str(missing)]) == 1
    assert f"{missing}: No such file or directory; choose another file" in capsys.readouterr().err


def test_the_status_names_the_policy(admin: AdminClient) -> None:
    assert admin.get_status().tier_policy == admin.get_config().values["tier_policy"]
