"""tests/crash/doomed.py as a process that a test kills, stops and listens to."""

import contextlib
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.daemon_process import Daemon

ROOT = Path(__file__).parents[2]
START_S = 60.0


class DoomedProcess:
    """Up when the block begins, dead when it ends."""

    def __init__(self, daemon: Daemon, state: str) -> None:
        self._state = state
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.doomed", state, daemon.socket, daemon.broker],
            stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> Self:
        try:
            line = self.read_line(START_S)
            assert line == "up", f"{self._state}: {line}"
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def read_line(self, timeout_s: float) -> str:
        """The next line; `ended` when there is none any more."""
        try:
            return self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError(f"{self._state}: no line within {timeout_s} s") from None

    def read_until(self, beginning: str, timeout_s: float) -> str:
        deadline_s = time.monotonic() + timeout_s
        while not (line := self.read_line(max(deadline_s - time.monotonic(), 0.0))).startswith(beginning):
            assert not line.startswith("ended"), f"{self._state}: {line}"
        return line

    def drop_lines(self) -> None:
        """Forgets what was said so far."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._lines.get_nowait()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait_stopped(self) -> None:
        wait_stopped(self._process.pid)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(START_S)
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdout.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # closed under us
            for line in self._process.stdout:
                self._lines.put(line.rstrip("\n"))
        self._lines.put("ended")


def wait_stopped(pid: int, timeout_s: float = 5.0) -> None:
    """Returns when the process has come to a stop (SIGSTOP is not instant)."""
    deadline_s = time.monotonic() + timeout_s
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline_s, f"process {pid} did not stop"
        time.sleep(0.005)
