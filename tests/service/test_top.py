"""kvctl top over a real daemon: its figures are those of what ran, and however it ends it says why."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvstore_service.kvctl.top import quantile
from tests.input.terminal import CTRL_C, Terminal
from tests.service.test_administration import ROOT, run
from tests.service.test_explain_slot import bound
from tests.support.daemon_process import Daemon
from tests.support.life import until
from tests.support.world import LAYERS, LAYOUT, TOKENS, TestWorker


def command(daemon: Daemon, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvstore_service.kvctl", "--socket", daemon.socket, "top", *arguments]


@contextmanager
def reading(worker: TestWorker) -> Iterator[None]:
    """Gathers, again and again, until the block ends."""
    session = worker.client.open_session(LAYOUT, 1024)
    pack = worker.commit(session, 1)
    worker.client.attach_packs(session, [pack])
    epoch = worker.client.bind_slot(session, 0, [pack], worker.windows(0))
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            worker.gather(0, epoch, np.arange(TOKENS, dtype=np.uint32))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
    finally:
        ended.set()
        reader.join(30)


def test_a_view_shows_what_runs(daemon: Daemon, worker: TestWorker) -> None:
    with reading(worker):
        shown = run(daemon, "top", "--once", "--json")
        table = run(daemon, "top", "--once")
    seen = json.loads(shown.stdout)
    gather = seen["times"]["gather"]
    assert gather["per_s"] > LAYERS
    assert seen["tickets_per_s"] == pytest.approx(gather["per_s"], rel=0.5)  # read one after the other
    assert 0 < gather["p50_us"] <= gather["p99_us"]
    assert seen["times"]["range"] == {"per_s": 0.0, "p50_us": None, "p99_us": None, "in_flight": 0.0}
    assert 0 < seen["dram_hit_ratio"] <= 1
    assert (seen["sessions"], seen["bound_slots"], seen["workers"], seen["state"]) == (1, 1, 1, "serving")
    assert seen["moved_bytes_per_s"] > 0
    (owner,) = seen["owners"]
    assert (owner["tenant"], owner["moved_share"], owner["dram_share"], owner["sessions"]) == (
        f"uid-{os.getuid()}", 1.0, 1.0, 1,
    )  # fmt: skip
    assert 0 < owner["dram_bytes"] == seen["frames_used"] * 16384
    assert table.returncode == 0
    assert "\x1b" not in table.stdout
    assert {line.split()[0] for line in table.stdout.splitlines() if line} >= {"DRAM", "NVMe", "queue", "gather"}


def test_an_idle_daemon_divides_by_nothing(daemon: Daemon) -> None:
    done = run(daemon, "top", "--json", "--every=0.2", "--timeout=1.2")
    assert done.returncode == 0
    views = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(views) >= 2
    assert views[0]["dram_hit_ratio"] is views[0]["read_mean_bytes"] is None
    assert views[0]["owners"] == []


def test_the_daemons_death_is_one_line(daemon: Daemon) -> None:
    watching = subprocess.Popen(
        command(daemon, "--json", "--every=0.3"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert watching.stdout is not None
    assert json.loads(watching.stdout.readline())["state"] == "serving"
    daemon.kill()
    _, said = watching.communicate(timeout=30)
    assert watching.returncode == 1
    assert said == "kvctl: the daemon has ended; start it again, see its log\n"


def test_ctrl_c_in_a_terminal_is_clean(daemon: Daemon, worker: TestWorker, tmp_path: Path) -> None:
    bound(worker, 0, times=1)
    terminal = Terminal(command(daemon, "--every=0.3"), tmp_path)
    try:
        terminal.wait_for("\x1b[2J\x1b[H")
        terminal.wait_for(f"uid-{os.getuid()}")
        terminal.text = ""
        terminal.wait_for("\x1b[H")  # drawn anew
        terminal.press(CTRL_C)
        assert terminal.end() == 130
        assert "Traceback" not in terminal.text
        assert "\x1b[2J" not in terminal.text
    finally:
        terminal.close()


def test_a_reader_that_leaves_ends_it_without_a_word(daemon: Daemon) -> None:
    watching = subprocess.Popen(
        command(daemon, "--every=0.2"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert watching.stdout is not None
    assert watching.stdout.readline().startswith("kvstored ")
    watching.stdout.close()
    watching.stdout = None
    _, said = watching.communicate(timeout=30)
    assert (watching.returncode, said) == (1, "")


def test_sigint_without_a_terminal_is_clean(daemon: Daemon) -> None:
    watching = subprocess.Popen(command(daemon), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    until(lambda: len(os.listdir(f"/proc/{watching.pid}/fd")) > 3, "a connection")
    assert watching.stdout is not None
    assert watching.stdout.readline()
    watching.send_signal(signal.SIGINT)
    _, said = watching.communicate(timeout=30)
    assert (watching.returncode, said) == (130, "")


@pytest.mark.parametrize("every", ["0", "-1", "nan", "inf", "soon"])
def test_an_interval_is_some_time(daemon: Daemon, every: str) -> None:
    done = run(daemon, "top", f"--every={every}")
    assert done.returncode == 2
    assert "write seconds" in done.stderr


def test_quantiles_are_even_within_a_bucket() -> None:
    bounds = [1, 2, 4, 8]
    assert quantile(bounds, [0, 0, 0, 0, 0], 0.5) is None
    assert quantile(bounds, [0, 0, 10, 0, 0], 0.5) == 3.0
    assert quantile(bounds, [10, 0, 0, 0, 0], 1.0) == 1.0
    assert quantile(bounds, [5, 0, 0, 5, 0], 0.5) == 1.0
    assert quantile(bounds, [5, 0, 0, 5, 0], 0.99) == pytest.approx(7.92)
    assert quantile(bounds, [1, 0, 0, 0, 99], 0.99) == 8.0
